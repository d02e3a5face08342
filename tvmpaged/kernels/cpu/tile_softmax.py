"""From scores ``[keys, rows]`` in tiles to probabilities ``[rows, keys]`` in bfloat16.

For few rows the scores are transposed and take the softmax of `row_softmax`; for many it runs down
the columns, and the probabilities are transposed. Row sums are those of the probabilities before
they are rounded. What `row_max` holds of many rows is their bases (`base`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cpu import row_softmax
from tvmpaged.kernels.cpu.base import any_lane, finite, is_far, risen
from tvmpaged.kernels.cpu.bfloat16 import round_two, round_vector
from tvmpaged.kernels.cpu.block_scores import MARGIN
from tvmpaged.kernels.cpu.registers import Register, registers
from tvmpaged.kernels.cpu.transpose import transpose, transpose_halves
from tvmpaged.kernels.exp2 import SHORT_COEFFICIENTS, exp2_native, exp2_vector
from tvmpaged.kernels.tile import NEG_INF, Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE

#: Keys whose maxima are taken side by side: the chain of one vector's would wait for its latency.
_CHAINS = 4


def _turn(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores ``[keys, 16]`` to ``[rows, keys]``."""
    rows, key_tiles = t.rows, t.keys // SIDE
    margin = MARGIN if t.key_rows < SIDE else 0

    def turn(scores: Any, turned: Any, tile: Any) -> None:
        block = registers(SIDE, SIDE)
        for k, each in enumerate(block):
            each.set(scores[margin + tile * SIDE + k, T.Ramp(0, 1, SIDE)])
        transpose(block)
        for r, each in enumerate(block[:rows]):
            T.buffer_store(turned, each.value, [r, T.Ramp(tile * SIDE, 1, SIDE)])

    @T.inline
    def run(scores, turned):
        for kt in range(key_tiles):
            with T.sblock("turn"):
                vk = T.axis.opaque(key_tiles, kt)
                T.reads()
                T.writes()
                turn(scores, turned, vk)

    return run


def _round(t: Tile) -> Callable[..., Any]:
    """Return the program part that rounds probabilities ``[rows, keys]`` for the product."""
    rows, vectors = t.rows, t.keys // SIDE

    @T.inline
    def run(exact, probs):
        for r, ko in T.grid(rows, vectors):
            with T.sblock("round"):
                vr, vk = T.axis.remap("SS", [r, ko])
                probs[vr, T.Ramp(vk * SIDE, 1, SIDE)] = round_vector(
                    exact[vr, T.Ramp(vk * SIDE, 1, SIDE)]
                )

    return run


def softmax_rows(t: Tile) -> Callable[..., Any]:
    """Return the program part for few rows."""
    rows, keys = t.rows, t.keys
    turn, round_, softmax = _turn(t), _round(t), row_softmax.softmax(t)

    @T.inline
    def run(scores, probs, limit, key, sm_scale, row_max, row_sum, rescale):
        turned = T.sblock_alloc_buffer((rows, keys), "float32")
        exact = T.sblock_alloc_buffer((rows, keys), "float32")
        turn(scores, turned)
        softmax(turned, exact, keys // SIDE, limit, key, T.abs(sm_scale), row_max, row_sum, rescale)
        round_(exact, probs)

    return run


def softmax_columns(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores ``[keys, rows]`` to probabilities ``[rows, keys]``.

    Maxima are those of unscaled logits: the scale is not negative (`load_q` sees to its sign).
    Only the first `depths` x 32 keys of a step exist.
    """
    vectors, lanes = t.columns // SIDE, SIDE
    dims = t.cache.spec.head_dim_v // SIDE

    def every(value: Any) -> Any:
        return T.Broadcast(value, lanes)

    def top_of(scores: Any, depths: Any, factor: Any, row_max: Any, rows: Any) -> Register:
        """Emit the new bases of 16 rows."""
        tops = registers(_CHAINS, lanes)
        for each in tops:
            each.set(row_max[rows])
        with T.serial(depths * 2) as k:
            for j in range(SIDE):
                top = tops[j % _CHAINS]
                top.set(T.max(top.value, scores[k * SIDE + j, rows]))
        tops[0].set(T.max(tops[0].value, tops[1].value))
        tops[2].set(T.max(tops[2].value, tops[3].value))
        tops[0].set(T.max(tops[0].value, tops[2].value))
        tops[0].set(risen(row_max[rows], tops[0].value, factor))
        return tops[0]

    def start(
        factor: Any, row_max: Any, row_sum: Any, rows: Any
    ) -> tuple[Register, list[Register]]:
        """Emit 16 rows' shift, and the loads of their sums in two halves."""
        shift, sums = Register(lanes), registers(2, lanes)
        shift.set(finite(row_max[rows]) * every(factor))
        sums[0].set(row_sum[0, rows])
        sums[1].set(every(T.float32(0)))
        return shift, sums

    def take_far(scores: Any, depths: Any, row_max: Any, shift: Any, rows: Any) -> None:
        """Emit the taking of far bases from their rows' scores."""
        far = is_far(shift.value)
        with T.serial(depths * DEPTH) as k:
            less = T.Select(far, scores[k, rows] - row_max[rows], scores[k, rows])
            T.buffer_store(scores, less, [k, rows])
        shift.set(T.Select(far, every(T.float32(0)), shift.value))

    @T.inline
    def raise_base(factor, top, row_max, row_sum, acc, column, rows):
        rescale = T.sblock_alloc_buffer((SIDE,), "float32")
        # Exact, unlike the probabilities: where a row keeps its base, its sums are left alone.
        rescale[T.Ramp(0, 1, lanes)] = exp2_vector(
            (row_max[rows] - finite(top)) * every(factor), lanes
        )
        row_max[rows] = top
        row_sum[0, rows] = row_sum[0, rows] * rescale[T.Ramp(0, 1, lanes)]
        for r, d in T.grid(SIDE, dims):
            with T.sblock("rescale_acc"):
                vr, vd = T.axis.remap("SS", [r, d])
                T.reads()
                T.writes()
                acc[column * SIDE + vr, T.Ramp(vd * SIDE, 1, SIDE)] = acc[
                    column * SIDE + vr, T.Ramp(vd * SIDE, 1, SIDE)
                ] * every(rescale[vr])

    def weights(
        scores: Any, probs: Any, shift: Any, sums: Any, factor: Any, column: Any, depth: Any
    ) -> None:
        """Emit the probabilities of 16 rows and 32 keys."""
        rows, both = T.Ramp(column * SIDE, 1, lanes), registers(2, lanes)
        keys = T.Ramp(depth * SIDE, 1, SIDE)
        # A loop, by way of memory: unrolled, LLVM keeps all 32 exponentials until it sums them.
        with T.serial(SIDE) as j:
            for i, each in enumerate(both):
                score = scores[depth * DEPTH + i * SIDE + j, rows]
                each.set(score * every(factor) - shift.value)
                each.set(exp2_native(each.value, SHORT_COEFFICIENTS))
                sums[i].set(sums[i].value + each.value)
            two = round_two(both[0].value, both[1].value)
            T.buffer_store(probs, two, [column * SIDE + j, keys])
        block = registers(SIDE, SIDE, "uint32")
        for j, each in enumerate(block):
            each.set(probs[column * SIDE + j, keys])
        for j, each in enumerate(transpose_halves(block)):
            T.buffer_store(probs, each.value, [column * SIDE + j, keys])

    def store(row_sum: Any, sums: Any, rows: Any) -> None:
        T.buffer_store(row_sum, sums[0].value + sums[1].value, [0, rows])

    @T.inline
    def mask(scores, depths, limit, key):
        for k, ro in T.grid(depths * DEPTH, vectors):
            with T.sblock("mask"):
                vk, vr = T.axis.remap("SS", [k, ro])
                T.reads()
                T.writes()
                scores[vk, T.Ramp(vr * lanes, 1, lanes)] = T.Select(
                    T.Broadcast(key + vk, lanes) < limit[T.Ramp(vr * lanes, 1, lanes)],
                    scores[vk, T.Ramp(vr * lanes, 1, lanes)],
                    T.Broadcast(T.float32(NEG_INF), lanes),
                )

    @T.inline
    def softmax(scores, probs, depths, limit, key, factor, row_max, row_sum, acc):
        if key + depths * DEPTH > limit[0]:
            mask(scores, depths, limit, key)
        for ro in range(vectors):
            with T.sblock("column"):
                vr = T.axis.opaque(vectors, ro)
                T.reads()
                T.writes()
                rows = T.meta_var(T.Ramp(vr * lanes, 1, lanes))
                top = T.meta_var(top_of(scores, depths, factor, row_max, rows))
                if any_lane(top.value > row_max[rows]):
                    raise_base(factor, top.value, row_max, row_sum, acc, vr, rows)
                shift, sums = T.meta_var(start(factor, row_max, row_sum, rows))
                if any_lane(is_far(shift.value)):
                    take_far(scores, depths, row_max, shift, rows)
                for kt in range(depths):
                    with T.sblock("probs"):
                        vk = T.axis.opaque(depths, kt)
                        T.reads()
                        T.writes()
                        weights(scores, probs, shift, sums, factor, vr, vk)
                store(row_sum, sums, rows)

    return softmax
