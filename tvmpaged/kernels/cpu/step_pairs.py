"""One kv step on AMX tiles over a cache of pairs: scores ``[rows, keys]`` = q . K.

K and V are right operands as they lie in the cache (`tvmpaged.layout`), so nothing of them is
rearranged, and a product takes no longer than its few rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.cpu import amx
from tvmpaged.kernels.cpu.pair_softmax import softmax
from tvmpaged.kernels.cpu.pair_values import weigh_part
from tvmpaged.kernels.cpu.places import (
    BLOCK,
    NEXT_BLOCK,
    NEXT_HEAD,
    NEXT_SLOT,
    SLOT,
    TilePlaces,
)
from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import TINY, Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE


def load_q(t: Tile) -> Callable[..., Any]:
    """Return the program part that copies query rows, ``[rows, head_dim / 2]`` pairs of dims."""
    rows, half = t.rows, SIDE // 2
    chunks = t.cache.spec.head_dim // SIDE

    @T.inline
    def run(q, q_start, token_of, head_of, sm_scale, q_rows):
        # The scale's sign goes into q, so that greater scores have greater logits.
        sign: T.let[T.uint32] = T.Select(sm_scale < T.float32(0), T.uint32(0x80008000), T.uint32(0))
        for r in range(rows):
            with T.sblock("load_q"):
                vr = T.axis.opaque(rows, r)
                T.reads()
                T.writes()
                for chunk in T.unroll(chunks):
                    q_rows[vr, T.Ramp(chunk * half, 1, half)] = T.bitwise_xor(
                        tirx.reinterpret(
                            "uint32x8",
                            q[q_start + token_of[vr], head_of[vr], T.Ramp(chunk * SIDE, 1, SIDE)],
                        ),
                        T.Broadcast(sign, half),
                    )

    return run


def _score(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = q . K``."""
    c, regs = t.cache, t.registers
    side_keys, side_rows = t.choices["dot_keys"], t.choices["dot_vectors"]
    dim = c.spec.head_dim
    chunks, tail = dim // DEPTH, dim % DEPTH
    ahead = t.prefetch_keys
    places = TilePlaces(t, side_keys, ahead)
    locate = places.locate()

    @T.inline
    def ask(k_cache, block, head, slot, chunk, lines):
        for line in T.unroll(lines):
            T.evaluate(
                t.prefetch_at(
                    T.address_of(k_cache[block, head, c.k_line(slot, chunk * DEPTH) + line, 0])
                )
            )

    @T.inline
    def multiply(
        q_rows,
        k_cache,
        head,
        where,
        row_tile,
        chunk,
        lines,
        q_register,
        k_register,
    ):
        for b in T.unroll(side_rows):
            T.evaluate(
                amx.load(
                    q_register + b,
                    T.address_of(q_rows[(row_tile + b) * SIDE, chunk * SIDE]),
                    dim * 2,
                )
            )
        for a in T.unroll(side_keys):
            T.evaluate(
                amx.load(
                    k_register,
                    T.address_of(
                        k_cache[where[BLOCK, a], head, c.k_line(where[SLOT, a], chunk * DEPTH), 0]
                    ),
                    2 * DEPTH,
                )
            )
            if ahead > 0:
                ask(
                    k_cache,
                    where[NEXT_BLOCK, a],
                    where[NEXT_HEAD, a],
                    where[NEXT_SLOT, a],
                    chunk,
                    lines,
                )
            for b in T.unroll(side_rows):
                T.evaluate(amx.dot(regs.score + a * side_rows + b, q_register + b, k_register))

    @T.inline
    def score(
        q_rows,
        k_cache,
        depths,
        block_table,
        seq,
        kv_head,
        key,
        kv_begin,
        kv_end,
        row_tile,
        scores,
    ):
        for kt in range(T.ceildiv(depths * 2, side_keys)):
            with T.sblock("key_tiles"):
                vk = T.axis.opaque(T.ceildiv(depths * 2, side_keys), kt)
                T.reads()
                T.writes()
                where = T.sblock_alloc_buffer(places.shape, "int64")
                first: T.let[T.int32] = key + vk * side_keys * SIDE
                locate(block_table, seq, kv_head, first, kv_begin, kv_end, where)
                for i in T.unroll(side_keys * side_rows):
                    T.evaluate(amx.zero(regs.score + i))
                for chunk in T.unroll(chunks):
                    multiply(
                        q_rows,
                        k_cache,
                        kv_head,
                        where,
                        row_tile,
                        chunk,
                        SIDE,
                        regs.q,
                        regs.k,
                    )
                if tail > 0:
                    multiply(
                        q_rows,
                        k_cache,
                        kv_head,
                        where,
                        row_tile,
                        chunks,
                        SIDE // 2,
                        regs.q_tail,
                        regs.k_tail,
                    )
                for a in T.unroll(side_keys):
                    for b in T.unroll(side_rows):
                        T.evaluate(
                            amx.store(
                                regs.score + a * side_rows + b,
                                T.address_of(
                                    scores[
                                        b * SIDE,
                                        (vk * side_keys + a) * SIDE,
                                    ]
                                ),
                                t.keys * 4,
                            )
                        )

    return score


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    rows, keys, group = t.rows, t.keys, t.choices["dot_vectors"]
    groups = max(1, rows // SIDE) // group
    score, probabilities, weigh = _score(t), softmax(t), weigh_part(t)

    @T.inline
    def step(
        q_rows,
        k_cache,
        v_cache,
        block_table,
        seq,
        kv_head,
        key,
        kv_begin,
        kv_end,
        limit,
        sm_scale,
        row_max,
        row_sum,
        acc,
    ):
        # Scores of a few tiles of rows at a time, so that they stay in the first-level cache.
        scores = T.sblock_alloc_buffer((min(rows, group * SIDE), keys), "float32")
        probs = T.sblock_alloc_buffer((rows, keys), "uint16")
        # What lies past the end is neither read nor computed, but for the rest of 32 keys.
        depths: T.let[T.int32] = T.ceildiv(T.min(keys, kv_end - key), DEPTH)
        for g in range(groups):
            with T.sblock("group"):
                vg = T.axis.opaque(groups, g)
                T.reads()
                T.writes()
                row_tile: T.let[T.int32] = vg * group
                score(
                    q_rows,
                    k_cache,
                    depths,
                    block_table,
                    seq,
                    kv_head,
                    key,
                    kv_begin,
                    kv_end,
                    row_tile,
                    scores,
                )
                probabilities(
                    scores,
                    probs,
                    depths,
                    limit,
                    key,
                    T.max(T.abs(sm_scale) * T.float32(LOG2E), T.float32(TINY)),
                    row_tile,
                    row_max,
                    row_sum,
                    acc,
                )
        weigh(probs, v_cache, block_table, seq, kv_head, key, kv_begin, kv_end, acc)

    return step
