"""Merge partial attentions over disjoint kv ranges by their log-sum-exps.

The partials of a row are folded left to right, always in the order of their kv ranges, so the bits
do not depend on which worker made them. A partial that saw nothing (lse -inf) is skipped whatever
its values are.
"""

from __future__ import annotations

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


def merge(spec: AttentionSpec, choices: dict[str, Any]) -> tvm.IRModule:
    """Build the merge program; head_dim is known at run time.

    Its arguments::

        partial_out [num_partials, num_qo_heads, head_dim] float32
        partial_lse [num_partials, num_qo_heads] float32, natural log
        merge_items [num_merges, MERGE_FIELDS] int32
        out         [num_tokens, num_qo_heads, head_dim]   free token and head strides
        lse         [num_tokens, num_qo_heads] float32
    """
    lanes = choices["lanes"]
    head_dim = tirx.Var("head_dim", "int64")
    vectors = tirx.Cast("int32", tirx.truncdiv(head_dim, tirx.const(lanes, "int64")))

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
                acc = T.sblock_alloc_buffer((MAX_HEAD_DIM,), "float32")
                top = T.sblock_alloc_buffer((1,), "float32")
                total = T.sblock_alloc_buffer((1,), "float32")
                factor = T.sblock_alloc_buffer((2,), "float32")
                row: T.let[T.int32] = merge_items[vn, Merge.OUT_ROW.value]
                first: T.let[T.int32] = merge_items[vn, Merge.PARTIAL.value]
                count: T.let[T.int32] = merge_items[vn, Merge.COUNT.value]
                stride: T.let[T.int32] = merge_items[vn, Merge.STRIDE.value]
                for h in range(num_qo_heads):
                    with T.sblock("head"):
                        vh = T.axis.opaque(num_qo_heads, h)
                        T.reads()
                        T.writes()
                        top[0] = T.float32(NEG_INF)
                        total[0] = T.float32(0)
                        for do in range(vectors):
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
                                    factor[1] = (partial_lse[source, vh] - factor[0]) * T.float32(
                                        LOG2E
                                    )
                                    factor[1] = exp2(factor[1])
                                    top[0] = (top[0] - factor[0]) * T.float32(LOG2E)
                                    top[0] = exp2(top[0])
                                    total[0] = total[0] * top[0] + factor[1]
                                    for do in range(vectors):
                                        for x in T.vectorized(lanes):
                                            acc[do * lanes + x] = (
                                                acc[do * lanes + x] * top[0]
                                                + partial_out[source, vh, do * lanes + x]
                                                * factor[1]
                                            )
                                    top[0] = factor[0]
                        lse[row, vh] = T.if_then_else(
                            total[0] == T.float32(0), T.float32(NEG_INF), top[0] + T.log(total[0])
                        )
                        factor[0] = T.if_then_else(
                            total[0] == T.float32(0), T.float32(0), T.float32(1) / total[0]
                        )
                        for do in range(vectors):
                            for x in T.vectorized(lanes):
                                out[row, vh, do * lanes + x] = T.Cast(
                                    spec.out_dtype, acc[do * lanes + x] * factor[0]
                                )

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
