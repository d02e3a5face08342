"""From scores ``[keys, rows]`` in tiles to probabilities ``[rows, keys]`` in bfloat16.

For few rows the scores are transposed and take the softmax of `row_softmax`; for many it runs down
the columns, and the probabilities are transposed, two keys to an element. Row sums are those of the
probabilities before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.cpu import row_softmax
from tvmpaged.kernels.cpu.block_scores import MARGIN
from tvmpaged.kernels.cpu.registers import Register, registers
from tvmpaged.kernels.cpu.transpose import transpose
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


def _bits(value: Any) -> Any:
    """Return float32 lanes as bits that end in the bfloat16 they round to, plus lower bits."""
    return tirx.reinterpret("uint32x16", value) + T.Broadcast(T.uint32(0x8000), SIDE)


def bfloat16_bits(value: Any) -> Any:
    """Return the bits of the bfloat16 that 16 lanes of float32 round to."""
    return T.Cast("uint16x16", T.shift_right(_bits(value), T.Broadcast(T.uint32(16), SIDE)))


def _pair(first: Any, second: Any) -> Any:
    """Return lane by lane the bfloat16 of two float32 vectors: the first in the low half."""
    low = T.shift_right(_bits(first), T.Broadcast(T.uint32(16), SIDE))
    high = T.bitwise_and(_bits(second), T.Broadcast(T.uint32(0xFFFF0000), SIDE))
    return T.bitwise_or(low, high)


def _round(t: Tile) -> Callable[..., Any]:
    """Return the program part that rounds probabilities ``[rows, keys]`` for the product."""
    rows, vectors = t.rows, t.keys // SIDE

    @T.inline
    def run(exact, probs):
        for r, ko in T.grid(rows, vectors):
            with T.sblock("round"):
                vr, vk = T.axis.remap("SS", [r, ko])
                probs[vr, T.Ramp(vk * SIDE, 1, SIDE)] = bfloat16_bits(
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

    def every(value: Any) -> Any:
        return T.Broadcast(value, lanes)

    def top_of(scores: Any, depths: Any, row_max: Any, rows: Any) -> Register:
        """Emit the new maxima of 16 rows."""
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
        return tops[0]

    def rescale_sums(
        base: Register, factor: Any, row_max: Any, row_sum: Any, rescale: Any, rows: Any
    ) -> list[Register]:
        """Emit the new base; return two halves of the sums so far, on its scale."""
        sums = registers(2, lanes)
        sums[0].set(row_max[rows])
        T.buffer_store(row_max, base.value, [rows])
        # See row_softmax: 0 stands in for the -inf of a row that has seen no key yet.
        unseen = base.value == every(T.float32(NEG_INF))
        base.set(T.Select(unseen, every(T.float32(0)), base.value))
        sums[0].set((sums[0].value - base.value) * every(factor))
        # Exact, unlike the probabilities: a maximum that stays must leave the sums alone.
        sums[0].set(exp2_vector(sums[0].value, lanes))
        T.buffer_store(rescale, sums[0].value, [rows])
        sums[0].set(row_sum[0, rows] * sums[0].value)
        sums[1].set(every(T.float32(0)))
        return sums

    def weights(
        scores: Any, probs: Any, base: Any, sums: Any, factor: Any, column: Any, depth: Any
    ) -> None:
        """Emit the probabilities of 16 rows and 32 keys."""
        rows = T.Ramp(column * SIDE, 1, lanes)
        pairs, both = registers(SIDE, SIDE, "uint32"), registers(2, lanes)
        for j, pair in enumerate(pairs):
            for i, each in enumerate(both):
                each.set((scores[depth * DEPTH + 2 * j + i, rows] - base.value) * every(factor))
                each.set(exp2_native(each.value, SHORT_COEFFICIENTS))
                sums[i].set(sums[i].value + each.value)
            pair.set(_pair(both[0].value, both[1].value))
        transpose(pairs)
        for j, pair in enumerate(pairs):
            T.buffer_store(probs, pair.value, [column * SIDE + j, T.Ramp(depth * SIDE, 1, SIDE)])

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
    def softmax(scores, probs, depths, limit, key, factor, row_max, row_sum, rescale):
        if key + depths * DEPTH > limit[0]:
            mask(scores, depths, limit, key)
        for ro in range(vectors):
            with T.sblock("column"):
                vr = T.axis.opaque(vectors, ro)
                T.reads()
                T.writes()
                rows = T.meta_var(T.Ramp(vr * lanes, 1, lanes))
                base = T.meta_var(top_of(scores, depths, row_max, rows))
                sums = T.meta_var(rescale_sums(base, factor, row_max, row_sum, rescale, rows))
                for kt in range(depths):
                    with T.sblock("probs"):
                        vk = T.axis.opaque(depths, kt)
                        T.reads()
                        T.writes()
                        weights(scores, probs, base, sums, factor, vr, vk)
                store(row_sum, sums, rows)

    return softmax
