"""Folds across the lanes of vectors, as shuffles of whole vectors.

Summing one vector of 16 lanes takes four shuffles and four adds, and 16 vectors 64 of each. Folding
them together takes 15 shuffles, 15 blends and 15 adds: each stage adds the halves of two vectors at
once, and after the last one lane k of one vector holds the sum of vector k::

    stage 8    a = a0 .. a7 | a8 .. a15        b likewise
               -> a0+a8 .. a7+a15 | b0+b8 .. b7+b15
    stage 4, 2, 1: the same inside the halves, quarters, eighths

One of a stage's operands leaves every lane where it stands (a0 .. a7 | b8 .. b15), which is a blend
and not a shuffle: shuffles have one port.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from tvmpaged.kernels.cpu.registers import Register

Op = Callable[[Any, Any], Any]


def _shuffle(vectors: list[Any], lanes: list[int]) -> Any:
    return tirx.Shuffle(vectors, [tirx.const(lane, "int32") for lane in lanes])


def _fold_pair(op: Op, a: Any, b: Any, width: int, lanes: int) -> Any:
    """Fold two vectors into one: in each stretch of ``2 * width`` lanes, the upper half goes."""
    stay = [lane + lanes if lane & width else lane for lane in range(lanes)]
    move = [lane + lanes - width if lane & width else lane + width for lane in range(lanes)]
    return op(_shuffle([a, b], stay), _shuffle([a, b], move))


def fold(op: Op, vectors: list[Register], lanes: int, first_width: int, last_width: int) -> None:
    """Emit the stages of some widths, from `vectors` into the first of them.

    All stages, ``lanes / 2`` to 1, fold `lanes` vectors into one whose lane k is vector k folded;
    the order of the additions is the same for each. A part of the vectors, every n-th, takes the
    stages down to width n, and what the n parts become takes those from ``n / 2`` on.
    """
    width, count = first_width, len(vectors)
    while width >= last_width:
        count //= 2
        for k in range(count):
            a, b = vectors[k].value, vectors[k + count].value
            vectors[k].set(_fold_pair(op, a, b, width, lanes))
        width //= 2


def fold_lanes(op: Op, vector: Register, lanes: int) -> None:
    """Emit the folding of one vector: all its lanes become the result."""
    width = lanes // 2
    while width:
        rotated = _shuffle([vector.value], [(lane + width) % lanes for lane in range(lanes)])
        vector.set(op(vector.value, rotated))
        width //= 2
