"""Merge partial attentions over disjoint kv ranges by their log-sum-exps.

The partials of a row are folded left to right, always in the order of their kv ranges, so the bits
do not depend on which worker made them. A partial that saw nothing (lse -inf) is skipped whatever
its values are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.exp2 import LOG2E, exp2
from tvmpaged.kernels.tile import NEG_INF
from tvmpaged.spec import MAX_HEAD_DIM, AttentionSpec
from tvmpaged.worklist import MERGE_FIELDS, Merge

#: -inf as it is stored. Compared as bits, for a NaN is "unequal" to no float in compiled code, and
#: must not pass for a part that saw nothing.
NEG_INF_BITS = -0x800000


def _vectors(head_dim: tirx.Var, lanes: int) -> tirx.PrimExpr:
    """Return a row's vectors as the int32 that loops count in."""
    return tirx.Cast("int32", tirx.truncdiv(head_dim, tirx.const(lanes, "int64")))


def _row_of_vectors(spec: AttentionSpec, choices: dict[str, Any]) -> Callable[..., Any]:
    """Return the program part that merges one row by one worker, a vector at a time."""
    lanes = choices["lanes"]

    @T.inline
    def run(partial_out, partial_lse, out, lse, head_dim, to, vh, first, count, stride):
        acc = T.sblock_alloc_buffer((MAX_HEAD_DIM,), "float32")
        top = T.sblock_alloc_buffer((1,), "float32")
        total = T.sblock_alloc_buffer((1,), "float32")
        factor = T.sblock_alloc_buffer((2,), "float32")
        top[0] = T.float32(NEG_INF)
        total[0] = T.float32(0)
        for do in range(_vectors(head_dim, lanes)):
            for x in T.vectorized(lanes):
                acc[do * lanes + x] = T.float32(0)
        for p in range(count):
            with T.sblock("partial"):
                vp = T.axis.opaque(count, p)
                T.reads()
                T.writes()
                source: T.let[T.int32] = first + vp * stride
                if T.reinterpret("int32", partial_lse[source, vh]) != NEG_INF_BITS:
                    factor[0] = T.max(top[0], partial_lse[source, vh])
                    factor[1] = (partial_lse[source, vh] - factor[0]) * T.float32(LOG2E)
                    factor[1] = exp2(factor[1])
                    top[0] = (top[0] - factor[0]) * T.float32(LOG2E)
                    top[0] = exp2(top[0])
                    total[0] = total[0] * top[0] + factor[1]
                    for do in range(_vectors(head_dim, lanes)):
                        for x in T.vectorized(lanes):
                            acc[do * lanes + x] = (
                                acc[do * lanes + x] * top[0]
                                + partial_out[source, vh, do * lanes + x] * factor[1]
                            )
                    top[0] = factor[0]
        lse[to, vh] = T.if_then_else(
            total[0] == T.float32(0), T.float32(NEG_INF), top[0] + T.log(total[0])
        )
        factor[0] = T.if_then_else(total[0] == T.float32(0), T.float32(0), T.float32(1) / total[0])
        for do in range(_vectors(head_dim, lanes)):
            for x in T.vectorized(lanes):
                out[to, vh, do * lanes + x] = T.Cast(
                    spec.out_dtype, acc[do * lanes + x] * factor[0]
                )

    return run


def _row_of_threads(spec: AttentionSpec, choices: dict[str, Any]) -> Callable[..., Any]:
    """Return the program part that merges one row by a block of threads, a vector each.

    Every thread weighs the partials for itself, so none waits for another.
    """
    lanes, threads = choices["lanes"], choices["threads"]

    @T.inline
    def run(partial_out, partial_lse, out, lse, head_dim, to, vh, first, count, stride):
        for x in T.thread_binding(threads, thread="threadIdx.x"):
            with T.sblock("thread"):
                vx = T.axis.spatial(threads, x)
                T.reads()
                T.writes()
                whole = T.decl_buffer(
                    (partial_out.shape[0], partial_out.shape[1], _vectors(head_dim, lanes) * lanes),
                    "float32",
                    data=partial_out.data,
                )
                acc = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                top = T.sblock_alloc_buffer((1,), "float32", scope="local")
                total = T.sblock_alloc_buffer((1,), "float32", scope="local")
                factor = T.sblock_alloc_buffer((2,), "float32", scope="local")
                for step in range(T.ceildiv(_vectors(head_dim, lanes), threads)):
                    with T.sblock("vector"):
                        vs = T.axis.opaque(T.ceildiv(_vectors(head_dim, lanes), threads), step)
                        T.reads()
                        T.writes()
                        dim: T.let[T.int32] = (vs * threads + vx) * lanes
                        if dim < T.Cast("int32", head_dim):
                            top[0] = T.float32(NEG_INF)
                            total[0] = T.float32(0)
                            for i in T.unroll(lanes):
                                acc[i] = T.float32(0)
                            for p in range(count):
                                if (
                                    T.reinterpret("int32", partial_lse[first + p * stride, vh])
                                    != NEG_INF_BITS
                                ):
                                    factor[0] = T.max(top[0], partial_lse[first + p * stride, vh])
                                    factor[1] = T.exp2(
                                        (partial_lse[first + p * stride, vh] - factor[0])
                                        * T.float32(LOG2E)
                                    )
                                    top[0] = T.exp2((top[0] - factor[0]) * T.float32(LOG2E))
                                    total[0] = total[0] * top[0] + factor[1]
                                    for i in T.vectorized(lanes):
                                        acc[i] = (
                                            acc[i] * top[0]
                                            + whole[first + p * stride, vh, dim + i] * factor[1]
                                        )
                                    top[0] = factor[0]
                            factor[0] = T.if_then_else(
                                total[0] == T.float32(0), T.float32(0), T.float32(1) / total[0]
                            )
                            for i in T.unroll(lanes):
                                out[to, vh, dim + i] = T.Cast(spec.out_dtype, acc[i] * factor[0])
                            if dim == 0:
                                lse[to, vh] = T.if_then_else(
                                    total[0] == T.float32(0),
                                    T.float32(NEG_INF),
                                    top[0] + T.log(total[0]),
                                )

    return run


def merge(spec: AttentionSpec, choices: dict[str, Any]) -> tvm.IRModule:
    """Build the merge program; head_dim is known at run time.

    Its arguments::

        partial_out [num_partials, num_qo_heads, head_dim] float32
        partial_lse [num_partials, num_qo_heads] float32, natural log
        merge_items [num_merges, MERGE_FIELDS] int32
        out         [num_tokens, num_qo_heads, head_dim]   free token and head strides
        lse         [num_tokens, num_qo_heads] float32
    """
    head_dim = tirx.Var("head_dim", "int64")
    row = (_row_of_threads if "threads" in choices else _row_of_vectors)(spec, choices)

    @T.prim_func(s_tir=True)
    def main(
        partial_out_handle: T.handle,
        partial_lse_handle: T.handle,
        merge_items_handle: T.handle,
        out_handle: T.handle,
        lse_handle: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        num_partials = T.int64()
        num_qo_heads = T.int64()
        num_merges = T.int32()
        num_tokens = T.int64()
        token_stride = T.int64()
        head_stride = T.int64()
        partial_out = T.match_buffer(
            partial_out_handle, (num_partials, num_qo_heads, head_dim), "float32"
        )
        partial_lse = T.match_buffer(partial_lse_handle, (num_partials, num_qo_heads), "float32")
        merge_items = T.match_buffer(merge_items_handle, (num_merges, MERGE_FIELDS), "int32")
        out = T.match_buffer(
            out_handle,
            (num_tokens, num_qo_heads, head_dim),
            spec.out_dtype,
            strides=(token_stride, head_stride, T.int64(1)),
        )
        lse = T.match_buffer(lse_handle, (num_tokens, num_qo_heads), "float32")
        for n in range(num_merges):
            with T.sblock("worker"):
                vn = T.axis.spatial(num_merges, n)
                T.reads()
                T.writes()
                to: T.let[T.int32] = merge_items[vn, Merge.OUT_ROW.value]
                first: T.let[T.int32] = merge_items[vn, Merge.PARTIAL.value]
                count: T.let[T.int32] = merge_items[vn, Merge.COUNT.value]
                stride: T.let[T.int32] = merge_items[vn, Merge.STRIDE.value]
                for h in range(num_qo_heads):
                    with T.sblock("head"):
                        vh = T.axis.spatial(num_qo_heads, h)
                        T.reads()
                        T.writes()
                        row(
                            partial_out,
                            partial_lse,
                            out,
                            lse,
                            head_dim,
                            to,
                            vh,
                            first,
                            count,
                            stride,
                        )

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
