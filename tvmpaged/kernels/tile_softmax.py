"""From scores ``[keys, rows]`` in tiles to probabilities ``[rows, keys]`` in bfloat16.

For few rows the scores are transposed and take `step_rows`' softmax; for many the softmax runs down
the columns, and the probabilities are transposed, two keys to an element. Row sums are those of the
probabilities before they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels import step_rows
from tvmpaged.kernels.exp2 import exp2, exp2_native
from tvmpaged.kernels.tile import NEG_INF, Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE
from tvmpaged.kernels.transpose import transpose

#: Keys whose maxima are taken side by side: the chain of one vector's would wait for its latency.
_CHAINS = 4


def _turn(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores ``[keys, 16]`` to ``[rows, keys]``."""
    rows, key_tiles, turn = t.rows, t.keys // SIDE, transpose()

    @T.inline
    def run(scores, turned):
        for kt in range(key_tiles):
            with T.sblock("turn"):
                vk = T.axis.opaque(key_tiles, kt)
                T.reads()
                T.writes()
                block = T.sblock_alloc_buffer((SIDE, SIDE), "float32")
                other = T.sblock_alloc_buffer((SIDE, SIDE), "float32")
                for k in T.unroll(SIDE):
                    block[k, T.Ramp(0, 1, SIDE)] = scores[vk * SIDE + k, T.Ramp(0, 1, SIDE)]
                turn(block, other)
                for r in T.unroll(rows):
                    turned[r, T.Ramp(vk * SIDE, 1, SIDE)] = block[r, T.Ramp(0, 1, SIDE)]

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
    turn, round_, softmax = _turn(t), _round(t), step_rows.softmax(t)

    @T.inline
    def run(scores, probs, limit, key, sm_scale, row_max, row_sum, rescale):
        turned = T.sblock_alloc_buffer((rows, keys), "float32")
        exact = T.sblock_alloc_buffer((rows, keys), "float32")
        turn(scores, turned)
        softmax(turned, exact, limit, key, T.abs(sm_scale), row_max, row_sum, rescale)
        round_(exact, probs)

    return run


def softmax_columns(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores ``[keys, rows]`` to probabilities ``[rows, keys]``.

    Maxima are those of unscaled logits: the scale is not negative (`load_q` sees to its sign).
    """
    keys, vectors, turn = t.keys, t.columns // SIDE, transpose()
    lanes = SIDE

    @T.inline
    def mask(scores, limit, key):
        for k, ro in T.grid(keys, vectors):
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
    def softmax(scores, probs, limit, key, factor, row_max, row_sum, rescale):
        if key + keys > limit[0]:
            mask(scores, limit, key)
        for ro in range(vectors):
            with T.sblock("column"):
                vr = T.axis.opaque(vectors, ro)
                T.reads()
                T.writes()
                tops = T.sblock_alloc_buffer((_CHAINS, lanes), "float32")
                base = T.sblock_alloc_buffer((1, lanes), "float32")
                sums = T.sblock_alloc_buffer((2, lanes), "float32")
                pairs = T.sblock_alloc_buffer((SIDE, SIDE), "uint32")
                other = T.sblock_alloc_buffer((SIDE, SIDE), "uint32")
                for i in T.unroll(_CHAINS):
                    tops[i, T.Ramp(0, 1, lanes)] = row_max[T.Ramp(vr * lanes, 1, lanes)]
                for k in range(keys // SIDE):
                    for j in T.unroll(SIDE):
                        tops[j % _CHAINS, T.Ramp(0, 1, lanes)] = T.max(
                            tops[j % _CHAINS, T.Ramp(0, 1, lanes)],
                            scores[k * SIDE + j, T.Ramp(vr * lanes, 1, lanes)],
                        )
                base[0, T.Ramp(0, 1, lanes)] = T.max(
                    T.max(tops[0, T.Ramp(0, 1, lanes)], tops[1, T.Ramp(0, 1, lanes)]),
                    T.max(tops[2, T.Ramp(0, 1, lanes)], tops[3, T.Ramp(0, 1, lanes)]),
                )
                tops[0, T.Ramp(0, 1, lanes)] = row_max[T.Ramp(vr * lanes, 1, lanes)]
                row_max[T.Ramp(vr * lanes, 1, lanes)] = base[0, T.Ramp(0, 1, lanes)]
                # See step_rows: 0 stands in for the -inf of a row that has seen no key yet.
                base[0, T.Ramp(0, 1, lanes)] = T.Select(
                    base[0, T.Ramp(0, 1, lanes)] == T.Broadcast(T.float32(NEG_INF), lanes),
                    T.Broadcast(T.float32(0), lanes),
                    base[0, T.Ramp(0, 1, lanes)],
                )
                for x in T.vectorized(lanes):
                    tops[0, x] = (tops[0, x] - base[0, x]) * factor
                # Exact, unlike the probabilities: a maximum that stays must leave the sums alone.
                for x in T.vectorized(lanes):
                    rescale[vr * lanes + x] = exp2(tops[0, x])
                for x in T.vectorized(lanes):
                    sums[0, x] = row_sum[vr * lanes + x, 0] * rescale[vr * lanes + x]
                sums[1, T.Ramp(0, 1, lanes)] = T.Broadcast(T.float32(0), lanes)
                for kt in range(keys // DEPTH):
                    with T.sblock("probs"):
                        vk = T.axis.opaque(keys // DEPTH, kt)
                        T.reads()
                        T.writes()
                        for j in T.unroll(SIDE):
                            for i in T.unroll(2):
                                tops[i, T.Ramp(0, 1, lanes)] = (
                                    scores[vk * DEPTH + 2 * j + i, T.Ramp(vr * lanes, 1, lanes)]
                                    - base[0, T.Ramp(0, 1, lanes)]
                                ) * T.Broadcast(factor, lanes)
                                tops[i, T.Ramp(0, 1, lanes)] = exp2_native(
                                    tops[i, T.Ramp(0, 1, lanes)]
                                )
                                sums[i, T.Ramp(0, 1, lanes)] = (
                                    sums[i, T.Ramp(0, 1, lanes)] + tops[i, T.Ramp(0, 1, lanes)]
                                )
                            pairs[j, T.Ramp(0, 1, lanes)] = _pair(
                                tops[0, T.Ramp(0, 1, lanes)], tops[1, T.Ramp(0, 1, lanes)]
                            )
                        turn(pairs, other)
                        for j in T.unroll(SIDE):
                            probs[vr * SIDE + j, T.Ramp(vk * SIDE, 1, SIDE)] = pairs[
                                j, T.Ramp(0, 1, SIDE)
                            ]
                for x in T.vectorized(lanes):
                    row_sum[vr * lanes + x, 0] = sums[0, x] + sums[1, x]

    return softmax
