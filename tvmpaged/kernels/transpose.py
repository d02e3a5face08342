"""Transpose 16 vectors of 16 lanes, as shuffles of whole vectors.

Four stages; that of width w swaps, between the vectors i and i + w, the lanes that are out of place
by w. Where only the first few vectors of the result are used, the compiler drops the shuffles that
lead to the others; taking the widest first leaves the fewest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

SIDE = 16
_LANES = range(SIDE)


def shuffle(a: Any, b: Any, lanes: list[int]) -> Any:
    """Pick lanes of two vectors laid end to end."""
    return tirx.Shuffle([a, b], [tirx.const(lane, "int32") for lane in lanes])


def _low(a: Any, b: Any, width: int) -> Any:
    return shuffle(a, b, [SIDE + i - width if i & width else i for i in _LANES])


def _high(a: Any, b: Any, width: int) -> Any:
    return shuffle(a, b, [SIDE + i if i & width else i + width for i in _LANES])


def transpose() -> Callable[..., Any]:
    """Return the program part that transposes ``[16, 16]`` in place; the other is for its use."""

    @T.inline
    def stage(source, target, width):
        for i in T.unroll(SIDE // 2 // width):
            for j in T.unroll(width):
                target[i * 2 * width + j, T.Ramp(0, 1, SIDE)] = _low(
                    source[i * 2 * width + j, T.Ramp(0, 1, SIDE)],
                    source[i * 2 * width + width + j, T.Ramp(0, 1, SIDE)],
                    width,
                )
                target[i * 2 * width + width + j, T.Ramp(0, 1, SIDE)] = _high(
                    source[i * 2 * width + j, T.Ramp(0, 1, SIDE)],
                    source[i * 2 * width + width + j, T.Ramp(0, 1, SIDE)],
                    width,
                )

    @T.inline
    def run(block, other):
        stage(block, other, 8)
        stage(other, block, 4)
        stage(block, other, 2)
        stage(other, block, 1)

    return run
