"""The end of a walk of warps: what those along the keys hold is folded, and the rows written.

Warps that share rows add up one after the other, always in the same order, through shared memory.
The last of them writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.warp_grid import HALF, REGISTERS, Place, Warps
from tvmpaged.kernels.exp2 import LOG2E
from tvmpaged.kernels.tile import NEG_INF, Expr
from tvmpaged.sm import WARP_SIZE


def fold_warps(w: Warps, parts: Any) -> Callable[..., Any]:
    """Return the program part that leaves the sums of all keys in the last warp of its rows."""
    heights, acc_count = w.heights, w.acc_registers
    values, registers = 2 * heights, heights * acc_count

    each = w.key_warps * w.row_warps * values * WARP_SIZE

    def max_place(key_warp: Expr, at: Place, v: Expr) -> Expr:
        return ((key_warp * w.row_warps + at.row_warp) * values + v) * WARP_SIZE + at.lane

    def sum_place(key_warp: Expr, at: Place, v: Expr) -> Expr:
        return each + max_place(key_warp, at, v)

    def acc_place(at: Place, i: Expr) -> Expr:
        return 2 * each + (at.row_warp * registers + i) * WARP_SIZE + at.lane

    @T.inline
    def fold(at, row_max, row_sum, acc):
        # One buffer: where one ends before the next begins, TVM would give them the same memory,
        # as if all threads were as far as each other.
        held = T.sblock_alloc_buffer((w.fold_elements,), "float32", scope="shared")
        base = T.sblock_alloc_buffer((values,), "float32", scope="local")
        rescale = T.sblock_alloc_buffer((values,), "float32", scope="local")
        for v in T.unroll(values):
            held[max_place(at.key_warp, at, v)] = row_max[at.y, at.x, v]
            held[sum_place(at.key_warp, at, v)] = row_sum[at.y, at.x, v]
        T.evaluate(T.tvm_storage_sync("shared"))
        for v in T.unroll(values):
            for g in range(w.key_warps):
                row_max[at.y, at.x, v] = T.max(row_max[at.y, at.x, v], held[max_place(g, at, v)])
            base[v] = T.Select(
                row_max[at.y, at.x, v] == T.float32(NEG_INF), T.float32(0), row_max[at.y, at.x, v]
            )
            row_sum[at.y, at.x, v] = T.float32(0)
            for g in range(w.key_warps):
                rescale[v] = T.exp2((held[max_place(g, at, v)] - base[v]) * T.float32(LOG2E))
                row_sum[at.y, at.x, v] = (
                    row_sum[at.y, at.x, v] + held[sum_place(g, at, v)] * rescale[v]
                )
            rescale[v] = T.exp2((held[max_place(at.key_warp, at, v)] - base[v]) * T.float32(LOG2E))
        for i in parts.each(registers):
            acc[at.y, at.x, i] = (
                acc[at.y, at.x, i] * rescale[i // acc_count * 2 + i % REGISTERS // 2]
            )
        if at.key_warp == 0:
            for i in parts.each(registers):
                held[acc_place(at, i)] = acc[at.y, at.x, i]
        T.evaluate(T.tvm_storage_sync("shared"))
        for g in range(w.key_warps - 1):
            if at.key_warp == g + 1:
                for i in parts.each(registers):
                    acc[at.y, at.x, i] = held[acc_place(at, i)] + acc[at.y, at.x, i]
                    held[acc_place(at, i)] = acc[at.y, at.x, i]
            T.evaluate(T.tvm_storage_sync("shared"))

    return fold


def finish_rows(w: Warps, parts: Any) -> Callable[..., Any]:
    """Return the program part that folds sums over quads and warps and writes the rows."""
    c, heights, acc_count = w.tile.cache, w.heights, w.acc_registers
    values = 2 * heights
    fold_sum = parts.fold(lambda a, b: a + b, values)
    fold = fold_warps(w, parts)

    @T.inline
    def write(out, token, head, at, v, row_sum, acc):
        for i in parts.each(acc_count // 2):
            out[token, head, i // 2 * HALF + at.lane % 4 * 2 + i % 2] = T.Cast(
                out.dtype,
                acc[at.y, at.x, v // 2 * acc_count + i // 2 * REGISTERS + v % 2 * 2 + i % 2]
                * row_sum[v],
            )

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
        at,
        row_max,
        row_sum,
        acc,
    ):
        fold_sum(row_sum, at)
        if w.key_warps > 1:
            fold(at, row_max, row_sum, acc)
        share = T.sblock_alloc_buffer((values,), "float32", scope="local")
        for v in T.unroll(values):
            # A row that saw no token: out = 0 and lse = -inf.
            share[v] = T.if_then_else(
                row_sum[at.y, at.x, v] == T.float32(0),
                T.float32(0),
                T.float32(1) / row_sum[at.y, at.x, v],
            )
        if at.key_warp == w.key_warps - 1:
            for v in T.unroll(values):
                row: T.let[T.int32] = first + w.row(at, v)
                if row < row_end:
                    token: T.let[T.int32] = T.truncdiv(row, group)
                    head: T.let[T.int32] = kv_head * group + T.truncmod(row, group)
                    if partial < 0:
                        write(out, q_start + token, head, at, v, share, acc)
                    else:
                        write(partial_out, partial + token, head, at, v, share, acc)
                    if at.lane % 4 == 0:
                        log_sum: T.let[T.float32] = T.if_then_else(
                            row_sum[at.y, at.x, v] == T.float32(0),
                            T.float32(NEG_INF),
                            row_max[at.y, at.x, v] + T.log(row_sum[at.y, at.x, v]),
                        )
                        if partial < 0:
                            lse[q_start + token, head] = log_sum
                        else:
                            partial_lse[partial + token, head] = log_sum

    return finish
