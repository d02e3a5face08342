"""From scores ``[rows, keys]`` in tiles to probabilities ``[rows, keys]`` in bfloat16.

Maxima are those of unscaled logits: the scale is not negative (`step_pairs.load_q` sees to its
sign). Row sums are those of the probabilities before they are rounded, one per lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.exp2 import exp2, exp2_native
from tvmpaged.kernels.fold import fold_rows
from tvmpaged.kernels.tile import NEG_INF, Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE
from tvmpaged.kernels.tile_softmax import bfloat16_bits


def _maxima(t: Tile) -> Callable[..., Any]:
    """Return the program part that masks scores and takes each row's maximum."""
    rows, groups, fold = min(t.rows, SIDE), t.columns // SIDE, fold_rows(T.max, SIDE)

    @T.inline
    def mask(scores, row, visible, depths):
        for k in range(2 * depths):
            scores[row, T.Ramp(k * SIDE, 1, SIDE)] = T.Select(
                T.Ramp(k * SIDE, 1, SIDE) < T.Broadcast(visible, SIDE),
                scores[row, T.Ramp(k * SIDE, 1, SIDE)],
                T.Broadcast(T.float32(NEG_INF), SIDE),
            )

    @T.inline
    def row_maximum(scores, row, visible, depths, best, r):
        top = T.sblock_alloc_buffer((2, SIDE), "float32")
        if depths * DEPTH > visible:
            mask(scores, row, visible, depths)
        for i in T.unroll(2):
            top[i, T.Ramp(0, 1, SIDE)] = scores[row, T.Ramp(i * SIDE, 1, SIDE)]
        for k in range(depths - 1):
            for i in T.unroll(2):
                top[i, T.Ramp(0, 1, SIDE)] = T.max(
                    top[i, T.Ramp(0, 1, SIDE)],
                    scores[row, T.Ramp((k + 1) * DEPTH + i * SIDE, 1, SIDE)],
                )
        best[0, r, T.Ramp(0, 1, SIDE)] = T.max(
            top[0, T.Ramp(0, 1, SIDE)], top[1, T.Ramp(0, 1, SIDE)]
        )

    @T.inline
    def run(scores, depths, limit, key, row_max, top):
        for group in range(groups):
            with T.sblock("tops"):
                g = T.axis.opaque(groups, group)
                T.reads()
                T.writes()
                # Lane r of what is folded is row r; what stands behind the last row is not used.
                best = T.sblock_alloc_buffer((1, SIDE, SIDE), "float32")
                for r in range(rows):
                    with T.sblock("row_top"):
                        vr = T.axis.opaque(rows, r)
                        T.reads()
                        T.writes()
                        row_maximum(
                            scores, g * SIDE + vr, limit[g * SIDE + vr] - key, depths, best, vr
                        )
                fold(best, 0)
                top[T.Ramp(g * SIDE, 1, SIDE)] = T.max(
                    row_max[T.Ramp(g * SIDE, 1, SIDE)], best[0, 0, T.Ramp(0, 1, SIDE)]
                )

    return run


def softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics.

    Only the first `depths` x 32 keys of a step exist.
    """
    rows, groups = t.rows, t.columns // SIDE
    maxima = _maxima(t)

    @T.inline
    def run(scores, probs, depths, limit, key, factor, row_max, row_sum, rescale):
        top = T.sblock_alloc_buffer((t.columns,), "float32")
        base = T.sblock_alloc_buffer((t.columns,), "float32")
        maxima(scores, depths, limit, key, row_max, top)
        for ro in range(groups):
            for x in T.vectorized(SIDE):
                with T.sblock("rescale"):
                    vo, vx = T.axis.remap("SS", [ro, x])
                    # See step_rows: 0 stands in for the -inf of a row that has seen no key yet.
                    base[vo * SIDE + vx] = T.Select(
                        top[vo * SIDE + vx] == T.float32(NEG_INF),
                        T.float32(0),
                        top[vo * SIDE + vx],
                    )
                    rescale[vo * SIDE + vx] = (
                        row_max[vo * SIDE + vx] - base[vo * SIDE + vx]
                    ) * factor
                    # Exact, unlike the probabilities: a maximum that stays must leave the sums be.
                    rescale[vo * SIDE + vx] = exp2(rescale[vo * SIDE + vx])
                    row_max[vo * SIDE + vx] = top[vo * SIDE + vx]
        for r in range(rows):
            with T.sblock("probs"):
                vr = T.axis.opaque(rows, r)
                T.reads()
                T.writes()
                value = T.sblock_alloc_buffer((2, SIDE), "float32")
                sums = T.sblock_alloc_buffer((2, SIDE), "float32")
                sums[0, T.Ramp(0, 1, SIDE)] = row_sum[vr, T.Ramp(0, 1, SIDE)] * T.Broadcast(
                    rescale[vr], SIDE
                )
                sums[1, T.Ramp(0, 1, SIDE)] = T.Broadcast(T.float32(0), SIDE)
                for k in range(depths):
                    for i in T.unroll(2):
                        value[i, T.Ramp(0, 1, SIDE)] = (
                            scores[vr, T.Ramp(k * DEPTH + i * SIDE, 1, SIDE)]
                            - T.Broadcast(base[vr], SIDE)
                        ) * T.Broadcast(factor, SIDE)
                        value[i, T.Ramp(0, 1, SIDE)] = exp2_native(value[i, T.Ramp(0, 1, SIDE)])
                        sums[i, T.Ramp(0, 1, SIDE)] = (
                            sums[i, T.Ramp(0, 1, SIDE)] + value[i, T.Ramp(0, 1, SIDE)]
                        )
                        probs[vr, T.Ramp(k * DEPTH + i * SIDE, 1, SIDE)] = bfloat16_bits(
                            value[i, T.Ramp(0, 1, SIDE)]
                        )
                row_sum[vr, T.Ramp(0, 1, SIDE)] = (
                    sums[0, T.Ramp(0, 1, SIDE)] + sums[1, T.Ramp(0, 1, SIDE)]
                )

    return run
