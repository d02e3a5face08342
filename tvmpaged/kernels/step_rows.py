"""One kv step for few rows (decode): scores ``[rows, keys]``, vectors along head_dim.

K and V are read once, straight from the cache. A score is a dot product along head_dim, `lanes`
wide, folded at the end by halves; the running maximum and sum go along the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.exp2 import exp2
from tvmpaged.kernels.tile import NEG_INF, Tile


def _add(a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
    return a + b


def _half(rows: int, width: int) -> Callable[..., Any]:
    """Return the program part that folds ``[rows, 2 * width]`` to ``[rows, width]``."""

    @T.inline
    def half(op, source, target):
        for r in range(rows):
            for x in T.vectorized(width):
                with T.sblock("fold"):
                    vr, vx = T.axis.remap("SS", [r, x])
                    target[vr, vx] = op(source[vr, vx], source[vr, vx + width])

    return half


def _fold(rows: int, lanes: int) -> Callable[..., Any]:
    """Return the program part that folds ``[rows, lanes]`` into one column."""
    fold_8, fold_4, fold_2 = _half(rows, 8), _half(rows, 4), _half(rows, 2)

    @T.inline
    def fold(op, source, target, column):
        by_4 = T.sblock_alloc_buffer((rows, 4), "float32")
        by_2 = T.sblock_alloc_buffer((rows, 2), "float32")
        if lanes == 16:
            by_8 = T.sblock_alloc_buffer((rows, 8), "float32")
            fold_8(op, source, by_8)
            fold_4(op, by_8, by_4)
        if lanes == 8:
            fold_4(op, source, by_4)
        fold_2(op, by_4, by_2)
        for r in range(rows):
            with T.sblock("fold_last"):
                vr = T.axis.spatial(rows, r)
                target[vr, column] = op(by_2[vr, 0], by_2[vr, 1])

    return fold


def _score(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = q . K``."""
    c = t.cache
    rows, lanes, run, runs = t.rows, t.lanes, t.run, t.keys // t.run
    fold = _fold(rows, lanes)

    @T.inline
    def score(q_rows, k_cache, block_table, seq, kv_head, key, kv_end, scores):
        for key_run in range(runs):
            with T.sblock("key_run"):
                b = T.axis.opaque(runs, key_run)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + b * run
                block: T.let[T.int64] = c.block(block_table, seq, T.min(first, kv_end - 1))
                slot: T.let[T.int32] = T.truncmod(first, c.block_size)
                for k in range(run):
                    with T.sblock("key"):
                        vk = T.axis.opaque(run, k)
                        T.reads()
                        T.writes()
                        products = T.sblock_alloc_buffer((rows, lanes), "float32")
                        for r in range(rows):
                            for x in T.vectorized(lanes):
                                with T.sblock("start_dot"):
                                    vr, vx = T.axis.remap("SS", [r, x])
                                    products[vr, vx] = T.float32(0)
                        for r, do in T.grid(rows, t.vectors):
                            for x in T.vectorized(lanes):
                                with T.sblock("dot"):
                                    vr, vo, vx = T.axis.remap("SRS", [r, do, x])
                                    products[vr, vx] = products[vr, vx] + q_rows[
                                        vr, vo * lanes + vx
                                    ] * c.wide(
                                        c.at(k_cache, block, kv_head, slot + vk, vo * lanes + vx)
                                    )
                        fold(_add, products, scores, b * run + vk)

    return score


def _prefetch(t: Tile) -> Callable[..., Any]:
    """Return the program part that asks for the K and V of a later step."""
    c = t.cache
    run, runs = t.run, t.keys // t.run

    @T.inline
    def prefetch(k_cache, v_cache, block_table, seq, kv_head, key, kv_end):
        for key_run in range(runs):
            with T.sblock("prefetch"):
                b = T.axis.opaque(runs, key_run)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + t.prefetch_keys + b * run
                block: T.let[T.int64] = c.block(block_table, seq, T.min(first, kv_end - 1))
                slot: T.let[T.int32] = T.truncmod(first, c.block_size)
                for k in range(run):
                    for line in range(T.ceildiv(c.head_dim, t.line)):
                        T.evaluate(t.prefetch(k_cache, block, kv_head, slot + k, line * t.line))
                    for line in range(T.ceildiv(c.head_dim_v, t.line)):
                        T.evaluate(t.prefetch(v_cache, block, kv_head, slot + k, line * t.line))

    return prefetch


def _softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics."""
    rows, lanes, vectors = t.rows, t.lanes, t.keys // t.lanes
    fold = _fold(rows, lanes)

    @T.inline
    def softmax(scores, probs, limit, key, row_max, row_sum, rescale):
        tops = T.sblock_alloc_buffer((rows, lanes), "float32")
        step_max = T.sblock_alloc_buffer((rows, 1), "float32")
        base = T.sblock_alloc_buffer((rows,), "float32")
        for r in range(rows):
            for x in T.vectorized(lanes):
                with T.sblock("start_tops"):
                    vr, vx = T.axis.remap("SS", [r, x])
                    tops[vr, vx] = T.float32(NEG_INF)
        for r, ko in T.grid(rows, vectors):
            for x in T.vectorized(lanes):
                with T.sblock("mask"):
                    vr, vo, vx = T.axis.remap("SRS", [r, ko, x])
                    scores[vr, vo * lanes + vx] = T.Select(
                        key + vo * lanes + vx < limit[vr],
                        scores[vr, vo * lanes + vx],
                        T.float32(NEG_INF),
                    )
                    tops[vr, vx] = T.max(tops[vr, vx], scores[vr, vo * lanes + vx])
        fold(T.max, tops, step_max, 0)
        for r in range(rows):
            with T.sblock("rescale"):
                vr = T.axis.spatial(rows, r)
                # A row that has seen no key yet has -inf as its maximum; 0 stands in for it as the
                # base of the exponentials, so that no -inf is subtracted from another.
                base[vr] = T.max(row_max[vr], step_max[vr, 0])
                rescale[vr] = T.Select(
                    base[vr] == T.float32(NEG_INF), T.float32(0), row_max[vr] - base[vr]
                )
                rescale[vr] = exp2(rescale[vr])
                row_max[vr] = base[vr]
                base[vr] = T.Select(base[vr] == T.float32(NEG_INF), T.float32(0), base[vr])
        for r in range(rows):
            for x in T.vectorized(lanes):
                with T.sblock("rescale_sum"):
                    vr, vx = T.axis.remap("SS", [r, x])
                    row_sum[vr, vx] = row_sum[vr, vx] * rescale[vr]
        for r, ko in T.grid(rows, vectors):
            for x in T.vectorized(lanes):
                with T.sblock("probs"):
                    vr, vo, vx = T.axis.remap("SRS", [r, ko, x])
                    probs[vr, vo * lanes + vx] = scores[vr, vo * lanes + vx] - base[vr]
                    probs[vr, vo * lanes + vx] = exp2(probs[vr, vo * lanes + vx])
                    row_sum[vr, vx] = row_sum[vr, vx] + probs[vr, vo * lanes + vx]

    return softmax


def _weigh(t: Tile) -> Callable[..., Any]:
    """Return the program part ``acc = acc * rescale + probs . V``."""
    c = t.cache
    rows, lanes, run, runs = t.rows, t.lanes, t.run, t.keys // t.run

    @T.inline
    def weigh(probs, rescale, v_cache, block_table, seq, kv_head, key, kv_end, acc):
        for r, do in T.grid(rows, t.vectors_v):
            for x in T.vectorized(lanes):
                with T.sblock("rescale_acc"):
                    vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                    acc[vr, vo * lanes + vx] = acc[vr, vo * lanes + vx] * rescale[vr]
        # Only keys that exist are read: 0 times the NaN of an unused slot would be NaN.
        for key_run in range(T.min(runs, T.ceildiv(kv_end - key, run))):
            with T.sblock("value_run"):
                b = T.axis.opaque(T.min(runs, T.ceildiv(kv_end - key, run)), key_run)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + b * run
                block: T.let[T.int64] = c.block(block_table, seq, first)
                slot: T.let[T.int32] = T.truncmod(first, c.block_size)
                for r, do, k in T.grid(rows, t.vectors_v, T.min(run, kv_end - first)):
                    for x in T.vectorized(lanes):
                        with T.sblock("weigh"):
                            vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                            vk = T.axis.reduce(T.min(run, kv_end - first), k)
                            acc[vr, vo * lanes + vx] = acc[vr, vo * lanes + vx] + probs[
                                vr, b * run + vk
                            ] * c.wide(c.at(v_cache, block, kv_head, slot + vk, vo * lanes + vx))

    return weigh


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    rows, keys = t.rows, t.keys
    prefetch, score, softmax, weigh = _prefetch(t), _score(t), _softmax(t), _weigh(t)

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
        limit,
        row_max,
        row_sum,
        acc,
    ):
        scores = T.sblock_alloc_buffer((rows, keys), "float32")
        probs = T.sblock_alloc_buffer((rows, keys), "float32")
        rescale = T.sblock_alloc_buffer((rows,), "float32")
        if t.prefetch_keys > 0:
            prefetch(k_cache, v_cache, block_table, seq, kv_head, key, kv_end)
        score(q_rows, k_cache, block_table, seq, kv_head, key, kv_end, scores)
        softmax(scores, probs, limit, key, row_max, row_sum, rescale)
        weigh(probs, rescale, v_cache, block_table, seq, kv_head, key, kv_end, acc)

    return step
