"""Transpose 16 vectors of 16 lanes, as shuffles of whole vectors.

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
