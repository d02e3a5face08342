"""One kv step on AMX tiles, for bfloat16: both products in tile registers (`tile_registers`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.cpu import block_scores
from tvmpaged.kernels.cpu.tile_scores import score_part
from tvmpaged.kernels.cpu.tile_softmax import softmax_columns, softmax_rows
from tvmpaged.kernels.cpu.tile_values import weigh_part
from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import TINY, Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE


def _stage(t: Tile) -> Callable[..., Any]:
    """Return the program part that copies K of blocks that no tile fits, and asks for K and V."""
    c, size, dim = t.cache, t.cache.spec.block_size, t.cache.spec.head_dim
    ahead = -(-t.prefetch_keys // size) * size  # whole blocks

    @T.inline
    def ask(cache, row, block, head, slot):
        for line in T.unroll(-(-row // DEPTH)):
            T.evaluate(t.prefetch(cache, block, head, slot, line * DEPTH))

    @T.inline
    def copy(cache, block, head, slot, target, key):
        for do in T.unroll(dim // DEPTH):
            target[key, T.Ramp(do * DEPTH, 1, DEPTH)] = tirx.reinterpret(
                f"uint16x{DEPTH}", c.at(cache, block, head, slot, T.Ramp(do * DEPTH, 1, DEPTH))
            )
        if dim % DEPTH > 0:
            target[key, T.Ramp(dim - SIDE, 1, SIDE)] = tirx.reinterpret(
                f"uint16x{SIDE}", c.at(cache, block, head, slot, T.Ramp(dim - SIDE, 1, SIDE))
            )

    @T.inline
    def stage(k_cache, v_cache, block_table, seq, kv_head, key, kv_begin, kv_end, k_tile):
        # Block by block: the keys of one stand in line.
        for b in range(
            T.truncdiv(T.min(key + t.keys, kv_end) - 1, size) - T.truncdiv(key, size) + 1
        ):
            with T.sblock("stage"):
                vb = T.axis.opaque(
                    T.truncdiv(T.min(key + t.keys, kv_end) - 1, size) - T.truncdiv(key, size) + 1, b
                )
                T.reads()
                T.writes()
                at: T.let[T.int32] = (T.truncdiv(key, size) + vb) * size
                block: T.let[T.int64] = c.block(block_table, seq, at)
                begin: T.let[T.int32] = T.max(key - at, 0)
                end: T.let[T.int32] = T.min(size, T.min(key + t.keys, kv_end) - at)
                if ahead > 0:
                    next_head: T.let[T.int32] = t.ahead(kv_head, at + ahead, kv_begin, kv_end, 1)[0]
                    next_key: T.let[T.int32] = t.ahead(kv_head, at + ahead, kv_begin, kv_end, 1)[1]
                    next_block: T.let[T.int64] = c.block(block_table, seq, next_key)
                    for k in range(end - begin):
                        ask(k_cache, c.spec.head_dim, next_block, next_head, begin + k)
                        ask(v_cache, c.spec.head_dim_v, next_block, next_head, begin + k)
                for k in range(end - begin):
                    with T.sblock("stage_key"):
                        vk = T.axis.opaque(end - begin, k)
                        T.reads()
                        T.writes()
                        slot: T.let[T.int32] = begin + vk
                        to: T.let[T.int32] = at + slot - key
                        copy(k_cache, block, kv_head, slot, k_tile, to)

    return stage


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    c, keys = t.cache, t.keys
    dim, by_block = c.spec.head_dim, t.key_rows < SIDE
    score, weigh = score_part(t), weigh_part(t)
    score_blocks = block_scores.score_part(t) if by_block else None
    stage, staged, few = _stage(t), t.copies_keys, t.few_rows
    margin = block_scores.MARGIN if by_block else 0
    softmax = softmax_rows(t) if few else softmax_columns(t)
    staged_keys = keys if staged else 1

    @T.inline
    def step(
        q_tiles,
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
        k_tile = T.sblock_alloc_buffer((staged_keys, dim), "uint16")
        scores = T.sblock_alloc_buffer((keys + 2 * margin, t.columns), "float32")
        rescale = T.sblock_alloc_buffer((t.rows,), "float32")
        if staged:
            stage(k_cache, v_cache, block_table, seq, kv_head, key, kv_begin, kv_end, k_tile)
        # Of many rows' keys nothing past the end is computed, but for the rest of 32.
        depths: T.let[T.int32] = (
            keys // DEPTH if few else T.ceildiv(T.min(keys, kv_end - key), DEPTH)
        )
        if by_block:
            score_blocks(
                q_tiles, k_cache, v_cache, block_table, seq, kv_head, key, kv_begin, kv_end, scores
            )
        else:
            score(
                q_tiles,
                k_cache,
                k_tile,
                depths,
                block_table,
                seq,
                kv_head,
                key,
                kv_begin,
                kv_end,
                scores,
            )
        if few:
            probs = T.sblock_alloc_buffer((t.rows, keys), "uint16")
            softmax(scores, probs, limit, key, sm_scale, row_max, row_sum, rescale)
            weigh(
                probs,
                rescale,
                v_cache,
                block_table,
                seq,
                kv_head,
                key,
                kv_begin,
                kv_end,
                acc,
            )
        else:
            pairs = T.sblock_alloc_buffer((t.rows, keys // 2), "uint32")
            softmax(
                scores,
                pairs,
                depths,
                limit,
                key,
                T.max(T.abs(sm_scale) * T.float32(LOG2E), T.float32(TINY)),
                row_max,
                row_sum,
                acc,
            )
            weigh(
                pairs,
                rescale,
                v_cache,
                block_table,
                seq,
                kv_head,
                key,
                kv_begin,
                kv_end,
                acc,
            )

    return step
