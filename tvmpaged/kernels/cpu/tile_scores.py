"""The first product on AMX tiles: scores ``[keys, rows]`` = K . q.

K is an operand as it lies in the cache; q is laid out as pairs of dims once per tile of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.cpu import amx
from tvmpaged.kernels.cpu.places import (
    BLOCK,
    NEXT_BLOCK,
    NEXT_HEAD,
    NEXT_SLOT,
    SLOT,
    TilePlaces,
)
from tvmpaged.kernels.cpu.registers import registers
from tvmpaged.kernels.cpu.transpose import shuffle, transpose
from tvmpaged.kernels.tile import Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE


def load_q(t: Tile) -> Callable[..., Any]:
    """Return the program part that lays query rows out as pairs, ``[head_dim / 2, columns]``."""
    rows, dim = t.rows, t.cache.spec.head_dim
    chunks, tail = dim // DEPTH, dim % DEPTH

    def pairs_of(q: Any, token: Any, head: Any, chunk: Any, n: int) -> Any:
        value = tirx.reinterpret(f"uint32x{n // 2}", q[token, head, T.Ramp(chunk * DEPTH, 1, n)])
        if n < DEPTH:
            value = shuffle(value, T.Broadcast(T.uint32(0), n // 2), list(range(SIDE)))
        return value

    def load_chunk(
        q: Any,
        q_start: Any,
        token_of: Any,
        head_of: Any,
        sign: Any,
        column: Any,
        chunk: Any,
        n: int,
        q_tiles: Any,
    ) -> None:
        """Emit the laying out of 16 rows' dims, `n` of them."""
        block = registers(SIDE, SIDE, "uint32")
        for r, each in enumerate(block):
            each.set(T.Broadcast(T.uint32(0), SIDE))
            if r < rows:
                row = column * SIDE + r
                pairs = pairs_of(q, q_start + token_of[row], head_of[row], chunk, n)
                each.set(T.bitwise_xor(pairs, T.Broadcast(sign, SIDE)))
        transpose(block)
        for pair, each in enumerate(block[: n // 2]):
            T.buffer_store(
                q_tiles, each.value, [chunk * SIDE + pair, T.Ramp(column * SIDE, 1, SIDE)]
            )

    @T.inline
    def run(q, q_start, token_of, head_of, sm_scale, q_tiles):
        # The scale's sign goes into q, so that greater scores have greater logits.
        sign: T.let[T.uint32] = T.Select(sm_scale < T.float32(0), T.uint32(0x80008000), T.uint32(0))
        for column in range(t.columns // SIDE):
            with T.sblock("load_q"):
                vc = T.axis.opaque(t.columns // SIDE, column)
                T.reads()
                T.writes()
                for chunk in range(chunks):
                    with T.sblock("load_chunk"):
                        vd = T.axis.opaque(chunks, chunk)
                        T.reads()
                        T.writes()
                        load_chunk(q, q_start, token_of, head_of, sign, vc, vd, DEPTH, q_tiles)
                if tail > 0:
                    load_chunk(q, q_start, token_of, head_of, sign, vc, chunks, tail, q_tiles)

    return run


def score_part(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = K . q``."""
    c, regs = t.cache, t.registers
    side_keys, side_columns = t.choices["dot_keys"], t.choices["dot_vectors"]
    column_tiles = t.columns // SIDE // side_columns
    dim = c.spec.head_dim
    chunks, tail = dim // DEPTH, dim % DEPTH
    staged = t.copies_keys
    ahead = 0 if staged else t.prefetch_keys
    places = TilePlaces(t, side_keys, ahead)
    locate = places.locate()
    # The keys of a later step are asked for a few whole rows at a time, among the products.
    share, lines = -(-SIDE // (chunks + (tail > 0))), -(-dim // DEPTH)
    row_bytes = 2 * (dim if staged or not c.nhd else dim * c.num_kv_heads)

    def address(
        k_cache: Any, k_tile: Any, block: Any, head: Any, slot: Any, key: Any, d: Any
    ) -> Any:
        return T.address_of(k_tile[key, d] if staged else c.at(k_cache, block, head, slot, d))

    @T.inline
    def ask(k_cache, block, head, slot, chunk):
        for k, line in T.grid(T.min(share, SIDE - chunk * share), lines):
            T.evaluate(t.prefetch(k_cache, block, head, slot + chunk * share + k, line * DEPTH))

    @T.inline
    def multiply(
        q_tiles,
        k_cache,
        k_tile,
        head,
        where,
        key_tile,
        column_tile,
        chunk,
        k_register,
        q_register,
    ):
        for b in T.unroll(side_columns):
            T.evaluate(
                amx.load(
                    q_register + b,
                    T.address_of(q_tiles[chunk * SIDE, (column_tile + b) * SIDE]),
                    t.columns * 4,
                )
            )
        for a in T.unroll(side_keys):
            T.evaluate(
                amx.load(
                    k_register,
                    address(
                        k_cache,
                        k_tile,
                        where[BLOCK, a],
                        head,
                        where[SLOT, a],
                        (key_tile + a) * SIDE,
                        chunk * DEPTH,
                    ),
                    row_bytes,
                )
            )
            if ahead > 0:
                ask(
                    k_cache,
                    where[NEXT_BLOCK, a],
                    where[NEXT_HEAD, a],
                    where[NEXT_SLOT, a],
                    chunk,
                )
            for b in T.unroll(side_columns):
                T.evaluate(amx.dot(regs.score + a * side_columns + b, k_register, q_register + b))

    @T.inline
    def score(
        q_tiles, k_cache, k_tile, depths, block_table, seq, kv_head, key, kv_begin, kv_end, scores
    ):
        for kt in range(T.ceildiv(depths * 2, side_keys)):
            with T.sblock("key_tiles"):
                vk = T.axis.opaque(T.ceildiv(depths * 2, side_keys), kt)
                T.reads()
                T.writes()
                where = T.sblock_alloc_buffer(places.shape, "int64")
                first: T.let[T.int32] = key + vk * side_keys * SIDE
                locate(block_table, seq, kv_head, first, kv_begin, kv_end, where)
                for ct in range(column_tiles):
                    with T.sblock("score_tiles"):
                        vc = T.axis.opaque(column_tiles, ct)
                        T.reads()
                        T.writes()
                        for i in T.unroll(side_keys * side_columns):
                            T.evaluate(amx.zero(regs.score + i))
                        for chunk in T.unroll(chunks):
                            multiply(
                                q_tiles,
                                k_cache,
                                k_tile,
                                kv_head,
                                where,
                                vk * side_keys,
                                vc * side_columns,
                                chunk,
                                regs.k,
                                regs.q,
                            )
                        if tail > 0:
                            multiply(
                                q_tiles,
                                k_cache,
                                k_tile,
                                kv_head,
                                where,
                                vk * side_keys,
                                vc * side_columns,
                                chunks,
                                regs.k_tail,
                                regs.q_tail,
                            )
                        for a in T.unroll(side_keys):
                            for b in T.unroll(side_columns):
                                T.evaluate(
                                    amx.store(
                                        regs.score + a * side_columns + b,
                                        T.address_of(
                                            scores[
                                                (vk * side_keys + a) * SIDE,
                                                (vc * side_columns + b) * SIDE,
                                            ]
                                        ),
                                        t.columns * 4,
                                    )
                                )

    return score
