"""One kv step for many rows (prefill): scores ``[keys, rows]``, vectors along the rows.

q stands transposed, ``[head_dim, rows]``. Then a score is a sum over head_dim of K elements, each
broadcast over the rows: K is used as it lies, nothing is folded across lanes, and the running
maximum and sum are vectors too. K and V are widened into float32 tiles first, which costs one pass
over the step's keys and serves all rows; keys past the end become zero rows of V there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.exp2 import LOG2E, exp2
from tvmpaged.kernels.tile import NEG_INF, Tile


def _load(t: Tile) -> Callable[..., Any]:
    """Return the program part that widens the step's K and V into tiles."""
    c = t.cache
    lanes, run, runs = t.lanes, t.run, t.keys // t.run

    @T.inline
    def load(k_cache, v_cache, block_table, seq, kv_head, key, kv_end, k_tile, v_tile):
        for key_run in range(runs):
            with T.sblock("key_run"):
                b = T.axis.opaque(runs, key_run)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + b * run
                block: T.let[T.int64] = c.block(block_table, seq, T.min(first, kv_end - 1))
                slot: T.let[T.int32] = T.truncmod(first, c.block_size)
                for k, do in T.grid(run, t.vectors):
                    for x in T.vectorized(lanes):
                        with T.sblock("load_k"):
                            vk, vo, vx = T.axis.remap("SSS", [k, do, x])
                            k_tile[b * run + vk, vo * lanes + vx] = c.wide(
                                c.at(k_cache, block, kv_head, slot + vk, vo * lanes + vx)
                            )
                for k, do in T.grid(run, t.vectors_v):
                    for x in T.vectorized(lanes):
                        with T.sblock("load_v"):
                            vk, vo, vx = T.axis.remap("SSS", [k, do, x])
                            v_tile[b * run + vk, vo * lanes + vx] = T.Select(
                                first + vk < kv_end,
                                c.wide(c.at(v_cache, block, kv_head, slot + vk, vo * lanes + vx)),
                                T.float32(0),
                            )

    return load


def _score(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = K . q``."""
    c = t.cache
    lanes, keys, vectors = t.lanes, t.keys, t.rows // t.lanes

    @T.inline
    def score(q_columns, k_tile, scores):
        for k, ro in T.grid(keys, vectors):
            for x in T.vectorized(lanes):
                with T.sblock("start_dot"):
                    vk, vr, vx = T.axis.remap("SSS", [k, ro, x])
                    scores[vk, vr * lanes + vx] = T.float32(0)
        for k, ro, d in T.grid(keys, vectors, c.head_dim):
            for x in T.vectorized(lanes):
                with T.sblock("dot"):
                    vk, vr, vd, vx = T.axis.remap("SSRS", [k, ro, d, x])
                    scores[vk, vr * lanes + vx] = (
                        scores[vk, vr * lanes + vx]
                        + k_tile[vk, vd] * q_columns[vd, vr * lanes + vx]
                    )

    return score


def _softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics."""
    lanes, keys, vectors = t.lanes, t.keys, t.rows // t.lanes

    @T.inline
    def softmax(scores, limit, key, sm_scale, row_max, row_sum, rescale):
        base = T.sblock_alloc_buffer((t.rows,), "float32")
        for ro in range(vectors):
            for x in T.vectorized(lanes):
                with T.sblock("start_base"):
                    vr, vx = T.axis.remap("SS", [ro, x])
                    base[vr * lanes + vx] = row_max[vr * lanes + vx]
        for ro, k in T.grid(vectors, keys):
            for x in T.vectorized(lanes):
                with T.sblock("mask"):
                    vr, vk, vx = T.axis.remap("SRS", [ro, k, x])
                    scores[vk, vr * lanes + vx] = T.Select(
                        key + vk < limit[vr * lanes + vx],
                        scores[vk, vr * lanes + vx] * sm_scale,
                        T.float32(NEG_INF),
                    )
                    base[vr * lanes + vx] = T.max(
                        base[vr * lanes + vx], scores[vk, vr * lanes + vx]
                    )
        for ro in range(vectors):
            for x in T.vectorized(lanes):
                with T.sblock("rescale"):
                    vr, vx = T.axis.remap("SS", [ro, x])
                    # See step_rows: 0 stands in for the -inf of a row that has seen no key yet.
                    rescale[vr * lanes + vx] = T.Select(
                        base[vr * lanes + vx] == T.float32(NEG_INF),
                        T.float32(0),
                        (row_max[vr * lanes + vx] - base[vr * lanes + vx]) * T.float32(LOG2E),
                    )
                    rescale[vr * lanes + vx] = exp2(rescale[vr * lanes + vx])
                    row_max[vr * lanes + vx] = base[vr * lanes + vx]
                    base[vr * lanes + vx] = T.Select(
                        base[vr * lanes + vx] == T.float32(NEG_INF),
                        T.float32(0),
                        base[vr * lanes + vx],
                    )
                    row_sum[vr * lanes + vx, 0] = (
                        row_sum[vr * lanes + vx, 0] * rescale[vr * lanes + vx]
                    )
        for ro, k in T.grid(vectors, keys):
            for x in T.vectorized(lanes):
                with T.sblock("probs"):
                    vr, vk, vx = T.axis.remap("SRS", [ro, k, x])
                    scores[vk, vr * lanes + vx] = (
                        scores[vk, vr * lanes + vx] - base[vr * lanes + vx]
                    ) * T.float32(LOG2E)
                    scores[vk, vr * lanes + vx] = exp2(scores[vk, vr * lanes + vx])
                    row_sum[vr * lanes + vx, 0] = (
                        row_sum[vr * lanes + vx, 0] + scores[vk, vr * lanes + vx]
                    )

    return softmax


def _weigh(t: Tile) -> Callable[..., Any]:
    """Return the program part ``acc = acc * rescale + probs . V``."""
    rows, keys, lanes = t.rows, t.keys, t.lanes

    @T.inline
    def weigh(probs, rescale, v_tile, acc):
        for r, do in T.grid(rows, t.vectors_v):
            for x in T.vectorized(lanes):
                with T.sblock("rescale_acc"):
                    vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                    acc[vr, vo * lanes + vx] = acc[vr, vo * lanes + vx] * rescale[vr]
        for r, do, k in T.grid(rows, t.vectors_v, keys):
            for x in T.vectorized(lanes):
                with T.sblock("weigh"):
                    vr, vo, vk, vx = T.axis.remap("SSRS", [r, do, k, x])
                    acc[vr, vo * lanes + vx] = (
                        acc[vr, vo * lanes + vx] + probs[vk, vr] * v_tile[vk, vo * lanes + vx]
                    )

    return weigh


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    load, score, softmax, weigh = _load(t), _score(t), _softmax(t), _weigh(t)

    @T.inline
    def step(
        q_columns,
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
        k_tile = T.sblock_alloc_buffer((t.keys, t.head_dim_cap), "float32")
        v_tile = T.sblock_alloc_buffer((t.keys, t.head_dim_v_cap), "float32")
        scores = T.sblock_alloc_buffer((t.keys, t.rows), "float32")
        rescale = T.sblock_alloc_buffer((t.rows,), "float32")
        load(k_cache, v_cache, block_table, seq, kv_head, key, kv_end, k_tile, v_tile)
        score(q_columns, k_tile, scores)
        softmax(scores, limit, key, sm_scale, row_max, row_sum, rescale)
        weigh(scores, rescale, v_tile, acc)

    return step
