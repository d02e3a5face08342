"""One kv step for few rows (decode): scores ``[rows, keys]``, vectors along head_dim.

K and V are read once, straight from the cache, a group of `lanes` keys at a time. A group's dot
products along head_dim are folded together, so that its scores come out as one vector; the running
maximum and sum go along the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.exp2 import LOG2E, exp2
from tvmpaged.kernels.fold import fold_lanes, fold_rows
from tvmpaged.kernels.tile import NEG_INF, Tile


def _add(a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
    return a + b


def _locate(t: Tile) -> Callable[..., Any]:
    """Return the program part that finds the blocks and slots of a group of keys.

    Where a group always lies in one block, that is one look-up and slots that follow each other.
    """
    c = t.cache

    @T.inline
    def locate(block_table, seq, first, kv_end, block_of, slot_of):
        if t.one_block:
            block_of[0] = c.block(block_table, seq, T.min(first, kv_end - 1))
            slot_of[0] = T.truncmod(first, c.block_size)
        else:
            for k in T.unroll(t.lanes):
                block_of[k] = c.block(block_table, seq, T.min(first + k, kv_end - 1))
                slot_of[k] = T.truncmod(first + k, c.block_size)

    return locate


def _prefetch(t: Tile) -> Callable[..., Any]:
    """Return the program part that asks for the keys, or values, of a later group."""
    locate = _locate(t)

    @T.inline
    def prefetch(cache, dim, block_table, seq, kv_head, later, reach):
        block_of = T.sblock_alloc_buffer((t.lanes,), "int64")
        slot_of = T.sblock_alloc_buffer((t.lanes,), "int32")
        head: T.let[T.int32] = t.ahead(kv_head, later, reach, t.lanes)[0]
        first: T.let[T.int32] = t.ahead(kv_head, later, reach, t.lanes)[1]
        locate(block_table, seq, first, reach, block_of, slot_of)
        for k, line in T.grid(t.lanes, T.ceildiv(dim, t.line)):
            T.evaluate(
                t.prefetch(
                    cache, t.block_at(block_of, k), head, t.slot_at(slot_of, k), line * t.line
                )
            )

    return prefetch


def _score(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = q . K``."""
    c = t.cache
    rows, lanes, groups = t.rows, t.lanes, t.keys // t.lanes
    fold, locate, prefetch = fold_rows(_add, lanes), _locate(t), _prefetch(t)

    @T.inline
    def score(q_rows, k_cache, block_table, seq, kv_head, key, kv_end, reach, scores):
        for group in range(groups):
            with T.sblock("key_group"):
                g = T.axis.opaque(groups, group)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + g * lanes
                block_of = T.sblock_alloc_buffer((lanes,), "int64")
                slot_of = T.sblock_alloc_buffer((lanes,), "int32")
                products = T.sblock_alloc_buffer((rows, lanes, lanes), "float32")
                locate(block_table, seq, first, kv_end, block_of, slot_of)
                if t.prefetch_keys > 0:
                    prefetch(
                        k_cache,
                        c.head_dim,
                        block_table,
                        seq,
                        kv_head,
                        first + t.prefetch_keys,
                        reach,
                    )
                for r, k in T.grid(rows, lanes):
                    for x in T.vectorized(lanes):
                        with T.sblock("start_dot"):
                            vr, vk, vx = T.axis.remap("SSS", [r, k, x])
                            products[vr, vk, vx] = T.float32(0)
                for r, k, do in T.grid(rows, lanes, t.vectors):
                    for x in T.vectorized(lanes):
                        with T.sblock("dot"):
                            vr, vk, vo, vx = T.axis.remap("SSRS", [r, k, do, x])
                            products[vr, vk, vx] = products[vr, vk, vx] + q_rows[
                                vr, vo * lanes + vx
                            ] * c.wide(
                                c.at(
                                    k_cache,
                                    t.block_at(block_of, vk),
                                    kv_head,
                                    t.slot_at(slot_of, vk),
                                    vo * lanes + vx,
                                )
                            )
                for r in range(rows):
                    with T.sblock("fold"):
                        vr = T.axis.opaque(rows, r)
                        T.reads()
                        T.writes()
                        fold(products, vr)
                        scores[vr, T.Ramp(g * lanes, 1, lanes)] = products[
                            vr, 0, T.Ramp(0, 1, lanes)
                        ]

    return score


def softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics."""
    rows, lanes, vectors = t.rows, t.lanes, t.keys // t.lanes
    fold = fold_lanes(T.max, lanes)

    @T.inline
    def run(scores, probs, limit, key, sm_scale, row_max, row_sum, rescale):
        tops = T.sblock_alloc_buffer((rows, lanes), "float32")
        base = T.sblock_alloc_buffer((rows,), "float32")
        for r in range(rows):
            for x in T.vectorized(lanes):
                with T.sblock("start_tops"):
                    vr, vx = T.axis.remap("SS", [r, x])
                    tops[vr, vx] = row_max[vr]
        for r, ko in T.grid(rows, vectors):
            for x in T.vectorized(lanes):
                with T.sblock("mask"):
                    vr, vo, vx = T.axis.remap("SRS", [r, ko, x])
                    scores[vr, vo * lanes + vx] = T.Select(
                        key + vo * lanes + vx < limit[vr],
                        scores[vr, vo * lanes + vx] * sm_scale,
                        T.float32(NEG_INF),
                    )
                    tops[vr, vx] = T.max(tops[vr, vx], scores[vr, vo * lanes + vx])
        for r in range(rows):
            with T.sblock("rescale"):
                vr = T.axis.opaque(rows, r)
                T.reads()
                T.writes()
                fold(tops, vr)
                # A row that has seen no key yet has -inf as its maximum; 0 stands in for it as the
                # base of the exponentials, so that no -inf is subtracted from another.
                base[vr] = T.Select(tops[vr, 0] == T.float32(NEG_INF), T.float32(0), tops[vr, 0])
                rescale[vr] = (row_max[vr] - base[vr]) * T.float32(LOG2E)
                rescale[vr] = exp2(rescale[vr])
                row_max[vr] = tops[vr, 0]
        for r in range(rows):
            for x in T.vectorized(lanes):
                with T.sblock("rescale_sum"):
                    vr, vx = T.axis.remap("SS", [r, x])
                    row_sum[vr, vx] = row_sum[vr, vx] * rescale[vr]
        for r, ko in T.grid(rows, vectors):
            for x in T.vectorized(lanes):
                with T.sblock("probs"):
                    vr, vo, vx = T.axis.remap("SRS", [r, ko, x])
                    probs[vr, vo * lanes + vx] = (
                        scores[vr, vo * lanes + vx] - base[vr]
                    ) * T.float32(LOG2E)
                    probs[vr, vo * lanes + vx] = exp2(probs[vr, vo * lanes + vx])
                    row_sum[vr, vx] = row_sum[vr, vx] + probs[vr, vo * lanes + vx]

    return run


def _weigh(t: Tile) -> Callable[..., Any]:
    """Return the program part ``acc = acc * rescale + probs . V``."""
    c = t.cache
    rows, lanes = t.rows, t.lanes
    locate, prefetch = _locate(t), _prefetch(t)

    @T.inline
    def weigh(probs, rescale, v_cache, block_table, seq, kv_head, key, kv_end, reach, acc):
        for r, do in T.grid(rows, t.vectors_v):
            for x in T.vectorized(lanes):
                with T.sblock("rescale_acc"):
                    vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                    acc[vr, vo * lanes + vx] = acc[vr, vo * lanes + vx] * rescale[vr]
        # Only keys that exist are read: 0 times the NaN of an unused slot would be NaN.
        for group in range(T.ceildiv(T.min(t.keys, kv_end - key), lanes)):
            with T.sblock("value_group"):
                g = T.axis.opaque(T.ceildiv(T.min(t.keys, kv_end - key), lanes), group)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + g * lanes
                block_of = T.sblock_alloc_buffer((lanes,), "int64")
                slot_of = T.sblock_alloc_buffer((lanes,), "int32")
                locate(block_table, seq, first, kv_end, block_of, slot_of)
                if t.prefetch_keys > 0:
                    prefetch(
                        v_cache,
                        c.head_dim_v,
                        block_table,
                        seq,
                        kv_head,
                        first + t.prefetch_keys,
                        reach,
                    )
                for r, do, k in T.grid(rows, t.vectors_v, T.min(lanes, kv_end - first)):
                    for x in T.vectorized(lanes):
                        with T.sblock("weigh"):
                            vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                            vk = T.axis.reduce(T.min(lanes, kv_end - first), k)
                            acc[vr, vo * lanes + vx] = acc[vr, vo * lanes + vx] + probs[
                                vr, g * lanes + vk
                            ] * c.wide(
                                c.at(
                                    v_cache,
                                    t.block_at(block_of, vk),
                                    kv_head,
                                    t.slot_at(slot_of, vk),
                                    vo * lanes + vx,
                                )
                            )

    return weigh


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    rows, keys = t.rows, t.keys
    score, probabilities, weigh = _score(t), softmax(t), _weigh(t)

    @T.inline
    def step(
        q_rows,
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
        scores = T.sblock_alloc_buffer((rows, keys), "float32")
        probs = T.sblock_alloc_buffer((rows, keys), "float32")
        rescale = T.sblock_alloc_buffer((rows,), "float32")
        score(q_rows, k_cache, block_table, seq, kv_head, key, kv_end, reach, scores)
        probabilities(scores, probs, limit, key, sm_scale, row_max, row_sum, rescale)
        weigh(probs, rescale, v_cache, block_table, seq, kv_head, key, kv_end, reach, acc)

    return step
