"""A thread block's walk over a tile of rows: the form of GPUs.

The threads of a block stand in a grid. Those along x share one key's row of K and V, a vector of
`lanes` elements (16 bytes) each; those along y take different keys, and each keeps a running
maximum, sum and weighted sum of its own, so that nothing waits inside the walk::

    keys_per_step 8, dim_threads 4, two thread groups     dims 0..3   4..7   8..11  12..15
    keys key+0  key+2  key+4  key+6   group 0 (y = 0)      x = 0     x = 1   x = 2   x = 3
    keys key+1  key+3  key+5  key+7   group 1 (y = 1)      x = 0     x = 1   x = 2   x = 3

Dot products are folded along x (`score_threads`). At the end the groups are folded along y through
shared memory, always in the same order.

A row's K and V serve all rows of the tile. A thread loads its own vectors of a step as they come
(`load_vectors`), or copies them to shared memory several steps ahead (`stage_vectors`): ``stages``
says which, and how many. Keys past the end are never read: their score is masked and their row of V
passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.finish_threads import finish_rows
from tvmpaged.kernels.cuda.load_vectors import load_vectors
from tvmpaged.kernels.cuda.score_threads import score_keys
from tvmpaged.kernels.cuda.source import Source
from tvmpaged.kernels.cuda.stage_vectors import (
    Stages,
    commit,
    find_blocks,
    stage_vectors,
    take_vectors,
    wait,
)
from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import NEG_INF, Tile


def _weigh(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to ``acc = acc * rescale + probs . V``."""
    th, c, lanes, rows = Threads(t), t.cache, t.lanes, t.rows

    @T.inline
    def weigh(source, scores, v_raw, limit, key, sm_scale, row_max, row_sum, acc):
        top = T.sblock_alloc_buffer((rows,), "float32", scope="local")
        base = T.sblock_alloc_buffer((rows,), "float32", scope="local")
        rescale = T.sblock_alloc_buffer((rows,), "float32", scope="local")
        for r in T.unroll(rows):
            top[r] = row_max[r]
            for j in T.unroll(th.keys):
                scores[r, j] = T.Select(
                    key + j * th.groups + source.y < limit[r],
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
            if key + j * th.groups + source.y < source.kv_end:
                for v in T.unroll(th.vectors(t.head_dim_v_cap)):
                    if (
                        th.is_whole(c.head_dim_v)
                        or (v * th.along_dim + source.x) * lanes < c.head_dim_v
                    ):
                        for r, i in T.grid(rows, lanes):
                            acc[r, v, i] = acc[r, v, i] + scores[r, j] * c.wide(v_raw[j, v, i])

    return weigh


def _start(t: Tile) -> Callable[..., Any]:
    """Return the program part that loads a tile's q and clears what is summed.

    Rows past the end repeat the last one, and are not written.
    """
    th, c, lanes, rows = Threads(t), t.cache, t.lanes, t.rows

    @T.inline
    def start(q, group, kv_head, q_start, first, row_end, kv_end, visible, vx, q_rows, limit, acc):
        for r in T.unroll(rows):
            limit[r] = T.min(kv_end, visible + T.truncdiv(T.min(first + r, row_end - 1), group))
            for v in T.unroll(th.vectors(t.head_dim_cap)):
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
            for v, i in T.grid(th.vectors(t.head_dim_v_cap), lanes):
                acc[r, v, i] = T.float32(0)

    return start


def _step(t: Tile) -> Callable[..., Any]:
    """Return the program part that takes a step's K and V as they come."""
    th, c = Threads(t), t.cache
    load, score, weigh = load_vectors(t), score_keys(t), _weigh(t)
    vectors, vectors_v = th.vectors(t.head_dim_cap), th.vectors(t.head_dim_v_cap)

    @T.inline
    def step(source, _vs, key, limit, sm_scale, q_rows, row_max, row_sum, acc):
        k_raw = T.sblock_alloc_buffer((th.keys, vectors, t.lanes), c.spec.kv_dtype, scope="local")
        v_raw = T.sblock_alloc_buffer((th.keys, vectors_v, t.lanes), c.spec.kv_dtype, scope="local")
        scores = T.sblock_alloc_buffer((t.rows, th.keys), "float32", scope="local")
        load(source, key, k_raw, v_raw)
        score(q_rows, k_raw, source.y, source.x, scores)
        weigh(source, scores, v_raw, limit, key, sm_scale, row_max, row_sum, acc)

    return step


def _staged_step(t: Tile) -> Callable[..., Any]:
    """Return the program part that starts a step's copies, and takes what lay in their place."""
    th, c, s = Threads(t), t.cache, Stages(t)
    find, stage, score, weigh = find_blocks(t), stage_vectors(t), score_keys(t), _weigh(t)
    take_k = take_vectors(t, c.head_dim, t.head_dim_cap)
    take_v = take_vectors(t, c.head_dim_v, t.head_dim_v_cap)
    vectors, vectors_v = th.vectors(t.head_dim_cap), th.vectors(t.head_dim_v_cap)

    @T.inline
    def step(source, vs, key, limit, sm_scale, q_rows, row_max, row_sum, acc):
        k_raw = T.sblock_alloc_buffer((th.keys, vectors, t.lanes), c.spec.kv_dtype, scope="local")
        v_raw = T.sblock_alloc_buffer((th.keys, vectors_v, t.lanes), c.spec.kv_dtype, scope="local")
        scores = T.sblock_alloc_buffer((t.rows, th.keys), "float32", scope="local")
        block_of = T.sblock_alloc_buffer((th.keys,), "int32", scope="local")
        begin: T.let[T.int32] = vs % s.count * s.stage
        if key < source.kv_end:
            find(source, key, block_of)
        if vs >= s.count:
            T.evaluate(wait(t, s.count - 1))
            take_k(source, begin, k_raw)
            score(q_rows, k_raw, source.y, source.x, scores)
            take_v(source, begin + s.v_begin, v_raw)
            weigh(
                source,
                scores,
                v_raw,
                limit,
                key - s.count * t.keys,
                sm_scale,
                row_max,
                row_sum,
                acc,
            )
        if key < source.kv_end:
            stage(source, key, block_of, begin)
        T.evaluate(commit(t))

    return step


def walk(t: Tile) -> Callable[..., Any]:
    """Return the program part that takes one tile of rows over its item's kv range."""
    th, c, lanes, rows = Threads(t), t.cache, t.lanes, t.rows
    start, finish = _start(t), finish_rows(t)
    vectors, vectors_v = th.vectors(t.head_dim_cap), th.vectors(t.head_dim_v_cap)
    stages = Stages(t)
    step = _staged_step(t) if stages.ahead else _step(t)

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
                    tile = T.sblock_alloc_buffer(
                        (stages.elements,), c.spec.kv_dtype, scope="shared"
                    )
                    q_rows = T.sblock_alloc_buffer((rows, vectors, lanes), "float32", scope="local")
                    acc = T.sblock_alloc_buffer((rows, vectors_v, lanes), "float32", scope="local")
                    row_max = T.sblock_alloc_buffer((rows,), "float32", scope="local")
                    row_sum = T.sblock_alloc_buffer((rows,), "float32", scope="local")
                    limit = T.sblock_alloc_buffer((rows,), "int32", scope="local")
                    source = T.meta_var(
                        Source(k_whole, v_whole, block_table, seq, kv_head, kv_end, vy, vx, tile)
                    )
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
                    if stages.ahead > 0:
                        # Named again at the end: else TVM gives its memory to what `finish` folds,
                        # as if all threads were as far as each other.
                        T.evaluate(T.address_of(tile[0]))
                    steps: T.let[T.int32] = T.ceildiv(kv_end - kv_begin, t.keys) + stages.ahead
                    for s in range(steps):
                        with T.sblock("kv_step"):
                            vs = T.axis.opaque(steps, s)
                            T.reads()
                            T.writes()
                            key: T.let[T.int32] = kv_begin + vs * t.keys
                            step(source, vs, key, limit, sm_scale, q_rows, row_max, row_sum, acc)
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
                    if stages.ahead > 0:
                        T.evaluate(T.address_of(tile[0]))

    return run
