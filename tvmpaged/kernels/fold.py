"""Folds across the lanes of vectors, as shuffles of whole vectors.

Summing one vector of 16 lanes takes four shuffles and four adds, and 16 vectors 64 of each. Folding
them together takes 30 shuffles and 15 adds: each stage adds the halves of two vectors at once, and
after the last one lane k of one vector holds the sum of vector k::

    stage 8    a = a0 .. a7 | a8 .. a15        b likewise
               -> a0+a8 .. a7+a15 | b0+b8 .. b7+b15
    stage 4, 2, 1: the same inside the halves, quarters, eighths
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

Op = Callable[[Any, Any], Any]


def _shuffle(vectors: list[Any], lanes: list[int]) -> Any:
    return tirx.Shuffle(vectors, [tirx.const(lane, "int32") for lane in lanes])


def _fold_pair(op: Op, a: Any, b: Any, width: int, lanes: int) -> Any:
    """Fold two vectors into one: in each stretch of ``2 * width`` lanes, the upper half goes."""
    low = [
        source + lane
        for stretch in range(0, lanes, 2 * width)
        for source in (stretch, lanes + stretch)
        for lane in range(width)
    ]
    return op(_shuffle([a, b], low), _shuffle([a, b], [lane + width for lane in low]))


def fold_rows(op: Op, lanes: int) -> Callable[..., Any]:
    """Return the program part that folds a ``[lanes, lanes]`` buffer into its first row, in place.

    Lane k of that row is then row k folded. The order of the additions is the same for each row.
    """

    @T.inline
    def stage(rows, first, width):
        for k in T.unroll(width):
            rows[first, k, T.Ramp(0, 1, lanes)] = _fold_pair(
                op,
                rows[first, k, T.Ramp(0, 1, lanes)],
                rows[first, k + width, T.Ramp(0, 1, lanes)],
                width,
                lanes,
            )

    @T.inline
    def fold(rows, first):
        if lanes == 16:
            stage(rows, first, 8)
        stage(rows, first, 4)
        stage(rows, first, 2)
        stage(rows, first, 1)

    return fold


def fold_lanes(op: Op, lanes: int) -> Callable[..., Any]:
    """Return the program part that folds one vector: all lanes of ``rows[r]`` become the result."""

    def rotated(vector: Any, width: int) -> Any:
        return _shuffle([vector], [(lane + width) % lanes for lane in range(lanes)])

    @T.inline
    def stage(rows, r, width):
        rows[r, T.Ramp(0, 1, lanes)] = op(
            rows[r, T.Ramp(0, 1, lanes)], rotated(rows[r, T.Ramp(0, 1, lanes)], width)
        )

    @T.inline
    def fold(rows, r):
        if lanes == 16:
            stage(rows, r, 8)
        stage(rows, r, 4)
        stage(rows, r, 2)
        stage(rows, r, 1)

    return fold
