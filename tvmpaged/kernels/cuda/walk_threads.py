"""A thread block's walk over a tile of rows: the form of GPUs.

The threads of a block stand in a grid. Those along x share one key's row of K and V, a vector of
`lanes` elements (16 bytes) each; those along y take different keys, and each keeps a running
maximum, sum and weighted sum of its own, so that nothing waits inside the walk::

    keys_per_step 8, dim_threads 4, two thread groups     dims 0..3   4..7   8..11  12..15
    keys key+0  key+2  key+4  key+6   group 0 (y = 0)      x = 0     x = 1   x = 2   x = 3
    keys key+1  key+3  key+5  key+7   group 1 (y = 1)      x = 0     x = 1   x = 2   x = 3

Dot products are folded along x: within a warp by shuffles, where there are none through local
memory, as the target has it; the program is the same. At the end the groups are folded along y
through shared memory, always in the same order.

A row's loads of K and V serve all rows of the tile. Keys past the end are never read: their address
is that of the last one, their score is masked and their row of V passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.finish_threads import finish_rows
from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import NEG_INF, Tile
from tvmpaged.sm import WARP_SIZE

#: The mask that names all threads of a warp: a shuffle under it waits for those that a condition
#: has held up.
ALL_LANES = 0xFFFFFFFF


def _load(t: Tile) -> Callable[..., Any]:
    """Return the program part that loads a step's K and V into registers, as they are."""
    th, c, lanes = Threads(t), t.cache, t.lanes

    @T.inline
    def load_row(cache, dim, vectors, block, kv_head, slot, vx, j, raw):
        for v in T.unroll(vectors):
            if th.is_whole(dim) or (v * th.along_dim + vx) * lanes < dim:
                for i in T.vectorized(lanes):
                    raw[j, v, i] = c.at(
                        cache, block, kv_head, slot, (v * th.along_dim + vx) * lanes + i
                    )

    @T.inline
    def load(k_cache, v_cache, block_table, seq, kv_head, key, kv_end, vy, vx, k_raw, v_raw):
        block_of = T.sblock_alloc_buffer((th.keys,), "int64", scope="local")
        slot_of = T.sblock_alloc_buffer((th.keys,), "int32", scope="local")
        for j in T.unroll(th.keys):
            block_of[j] = c.block(block_table, seq, T.min(key + j * th.groups + vy, kv_end - 1))
            slot_of[j] = T.truncmod(T.min(key + j * th.groups + vy, kv_end - 1), c.block_size)
        for j in T.unroll(th.keys):
            load_row(
                k_cache,
                c.head_dim,
                th.vectors(t.head_dim_cap),
                block_of[j],
                kv_head,
                slot_of[j],
                vx,
                j,
                k_raw,
            )
        for j in T.unroll(th.keys):
            load_row(
                v_cache,
                c.head_dim_v,
                th.vectors(t.head_dim_v_cap),
                block_of[j],
                kv_head,
                slot_of[j],
                vx,
                j,
                v_raw,
            )

    return load


def _fold(t: Tile) -> Callable[..., Any]:
    """Return the program part that sums scores along the threads of a group, for all of them.

    A butterfly: in each stage a thread adds what the one `width` away has. Both forms add the same
    numbers in the same order.
    """
    th = Threads(t)
    stages = th.along_dim.bit_length() - 1

    @T.inline
    def shuffle(scores, vy, vx):
        for stage in T.unroll(stages):
            for r, j in T.grid(t.rows, th.keys):
                scores[r, j] = scores[r, j] + T.tvm_warp_shuffle_xor(
                    T.uint32(ALL_LANES), scores[r, j], 1 << stage, WARP_SIZE, WARP_SIZE
                )

    @T.inline
    def shared(scores, vy, vx):
        parts = T.sblock_alloc_buffer(
            (t.rows, th.keys, th.groups, th.along_dim), "float32", scope="shared"
        )
        for stage in T.unroll(stages):
            for r, j in T.grid(t.rows, th.keys):
                parts[r, j, vy, vx] = scores[r, j]
            T.evaluate(T.tvm_storage_sync("shared"))
            for r, j in T.grid(t.rows, th.keys):
                scores[r, j] = scores[r, j] + parts[r, j, vy, T.bitwise_xor(vx, 1 << stage)]
            T.evaluate(T.tvm_storage_sync("shared"))

    return shuffle if t.choices["fold"] == "shuffle" else shared


def _score(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = q . K``, folded along the threads of a group."""
    th, c, lanes = Threads(t), t.cache, t.lanes
    fold = _fold(t)

    @T.inline
    def score(q_rows, k_raw, vy, vx, scores):
        for r, j in T.grid(t.rows, th.keys):
            scores[r, j] = T.float32(0)
        for v in T.unroll(th.vectors(t.head_dim_cap)):
            if th.is_whole(c.head_dim) or (v * th.along_dim + vx) * lanes < c.head_dim:
                for r, j, i in T.grid(t.rows, th.keys, lanes):
                    scores[r, j] = scores[r, j] + q_rows[r, v, i] * c.wide(k_raw[j, v, i])
        fold(scores, vy, vx)

    return score


def _weigh(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to ``acc = acc * rescale + probs . V``."""
    th, c, lanes, rows = Threads(t), t.cache, t.lanes, t.rows

    @T.inline
    def weigh(scores, v_raw, limit, key, kv_end, sm_scale, vy, vx, row_max, row_sum, acc):
        top = T.sblock_alloc_buffer((rows,), "float32", scope="local")
        base = T.sblock_alloc_buffer((rows,), "float32", scope="local")
        rescale = T.sblock_alloc_buffer((rows,), "float32", scope="local")
        for r in T.unroll(rows):
            top[r] = row_max[r]
            for j in T.unroll(th.keys):
                scores[r, j] = T.Select(
                    key + j * th.groups + vy < limit[r],
                    scores[r, j] * sm_scale,
                    T.float32(NEG_INF),
                )
                top[r] = T.max(top[r], scores[r, j])
            # See row_softmax: 0 stands in for the -inf of a row that has seen no key yet.
            base[r] = T.Select(top[r] == T.float32(NEG_INF), T.float32(0), top[r])
            rescale[r] = T.exp2((row_max[r] - base[r]) * T.float32(LOG2E))
            row_max[r] = top[r]
            row_sum[r] = row_sum[r] * rescale[r]
            for j in T.unroll(th.keys):
                scores[r, j] = T.exp2((scores[r, j] - base[r]) * T.float32(LOG2E))
                row_sum[r] = row_sum[r] + scores[r, j]
        for r, v in T.grid(rows, th.vectors(t.head_dim_v_cap)):
            for i in T.unroll(lanes):
                acc[r, v, i] = acc[r, v, i] * rescale[r]
        for j in T.unroll(th.keys):
            if key + j * th.groups + vy < kv_end:
                for v in T.unroll(th.vectors(t.head_dim_v_cap)):
                    if th.is_whole(c.head_dim_v) or (v * th.along_dim + vx) * lanes < c.head_dim_v:
                        for r, i in T.grid(rows, lanes):
                            acc[r, v, i] = acc[r, v, i] + scores[r, j] * c.wide(v_raw[j, v, i])

    return weigh


def walk(t: Tile) -> Callable[..., Any]:
    """Return the program part that takes one tile of rows over its item's kv range."""
    th, c, lanes, rows = Threads(t), t.cache, t.lanes, t.rows
    load, score, weigh, finish = _load(t), _score(t), _weigh(t), finish_rows(t)
    vectors, vectors_v = th.vectors(t.head_dim_cap), th.vectors(t.head_dim_v_cap)

    @T.inline
    def start(q, group, kv_head, q_start, first, row_end, kv_end, visible, vx, q_rows, limit, acc):
        for r in T.unroll(rows):
            limit[r] = T.min(kv_end, visible + T.truncdiv(T.min(first + r, row_end - 1), group))
            for v in T.unroll(vectors):
                if th.is_whole(c.head_dim) or (v * th.along_dim + vx) * lanes < c.head_dim:
                    for i in T.unroll(lanes):
                        q_rows[r, v, i] = T.Cast(
                            "float32",
                            q[
                                q_start + T.truncdiv(T.min(first + r, row_end - 1), group),
                                kv_head * group + T.truncmod(T.min(first + r, row_end - 1), group),
                                (v * th.along_dim + vx) * lanes + i,
                            ],
                        )
            for v, i in T.grid(vectors_v, lanes):
                acc[r, v, i] = T.float32(0)

    @T.inline
    def run(
        q,
        k_cache,
        v_cache,
        block_table,
        out,
        lse,
        partial_out,
        partial_lse,
        sm_scale,
        seq,
        kv_head,
        group,
        q_start,
        first,
        row_end,
        kv_begin,
        kv_end,
        visible,
        partial,
    ):
        for y in T.thread_binding(th.groups, thread="threadIdx.y"):
            for x in T.thread_binding(th.along_dim, thread="threadIdx.x"):
                with T.sblock("thread"):
                    vy, vx = T.axis.remap("SS", [y, x])
                    T.reads()
                    T.writes()
                    k_whole = T.decl_buffer(
                        c.shape(c.head_dim_extent),
                        c.spec.kv_dtype,
                        data=k_cache.data,
                        strides=c.whole_strides(k_cache, c.head_dim_extent, lanes),
                    )
                    v_whole = T.decl_buffer(
                        c.shape(c.head_dim_v_extent),
                        c.spec.kv_dtype,
                        data=v_cache.data,
                        strides=c.whole_strides(v_cache, c.head_dim_v_extent, lanes),
                    )
                    q_rows = T.sblock_alloc_buffer((rows, vectors, lanes), "float32", scope="local")
                    acc = T.sblock_alloc_buffer((rows, vectors_v, lanes), "float32", scope="local")
                    row_max = T.sblock_alloc_buffer((rows,), "float32", scope="local")
                    row_sum = T.sblock_alloc_buffer((rows,), "float32", scope="local")
                    limit = T.sblock_alloc_buffer((rows,), "int32", scope="local")
                    for r in T.unroll(rows):
                        row_max[r] = T.float32(NEG_INF)
                        row_sum[r] = T.float32(0)
                    start(
                        q,
                        group,
                        kv_head,
                        q_start,
                        first,
                        row_end,
                        kv_end,
                        visible,
                        vx,
                        q_rows,
                        limit,
                        acc,
                    )
                    for s in range(T.ceildiv(kv_end - kv_begin, t.keys)):
                        with T.sblock("kv_step"):
                            vs = T.axis.opaque(T.ceildiv(kv_end - kv_begin, t.keys), s)
                            T.reads()
                            T.writes()
                            key: T.let[T.int32] = kv_begin + vs * t.keys
                            k_raw = T.sblock_alloc_buffer(
                                (th.keys, vectors, lanes), c.spec.kv_dtype, scope="local"
                            )
                            v_raw = T.sblock_alloc_buffer(
                                (th.keys, vectors_v, lanes), c.spec.kv_dtype, scope="local"
                            )
                            scores = T.sblock_alloc_buffer(
                                (rows, th.keys), "float32", scope="local"
                            )
                            load(
                                k_whole,
                                v_whole,
                                block_table,
                                seq,
                                kv_head,
                                key,
                                kv_end,
                                vy,
                                vx,
                                k_raw,
                                v_raw,
                            )
                            score(q_rows, k_raw, vy, vx, scores)
                            weigh(
                                scores,
                                v_raw,
                                limit,
                                key,
                                kv_end,
                                sm_scale,
                                vy,
                                vx,
                                row_max,
                                row_sum,
                                acc,
                            )
                    finish(
                        out,
                        lse,
                        partial_out,
                        partial_lse,
                        group,
                        kv_head,
                        q_start,
                        first,
                        row_end,
                        partial,
                        vy,
                        vx,
                        row_max,
                        row_sum,
                        acc,
                    )

    return run
