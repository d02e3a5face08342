"""From scores ``[rows, keys]`` in tiles to probabilities ``[rows, keys]`` in bfloat16.

Maxima are those of unscaled logits: the scale is not negative (`step_pairs.load_q` sees to its
sign). Row sums are those of the probabilities before they are rounded, one per lane. What
`row_max` holds is the rows' bases (`base`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cpu.base import FAR, any_lane, finite, is_far, risen
from tvmpaged.kernels.cpu.bfloat16 import round_vector
from tvmpaged.kernels.cpu.fold import fold
from tvmpaged.kernels.cpu.registers import Register, registers
from tvmpaged.kernels.exp2 import SHORT_COEFFICIENTS, exp2_native
from tvmpaged.kernels.tile import NEG_INF, Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE


def _bases(t: Tile) -> Callable[..., Any]:
    """Return the program part that masks scores and takes each row's base from its maximum."""
    rows, tiles = min(t.rows, SIDE), t.choices["dot_vectors"]
    dims = t.cache.spec.head_dim_v // SIDE

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

    def top_of(scores: Any, tile: Any, depths: Any, factor: Any, base: Any) -> Register:
        """Emit the new bases of up to 16 rows: lane r of what is folded is row r."""
        best = registers(rows, SIDE)
        for r, each in enumerate(best):
            row_maximum(scores, tile * SIDE + r, depths, each)
        # What stands behind the last row is not used.
        fold(T.max, [*best, *registers(SIDE - rows, SIDE)], SIDE, SIDE // 2, 1)
        real = T.Ramp(0, 1, SIDE) < T.Broadcast(T.int32(rows), SIDE)
        best[0].set(T.Select(real, risen(base, best[0].value, factor), base))
        return best[0]

    def any_row(condition: Any) -> Any:
        """Return whether a condition holds for any row."""
        real = T.Ramp(0, 1, SIDE) < T.Broadcast(T.int32(rows), SIDE)
        return any_lane(T.Select(real, condition, T.Broadcast(T.bool(False), SIDE)))

    @T.inline
    def take_far(scores, row, depths, base):
        for k in range(2 * depths):
            scores[row, T.Ramp(k * SIDE, 1, SIDE)] = scores[
                row, T.Ramp(k * SIDE, 1, SIDE)
            ] - T.Broadcast(base, SIDE)

    @T.inline
    def raise_base(factor, top, row_max, row_sum, acc, tile, these):
        rescale = T.sblock_alloc_buffer((SIDE,), "float32")
        # Exact, unlike the probabilities: where a row keeps its base, its sums are left alone.
        rescale[T.Ramp(0, 1, SIDE)] = exp2_native(
            (row_max[these] - finite(top)) * T.Broadcast(factor, SIDE)
        )
        row_max[these] = top
        for r in range(rows):
            with T.sblock("rescale_row"):
                vr = T.axis.opaque(rows, r)
                T.reads()
                T.writes()
                row: T.let[T.int32] = tile * SIDE + vr
                row_sum[row, T.Ramp(0, 1, SIDE)] = row_sum[row, T.Ramp(0, 1, SIDE)] * T.Broadcast(
                    rescale[vr], SIDE
                )
                for d in T.unroll(dims):
                    acc[row, T.Ramp(d * SIDE, 1, SIDE)] = acc[
                        row, T.Ramp(d * SIDE, 1, SIDE)
                    ] * T.Broadcast(rescale[vr], SIDE)

    @T.inline
    def run(scores, depths, limit, key, factor, first_tile, row_max, row_sum, acc, shift):
        for tile in range(tiles):
            with T.sblock("bases"):
                vt = T.axis.opaque(tiles, tile)
                T.reads()
                T.writes()
                these = T.meta_var(T.Ramp((first_tile + vt) * SIDE, 1, SIDE))
                for r in range(rows):
                    visible: T.let[T.int32] = limit[(first_tile + vt) * SIDE + r] - key
                    if depths * DEPTH > visible:
                        mask(scores, vt * SIDE + r, visible, depths)
                top = T.meta_var(top_of(scores, vt, depths, factor, row_max[these]))
                if any_row(top.value > row_max[these]):
                    raise_base(factor, top.value, row_max, row_sum, acc, first_tile + vt, these)
                shift[these] = finite(row_max[these]) * T.Broadcast(factor, SIDE)
                if any_row(is_far(shift[these])):
                    for r in range(rows):
                        with T.sblock("take_far"):
                            vr = T.axis.opaque(rows, r)
                            T.reads()
                            T.writes()
                            row: T.let[T.int32] = (first_tile + vt) * SIDE + vr
                            if shift[row] * shift[row] > T.float32(FAR * FAR):
                                take_far(scores, vt * SIDE + vr, depths, row_max[row])
                                shift[row] = T.float32(0)

    return run


def softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics.

    Only the first `depths` x 32 keys of a step exist.
    """
    rows, bases = min(t.rows, t.choices["dot_vectors"] * SIDE), _bases(t)

    def weights(
        scores: Any,
        probs: Any,
        depths: Any,
        shift: Any,
        factor: Any,
        row_sum: Any,
        row: Any,
        r: Any,
    ) -> None:
        """Emit the probabilities of row `row`, whose scores are the `r`th."""
        sums, both, all_ = registers(2, SIDE), registers(2, SIDE), T.Ramp(0, 1, SIDE)
        sums[0].set(row_sum[row, all_])
        sums[1].set(T.Broadcast(T.float32(0), SIDE))
        with T.serial(depths) as k:
            for i, each in enumerate(both):
                keys = T.Ramp(k * DEPTH + i * SIDE, 1, SIDE)
                scaled = scores[r, keys] * T.Broadcast(factor, SIDE)
                each.set(scaled - T.Broadcast(shift[row], SIDE))
                each.set(exp2_native(each.value, SHORT_COEFFICIENTS))
                sums[i].set(sums[i].value + each.value)
                T.buffer_store(probs, round_vector(each.value), [row, keys])
        T.buffer_store(row_sum, sums[0].value + sums[1].value, [row, all_])

    @T.inline
    def run(scores, probs, depths, limit, key, factor, first_tile, row_max, row_sum, acc):
        shift = T.sblock_alloc_buffer((t.columns,), "float32")
        bases(scores, depths, limit, key, factor, first_tile, row_max, row_sum, acc, shift)
        for r in range(rows):
            with T.sblock("probs"):
                vr = T.axis.opaque(rows, r)
                T.reads()
                T.writes()
                row: T.let[T.int32] = first_tile * SIDE + vr
                weights(scores, probs, depths, shift, factor, row_sum, row, vr)

    return run
