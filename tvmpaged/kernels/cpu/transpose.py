"""Transpose 16 vectors of 16 lanes, or of 32 halves, as shuffles of whole vectors.

Four stages; that of width w swaps, between the vectors i and i + w, the lanes that are out of place
by w. Where only the first few vectors of the result are used, the compiler drops the shuffles that
lead to the others; taking the widest first leaves the fewest.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvmpaged.kernels.cpu.registers import Register

SIDE = 16
_LANES = range(SIDE)


def shuffle(a: Any, b: Any, lanes: list[int]) -> Any:
    """Pick lanes of two vectors laid end to end."""
    return tirx.Shuffle([a, b], [tirx.const(lane, "int32") for lane in lanes])


def _low(a: Any, b: Any, width: int) -> Any:
    return shuffle(a, b, [SIDE + i - width if i & width else i for i in _LANES])


def _high(a: Any, b: Any, width: int) -> Any:
    return shuffle(a, b, [SIDE + i if i & width else i + width for i in _LANES])


def transpose(rows: list[Register]) -> None:
    """Emit the transposition of 16 registers, in place."""
    for width in (8, 4, 2, 1):
        for i in (i for i in _LANES if not i & width):
            a, b = rows[i].value, rows[i + width].value
            low = Register(SIDE, rows[i].dtype)
            low.set(_low(a, b, width))
            rows[i + width].set(_high(a, b, width))
            rows[i] = low


def transpose_halves(columns: list[Register]) -> list[Register]:
    """Emit the transposition of 16 vectors of 32 halves; return its lines, ``[16, 32]``.

    Vector k holds column k and, behind it, column k + 16. Four stages, each an instruction a
    vector, put runs of lanes of two vectors in turn: what told the two vectors apart becomes a
    place in them, and the reverse.
    """
    for stage, run in enumerate((1, 2, 4, 8)):
        for i in (i for i in _LANES if not i >> stage & 1):
            _in_turn(columns, i, i + (1 << stage), run)
    # Three bits of a line's number are where its lanes' order ended up.
    return [columns[i & 8 | (i & 1) << 2 | i & 2 | (i & 4) >> 2] for i in _LANES]


def _in_turn(vectors: list[Register], first: int, second: int, run: int) -> None:
    """Emit runs of two vectors in turn: of the lower halves of stretches, and of the upper."""
    count, half = 2 * SIDE, max(4, run)
    low = [
        lane + i + vector * count
        for stretch in range(0, count, 2 * half)
        for lane in range(stretch, stretch + half, run)
        for vector in range(2)
        for i in range(run)
    ]
    a, b = (tirx.reinterpret(f"uint16x{count}", vectors[each].value) for each in (first, second))
    lower = Register(SIDE, vectors[first].dtype)
    whole = f"{lower.dtype}x{SIDE}"
    lower.set(tirx.reinterpret(whole, shuffle(a, b, low)))
    upper = tirx.reinterpret(whole, shuffle(a, b, [lane + half for lane in low]))
    vectors[second].set(upper)
    vectors[first] = lower
