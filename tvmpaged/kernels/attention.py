"""Attention over a paged K/V cache, for decode and for prefill: one program over a work list.

The program is flash attention over a work list (`tvmpaged.worklist`): a worker takes its items one
after the other; an item takes its query rows `row_tile` at a time; such a tile of rows walks the
item's kv range `keys_per_step` keys at a time with a running maximum and sum (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax")::

    worker -> item -> row_tile -> kv_step: scores = q.K   masked   maximum   probs   acc += probs.V

How a tile of rows is walked is a part of its own: by a CPU's worker with vectors (`walk_vectors`)
or by a GPU's thread block, without tensor cores (`walk_threads`) or with them (`walk_warps`). A
worker is a thread there and a block here, and all else is the same. Which loops are spread over
threads, vectorised or unrolled is the schedule's business. What no schedule primitive expresses is
a choice that changes the program: ``step`` "rows" (`step_rows`, few rows), "columns"
(`step_columns`, many) or "pairs" (`step_pairs`, for a cache in that layout), the tile sizes, and
how far ahead and into which cache level K and V are prefetched.

Numbers. q is widened to float32; ``sm_scale`` multiplies float32 scores, and log2(e) the difference
of a score and its maximum (on tiles: its base, `kernels.cpu.base`), so that finite logits of any
size stay finite. Scores, probabilities and
sums are float32. A key that a row may not see is masked with a select, so
NaN in an unused slot does not reach a score, and its V row is not used (0 x NaN is NaN).

Offsets into the cache are 64-bit: block ids are widened before they meet a stride.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from tvmpaged.kernels.cpu import amx, walk_vectors
from tvmpaged.kernels.cuda import walk_threads, walk_warps
from tvmpaged.kernels.tile import WHOLE, Tile
from tvmpaged.spec import AttentionSpec
from tvmpaged.worklist import ITEM_FIELDS, Item


def attention(spec: AttentionSpec, choices: dict[str, Any]) -> tvm.IRModule:
    """Build the attention program of one spec under one choice list.

    Its arguments, all tensors but the last::

        q            [num_tokens, num_qo_heads, head_dim]      free token and head strides
        k_cache      [num_blocks, num_kv_heads, block_size, head_dim]      (HND) free block stride
        v_cache      [num_blocks, num_kv_heads, block_size, head_dim_v]    (HND) free block stride
                     (other layouts: `tvmpaged.layout`)
        block_table  [num_seqs, max_blocks_per_seq] int32
        work_items   [num_items, ITEM_FIELDS] int32
        work_offsets [num_workers + 1] int32
        out          [num_tokens, num_qo_heads, head_dim_v]    free token and head strides
        lse          [num_tokens, num_qo_heads] float32
        partial_out  [num_partials, num_qo_heads, head_dim_v] float32
        partial_lse  [num_partials, num_qo_heads] float32
        sm_scale     float32
    """
    t = Tile.make(spec, choices)
    rows = t.rows
    tiles = choices["isa"] == "amx"
    threads = choices["isa"] in ("simt", "mma")
    forms = {"simt": walk_threads, "mma": walk_warps}
    walk = forms.get(choices["isa"], walk_vectors).walk(t)
    configure = amx.configure(t.registers) if tiles else None
    c = t.cache
    k_strides, v_strides = c.strides(c.head_dim_extent, "k"), c.strides(c.head_dim_v_extent, "v")
    k_shape, v_shape = c.shape(c.head_dim_extent), c.shape(c.head_dim_v_extent)

    def group_size(num_qo_heads: Any) -> Any:
        if spec.group_size:
            return T.int32(spec.group_size)  # a division by it is a multiplication
        return T.Cast("int32", T.truncdiv(num_qo_heads, c.num_kv_heads))

    @T.prim_func(s_tir=True)
    def main(
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        block_table_handle: T.handle,
        work_items_handle: T.handle,
        work_offsets_handle: T.handle,
        out_handle: T.handle,
        lse_handle: T.handle,
        partial_out_handle: T.handle,
        partial_lse_handle: T.handle,
        sm_scale: T.float32,
    ):
        T.func_attr({"tirx.noalias": True})
        num_tokens = T.int64()
        num_qo_heads = T.int64()
        q_token_stride = T.int64()
        q_head_stride = T.int64()
        out_token_stride = T.int64()
        out_head_stride = T.int64()
        num_seqs = T.int32()
        max_blocks = T.int32()
        num_items = T.int32()
        num_offsets = T.int32()
        num_partials = T.int32()
        q = T.match_buffer(
            q_handle,
            (num_tokens, num_qo_heads, c.head_dim_extent),
            spec.q_dtype,
            strides=(q_token_stride, q_head_stride, T.int64(1)),
        )
        k_cache = T.match_buffer(k_handle, k_shape, spec.kv_dtype, strides=k_strides)
        v_cache = T.match_buffer(v_handle, v_shape, spec.kv_dtype, strides=v_strides)
        block_table = T.match_buffer(block_table_handle, (num_seqs, max_blocks), "int32")
        work_items = T.match_buffer(work_items_handle, (num_items, ITEM_FIELDS), "int32")
        work_offsets = T.match_buffer(work_offsets_handle, (num_offsets,), "int32")
        out = T.match_buffer(
            out_handle,
            (num_tokens, num_qo_heads, c.head_dim_v_extent),
            spec.out_dtype,
            strides=(out_token_stride, out_head_stride, T.int64(1)),
        )
        lse = T.match_buffer(lse_handle, (num_tokens, num_qo_heads), "float32")
        partial_out = T.match_buffer(
            partial_out_handle, (num_partials, num_qo_heads, c.head_dim_v_extent), "float32"
        )
        partial_lse = T.match_buffer(partial_lse_handle, (num_partials, num_qo_heads), "float32")

        if threads:
            assert c.is_whole(k_cache, t.lanes), WHOLE
            assert c.is_whole(v_cache, t.lanes), WHOLE
        for worker in range(num_offsets - 1):
            with T.sblock("worker"):
                w = T.axis.spatial(num_offsets - 1, worker)
                T.reads()
                T.writes()
                if tiles:
                    words = T.sblock_alloc_buffer((8,), "int64")
                    configure(words)
                for index in range(work_offsets[w + 1] - work_offsets[w]):
                    with T.sblock("item"):
                        i = T.axis.opaque(work_offsets[w + 1] - work_offsets[w], index)
                        T.reads()
                        T.writes()
                        item: T.let[T.int32] = work_offsets[w] + i
                        seq: T.let[T.int32] = work_items[item, Item.SEQ.value]
                        kv_head: T.let[T.int32] = work_items[item, Item.KV_HEAD.value]
                        q_start: T.let[T.int32] = work_items[item, Item.Q_START.value]
                        row_begin: T.let[T.int32] = work_items[item, Item.ROW_BEGIN.value]
                        row_end: T.let[T.int32] = work_items[item, Item.ROW_END.value]
                        kv_begin: T.let[T.int32] = work_items[item, Item.KV_BEGIN.value]
                        kv_end: T.let[T.int32] = work_items[item, Item.KV_END.value]
                        visible: T.let[T.int32] = work_items[item, Item.VISIBLE.value]
                        partial: T.let[T.int32] = work_items[item, Item.PARTIAL.value]
                        group: T.let[T.int32] = group_size(num_qo_heads)
                        for tile in range(T.ceildiv(row_end - row_begin, rows)):
                            with T.sblock("row_tile"):
                                vt = T.axis.opaque(T.ceildiv(row_end - row_begin, rows), tile)
                                T.reads()
                                T.writes()
                                first: T.let[T.int32] = row_begin + vt * rows
                                walk(
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
                                )
                if tiles:
                    T.evaluate(amx.release())

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
