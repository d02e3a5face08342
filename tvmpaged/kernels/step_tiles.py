"""One kv step on AMX tiles, for bfloat16: both products in tile registers (`tile_registers`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import Tile
from tvmpaged.kernels.tile_registers import SIDE
from tvmpaged.kernels.tile_scores import score_part
from tvmpaged.kernels.tile_softmax import softmax_columns, softmax_rows
from tvmpaged.kernels.tile_values import weigh_part

#: Least float32 above 0 without denormals: a scale of 0 must leave the -inf of masked keys alone.
_TINY = 1.2e-38


def _stage(t: Tile) -> Callable[..., Any]:
    """Return the program part that copies keys of blocks that no tile fits into scratch."""
    c = t.cache

    @T.inline
    def stage(cache, dim, block_table, seq, kv_head, key, kv_end, target):
        for k in range(t.keys):
            with T.sblock("stage"):
                vk = T.axis.opaque(t.keys, k)
                T.reads()
                T.writes()
                at: T.let[T.int32] = T.min(key + vk, kv_end - 1)
                block: T.let[T.int64] = c.block(block_table, seq, at)
                slot: T.let[T.int32] = T.truncmod(at, c.block_size)
                for do in range(dim // SIDE):
                    for x in T.vectorized(SIDE):
                        target[vk, do * SIDE + x] = tirx.reinterpret(
                            "uint16", c.at(cache, block, kv_head, slot, do * SIDE + x)
                        )

    return stage


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    c, keys = t.cache, t.keys
    dim, dim_v = c.spec.head_dim, c.spec.head_dim_v
    score, weigh = score_part(t), weigh_part(t)
    stage, staged, few = _stage(t), not t.tiles_fit, t.few_rows
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
        kv_end,
        reach,
        limit,
        sm_scale,
        row_max,
        row_sum,
        acc,
    ):
        k_tile = T.sblock_alloc_buffer((staged_keys, dim), "uint16")
        v_tile = T.sblock_alloc_buffer((staged_keys, dim_v), "uint16")
        scores = T.sblock_alloc_buffer((keys, t.columns), "float32")
        rescale = T.sblock_alloc_buffer((t.rows,), "float32")
        if staged:
            stage(k_cache, dim, block_table, seq, kv_head, key, kv_end, k_tile)
            stage(v_cache, dim_v, block_table, seq, kv_head, key, kv_end, v_tile)
        score(q_tiles, k_cache, k_tile, block_table, seq, kv_head, key, kv_end, reach, scores)
        if few:
            probs = T.sblock_alloc_buffer((t.rows, keys), "uint16")
            softmax(scores, probs, limit, key, sm_scale, row_max, row_sum, rescale)
            weigh(
                probs,
                rescale,
                v_cache,
                v_tile,
                block_table,
                seq,
                kv_head,
                key,
                kv_end,
                reach,
                acc,
            )
        else:
            pairs = T.sblock_alloc_buffer((t.rows, keys // 2), "uint32")
            softmax(
                scores,
                pairs,
                limit,
                key,
                T.max(T.abs(sm_scale) * T.float32(LOG2E), T.float32(_TINY)),
                row_max,
                row_sum,
                rescale,
            )
            weigh(
                pairs,
                rescale,
                v_cache,
                v_tile,
                block_table,
                seq,
                kv_head,
                key,
                kv_end,
                reach,
                acc,
            )

    return step
