"""The first product on AMX tiles, for few rows and blocks that tiles of 16 keys do not fit.

Scores ``[keys, 16]`` = K . q, one tile of each block, or equal parts of it, as it lies in the cache
(`TileRegisters.key_rows`). The first and the last tile of a step reach over its ends: scores stand
behind `MARGIN` rows for what the first one has too many, and as many follow them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cpu import amx
from tvmpaged.kernels.tile import Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE

MARGIN = SIDE


def score_part(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = K . q``, which also asks for later K and V."""
    c, regs, size, height = t.cache, t.registers, t.cache.spec.block_size, t.key_rows
    side, parts, chunks = t.choices["dot_keys"], -(-size // height), c.spec.head_dim // DEPTH
    ahead = -(-t.prefetch_keys // size) * size  # whole blocks
    share = -(-height // chunks)
    row_bytes = 2 * (c.spec.head_dim * (c.num_kv_heads if c.nhd else 1))

    def tile_of(position: Any) -> Any:
        """Return the number of the tile that holds a position."""
        return T.truncdiv(position, size) * parts + T.truncdiv(T.truncmod(position, size), height)

    @T.inline
    def ask(k_cache, v_cache, block, head, slot, chunk):
        for k in T.unroll(share):
            if chunk * share + k < height:
                for line in T.unroll(-(-c.spec.head_dim // DEPTH)):
                    T.evaluate(
                        t.prefetch(k_cache, block, head, slot + chunk * share + k, line * DEPTH)
                    )
                for line in T.unroll(-(-c.spec.head_dim_v // DEPTH)):
                    T.evaluate(
                        t.prefetch(v_cache, block, head, slot + chunk * share + k, line * DEPTH)
                    )

    @T.inline
    def score(q_tiles, k_cache, v_cache, block_table, seq, kv_head, key, kv_begin, kv_end, scores):
        first: T.let[T.int32] = tile_of(key)
        last: T.let[T.int32] = tile_of(T.min(key + t.keys, kv_end) - 1)
        for kt in range(T.truncdiv(last - first, side) + 1):
            with T.sblock("key_tiles"):
                vk = T.axis.opaque(T.truncdiv(last - first, side) + 1, kt)
                T.reads()
                T.writes()
                # Of each tile: its place in the sequence, block and slot; the same for later.
                at = T.sblock_alloc_buffer((side,), "int32")
                slot = T.sblock_alloc_buffer((side,), "int32")
                block = T.sblock_alloc_buffer((side,), "int64")
                next_head = T.sblock_alloc_buffer((side,), "int32")
                next_block = T.sblock_alloc_buffer((side,), "int64")
                for a in T.unroll(side):
                    tile: T.let[T.int32] = T.min(first + vk * side + a, last)
                    start: T.let[T.int32] = T.truncdiv(tile, parts) * size
                    slot[a] = T.min(T.truncmod(tile, parts) * height, size - height)
                    at[a] = start + slot[a] - key
                    block[a] = c.block(block_table, seq, start)
                    if ahead > 0:
                        later: T.let[T.int32] = t.ahead(
                            kv_head, start + ahead, kv_begin, kv_end, size
                        )[1]
                        next_head[a] = t.ahead(kv_head, start + ahead, kv_begin, kv_end, size)[0]
                        next_block[a] = c.block(block_table, seq, later)
                for a in T.unroll(side):
                    T.evaluate(amx.zero(regs.score + a))
                for chunk in T.unroll(chunks):
                    T.evaluate(
                        amx.load(regs.q, T.address_of(q_tiles[chunk * SIDE, 0]), t.columns * 4)
                    )
                    for a in T.unroll(side):
                        T.evaluate(
                            amx.load(
                                regs.k,
                                T.address_of(
                                    c.at(k_cache, block[a], kv_head, slot[a], chunk * DEPTH)
                                ),
                                row_bytes,
                            )
                        )
                        if ahead > 0:
                            ask(k_cache, v_cache, next_block[a], next_head[a], slot[a], chunk)
                        T.evaluate(amx.dot(regs.score + a, regs.k, regs.q))
                for a in T.unroll(side):
                    T.evaluate(
                        amx.store(
                            regs.score + a,
                            T.address_of(scores[MARGIN + at[a], 0]),
                            t.columns * 4,
                        )
                    )

    return score
