"""From a step's scores to probabilities, where they are: in the lanes that hold their sums.

A lane has two rows of each height (`warp_grid`), and of each of them the columns of its pair; the
quad has all. Maxima are folded over the quad at each step, sums once at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.warp_grid import HALF, REGISTERS, Warps
from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import NEG_INF


def soften(w: Warps, parts: Any) -> Callable[..., Any]:
    """Return the program part from scores to packed probabilities and rescaled sums.

    ``scores`` become probabilities, ``row_max``, ``row_sum`` and ``acc`` are brought up to date;
    ``limits`` are the ends of what the lane's rows see, ``least`` the smallest of the block.
    """
    heights, count, acc_count = w.heights, w.score_registers, w.acc_registers
    values = 2 * heights  # rows of a lane
    fold_max, pack = parts.fold(T.max, values), parts.pack()

    @T.inline
    def scale(scores, limits, least, key, at, sm_scale):
        for h in parts.each(heights):
            for i in parts.each(count):
                scores[at.y, at.x, h * count + i] = scores[at.y, at.x, h * count + i] * sm_scale
        # Most steps are seen whole by all rows of the block.
        if key + w.keys > least:
            for h in parts.each(heights):
                for i in parts.each(count):
                    scores[at.y, at.x, h * count + i] = T.Select(
                        key + i // REGISTERS * HALF + at.lane % 4 * 2 + i % 2
                        < limits[h * 2 + i % REGISTERS // 2],
                        scores[at.y, at.x, h * count + i],
                        T.float32(NEG_INF),
                    )

    @T.inline
    def soften(
        scores,
        limits,
        least,
        key,
        at,
        sm_scale,
        row_max,
        row_sum,
        acc,
        probs,
    ):
        top = T.sblock_alloc_buffer(parts.fragment(values), "float32", scope=parts.fragment_scope)
        scale(scores, limits, least, key, at, sm_scale)
        for v in parts.each(values):
            top[at.y, at.x, v] = row_max[at.y, at.x, v]
            for i in parts.each(count // 2):
                top[at.y, at.x, v] = T.max(
                    top[at.y, at.x, v],
                    scores[at.y, at.x, v // 2 * count + i // 2 * REGISTERS + v % 2 * 2 + i % 2],
                )
        fold_max(top, at)
        base = T.sblock_alloc_buffer((values,), "float32", scope="local")
        rescale = T.sblock_alloc_buffer((values,), "float32", scope="local")
        for v in T.unroll(values):
            # See step_rows: 0 stands in for the -inf of a row that has seen no key yet.
            base[v] = T.Select(
                top[at.y, at.x, v] == T.float32(NEG_INF), T.float32(0), top[at.y, at.x, v]
            )
            rescale[v] = T.exp2((row_max[at.y, at.x, v] - base[v]) * T.float32(LOG2E))
            row_max[at.y, at.x, v] = top[at.y, at.x, v]
            row_sum[at.y, at.x, v] = row_sum[at.y, at.x, v] * rescale[v]
        for h in parts.each(heights):
            for i in parts.each(count):
                scores[at.y, at.x, h * count + i] = T.exp2(
                    (scores[at.y, at.x, h * count + i] - base[h * 2 + i % REGISTERS // 2])
                    * T.float32(LOG2E)
                )
                row_sum[at.y, at.x, h * 2 + i % REGISTERS // 2] = (
                    row_sum[at.y, at.x, h * 2 + i % REGISTERS // 2]
                    + scores[at.y, at.x, h * count + i]
                )
            for i in parts.each(acc_count):
                acc[at.y, at.x, h * acc_count + i] = (
                    acc[at.y, at.x, h * acc_count + i] * rescale[h * 2 + i % REGISTERS // 2]
                )
            # Two sums side by side are a pair of columns: one register of a left factor.
            for i in parts.each(count // 2):
                pack(
                    probs,
                    h * w.p_registers + i,
                    scores[at.y, at.x, h * count + i * 2],
                    scores[at.y, at.x, h * count + i * 2 + 1],
                    at,
                )

    return soften
