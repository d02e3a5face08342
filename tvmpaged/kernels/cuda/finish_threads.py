"""The end of a thread block's walk: its groups of threads are folded, and the rows written.

A row at a time goes through shared memory. The groups are added in the same order always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import NEG_INF, Tile


def finish_rows(t: Tile) -> Callable[..., Any]:
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
