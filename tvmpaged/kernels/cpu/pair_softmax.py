"""From scores ``[rows, keys]`` in tiles to probabilities ``[rows, keys]`` in bfloat16.

Maxima are those of unscaled logits: the scale is not negative (`step_pairs.load_q` sees to its
sign). Row sums are those of the probabilities before they are rounded, one per lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cpu.fold import fold
from tvmpaged.kernels.cpu.registers import Register, registers
from tvmpaged.kernels.cpu.tile_softmax import bfloat16_bits
from tvmpaged.kernels.exp2 import SHORT_COEFFICIENTS, exp2, exp2_native
from tvmpaged.kernels.tile import NEG_INF, Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE


def _maxima(t: Tile) -> Callable[..., Any]:
    """Return the program part that masks scores and takes each row's maximum."""
    rows, groups = min(t.rows, SIDE), t.columns // SIDE

    @T.inline
    def mask(scores, row, visible, depths):
        for k in range(2 * depths):
            scores[row, T.Ramp(k * SIDE, 1, SIDE)] = T.Select(
                T.Ramp(k * SIDE, 1, SIDE) < T.Broadcast(visible, SIDE),
                scores[row, T.Ramp(k * SIDE, 1, SIDE)],
                T.Broadcast(T.float32(NEG_INF), SIDE),
            )

    def row_maximum(scores: Any, row: Any, depths: Any, best: Register) -> None:
        """Emit the maximum of a row, one for each lane."""
        top = registers(2, SIDE)
        for i, each in enumerate(top):
            each.set(scores[row, T.Ramp(i * SIDE, 1, SIDE)])
        with T.serial(depths - 1) as k:
            for i, each in enumerate(top):
                more = scores[row, T.Ramp((k + 1) * DEPTH + i * SIDE, 1, SIDE)]
                each.set(T.max(each.value, more))
        best.set(T.max(top[0].value, top[1].value))

    def maxima(scores: Any, row_max: Any, top: Any, group: Any, depths: Any) -> None:
        """Emit the maxima of up to 16 rows: lane r of what is folded is row r."""
        best = registers(rows, SIDE)
        for r, each in enumerate(best):
            row_maximum(scores, group * SIDE + r, depths, each)
        # What stands behind the last row is not used.
        fold(T.max, [*best, *registers(SIDE - rows, SIDE)], SIDE, SIDE // 2, 1)
        these = T.Ramp(group * SIDE, 1, SIDE)
        T.buffer_store(top, T.max(row_max[these], best[0].value), [these])

    @T.inline
    def run(scores, depths, limit, key, row_max, top):
        for group in range(groups):
            with T.sblock("tops"):
                g = T.axis.opaque(groups, group)
                T.reads()
                T.writes()
                for r in range(rows):
                    if depths * DEPTH > limit[g * SIDE + r] - key:
                        mask(scores, g * SIDE + r, limit[g * SIDE + r] - key, depths)
                maxima(scores, row_max, top, g, depths)

    return run


def softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics.

    Only the first `depths` x 32 keys of a step exist.
    """
    rows, groups = t.rows, t.columns // SIDE
    maxima = _maxima(t)

    def weights(
        scores: Any,
        probs: Any,
        depths: Any,
        base: Any,
        factor: Any,
        row_sum: Any,
        rescale: Any,
        r: Any,
    ) -> None:
        """Emit a row's probabilities."""
        sums, both, all_ = registers(2, SIDE), registers(2, SIDE), T.Ramp(0, 1, SIDE)
        sums[0].set(row_sum[r, all_] * T.Broadcast(rescale[r], SIDE))
        sums[1].set(T.Broadcast(T.float32(0), SIDE))
        with T.serial(depths) as k:
            for i, each in enumerate(both):
                keys = T.Ramp(k * DEPTH + i * SIDE, 1, SIDE)
                power = scores[r, keys] - T.Broadcast(base[r], SIDE)
                each.set(power * T.Broadcast(factor, SIDE))
                each.set(exp2_native(each.value, SHORT_COEFFICIENTS))
                sums[i].set(sums[i].value + each.value)
                T.buffer_store(probs, bfloat16_bits(each.value), [r, keys])
        T.buffer_store(row_sum, sums[0].value + sums[1].value, [r, all_])

    @T.inline
    def run(scores, probs, depths, limit, key, factor, row_max, row_sum, rescale):
        top = T.sblock_alloc_buffer((t.columns,), "float32")
        base = T.sblock_alloc_buffer((t.columns,), "float32")
        maxima(scores, depths, limit, key, row_max, top)
        for ro in range(groups):
            for x in T.vectorized(SIDE):
                with T.sblock("rescale"):
                    vo, vx = T.axis.remap("SS", [ro, x])
                    # See row_softmax: 0 stands in for the -inf of a row that has seen no key yet.
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
                weights(scores, probs, depths, base, factor, row_sum, rescale, vr)

    return run
