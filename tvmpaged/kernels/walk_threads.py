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
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import NEG_INF, Expr, Tile
from tvmpaged.sm import WARP_SIZE

#: The mask that names all threads of a warp: a shuffle under it waits for those that a condition
#: has held up.
ALL_LANES = 0xFFFFFFFF


@dataclass(frozen=True)
class Threads:
    """How a thread block is laid over a tile of rows and a step of keys."""

    tile: Tile

    @property
    def along_dim(self) -> int:
        """Threads that share a key."""
        return int(self.tile.choices["dim_threads"])

    @property
    def groups(self) -> int:
        """Groups of threads, each with keys of its own."""
        return int(self.tile.choices["threads"]) // self.along_dim

    @property
    def keys(self) -> int:
        """Keys of a step that one group takes."""
        return self.tile.keys // self.groups

    def vectors(self, dim_cap: int) -> int:
        """Vectors of a row that one thread holds, at most."""
        return -(-dim_cap // (self.along_dim * self.tile.lanes))

    def is_whole(self, dim: Expr) -> bool:
        """Whether a row fills the vectors of all threads."""
        return isinstance(dim, int) and dim % (self.along_dim * self.tile.lanes) == 0


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
            # See step_rows: 0 stands in for the -inf of a row that has seen no key yet.
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


def _finish(t: Tile) -> Callable[..., Any]:
    """Return the program part that folds the groups of threads and writes the rows."""
    th, c, lanes, rows = Threads(t), t.cache, t.lanes, t.rows
    threads = th.groups * th.along_dim

    @T.inline
    def finish(
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
    ):
        all_max = T.sblock_alloc_buffer((th.groups, rows), "float32", scope="shared")
        all_sum = T.sblock_alloc_buffer((th.groups, rows), "float32", scope="shared")
        all_acc = T.sblock_alloc_buffer((th.groups, t.head_dim_v_cap), "float32", scope="shared")
        top = T.sblock_alloc_buffer((1,), "float32", scope="local")
        total = T.sblock_alloc_buffer((1,), "float32", scope="local")
        value = T.sblock_alloc_buffer((1,), "float32", scope="local")
        if vx == 0:
            for r in T.unroll(rows):
                all_max[vy, r] = row_max[r]
                all_sum[vy, r] = row_sum[r]
        T.evaluate(T.tvm_storage_sync("shared"))
        for r in T.unroll(rows):  # sums stand in registers, which have no index at run time
            top[0] = T.float32(NEG_INF)
            for g in range(th.groups):
                top[0] = T.max(top[0], all_max[g, r])
            value[0] = T.Select(top[0] == T.float32(NEG_INF), T.float32(0), top[0])
            total[0] = T.float32(0)
            for g in range(th.groups):
                total[0] = total[0] + all_sum[g, r] * T.exp2(
                    (all_max[g, r] - value[0]) * T.float32(LOG2E)
                )
            value[0] = T.exp2((all_max[vy, r] - value[0]) * T.float32(LOG2E))
            for v in T.unroll(th.vectors(t.head_dim_v_cap)):
                if th.is_whole(c.head_dim_v) or (v * th.along_dim + vx) * lanes < c.head_dim_v:
                    for i in T.unroll(lanes):
                        all_acc[vy, (v * th.along_dim + vx) * lanes + i] = acc[r, v, i] * value[0]
            T.evaluate(T.tvm_storage_sync("shared"))
            # Rows past the end repeat the last one, and are not written.
            if first + r < row_end:
                for step in range(T.ceildiv(c.head_dim_v, threads)):
                    if step * threads + vy * th.along_dim + vx < c.head_dim_v:
                        value[0] = T.float32(0)
                        for g in range(th.groups):
                            value[0] = (
                                value[0] + all_acc[g, step * threads + vy * th.along_dim + vx]
                            )
                        # A row that saw no token: out = 0 and lse = -inf.
                        value[0] = T.if_then_else(
                            total[0] == T.float32(0), T.float32(0), value[0] / total[0]
                        )
                        if partial < 0:
                            out[
                                q_start + T.truncdiv(first + r, group),
                                kv_head * group + T.truncmod(first + r, group),
                                step * threads + vy * th.along_dim + vx,
                            ] = T.Cast(c.spec.out_dtype, value[0])
                        else:
                            partial_out[
                                partial + T.truncdiv(first + r, group),
                                kv_head * group + T.truncmod(first + r, group),
                                step * threads + vy * th.along_dim + vx,
                            ] = value[0]
                if vy * th.along_dim + vx == 0:
                    value[0] = T.if_then_else(
                        total[0] == T.float32(0), T.float32(NEG_INF), top[0] + T.log(total[0])
                    )
                    if partial < 0:
                        lse[
                            q_start + T.truncdiv(first + r, group),
                            kv_head * group + T.truncmod(first + r, group),
                        ] = value[0]
                    else:
                        partial_lse[
                            partial + T.truncdiv(first + r, group),
                            kv_head * group + T.truncmod(first + r, group),
                        ] = value[0]
            T.evaluate(T.tvm_storage_sync("shared"))

    return finish


def walk(t: Tile) -> Callable[..., Any]:
    """Return the program part that takes one tile of rows over its item's kv range."""
    th, c, lanes, rows = Threads(t), t.cache, t.lanes, t.rows
    load, score, weigh, finish = _load(t), _score(t), _weigh(t), _finish(t)
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
