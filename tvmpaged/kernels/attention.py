"""Attention over a paged K/V cache, for decode and for prefill: one program, two shapes of rows.

The program is flash attention over a work list (`tvmpaged.worklist`): a worker takes its items one
after the other; an item takes its query rows `row_tile` at a time; such a tile of rows walks the
item's kv range `keys_per_step` keys at a time with a running maximum and sum (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax")::

    worker -> item -> row_tile -> kv_step: scores = q.K   masked   maximum   probs   acc += probs.V

The loops stand bare: which of them is spread over threads, vectorised or unrolled is the
schedule's business. What no schedule primitive expresses is a choice that changes the program:
``step`` "rows" (`step_rows`, few rows), "columns" (`step_columns`, many) or "pairs" (`step_pairs`,
for a cache in that layout), the tile sizes, and how far ahead and into which cache level K and V
are prefetched.

Numbers. q is widened to float32; ``sm_scale`` multiplies float32 scores, and log2(e) the difference
of a score and its maximum, so that finite logits of any size stay finite. Scores, probabilities and
sums are float32. A key that a row may not see is masked with a select, so
NaN in an unused slot does not reach a score, and its V row is not used (0 x NaN is NaN).

Offsets into the cache are 64-bit: block ids are widened before they meet a stride.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from tvmpaged.kernels import (
    amx,
    step_columns,
    step_pairs,
    step_rows,
    step_tiles,
    tile_scores,
    tile_values,
)
from tvmpaged.kernels.tile import NEG_INF, Tile
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
    rows, keys, lanes = t.rows, t.keys, t.lanes
    columns = choices["step"] == "columns"
    tiles, pairs = choices["isa"] == "amx", choices["step"] == "pairs"
    tiled = step_pairs if pairs else step_tiles
    step = (tiled if tiles else step_columns if columns else step_rows).kv_step(t)
    sums = 1 if columns else lanes  # row sums are kept per lane where vectors go along the keys
    q_shape = (t.head_dim_cap, rows) if columns else (rows, t.head_dim_cap)
    configure = amx.configure(t.registers) if tiles else None
    restore = load_q = None
    if pairs:
        q_shape = (rows, t.head_dim_cap // 2)
        load_q = step_pairs.load_q(t)
    elif tiles:
        q_shape = (t.head_dim_cap // 2, t.columns)
        restore = tile_values.restore(t)
        load_q = tile_scores.load_q(t)
    q_dtype = "uint32" if tiles else "float32"
    # The maxima of the tiles' columns, and of pairs, are those of unscaled logits.
    raw_max = tiles and (columns or pairs)
    c = t.cache
    k_strides, v_strides = c.strides(c.head_dim_extent, "k"), c.strides(c.head_dim_v_extent, "v")
    k_shape, v_shape = c.shape(c.head_dim_extent), c.shape(c.head_dim_v_extent)

    def group_size(num_qo_heads: Any) -> Any:
        if spec.group_size:
            return T.int32(spec.group_size)  # a division by it is a multiplication
        return T.Cast("int32", T.truncdiv(num_qo_heads, c.num_kv_heads))

    @T.inline
    def load_rows(
        q,
        q_start,
        kv_head,
        group,
        first,
        row_end,
        visible,
        kv_end,
        q_rows,
        token_of,
        head_of,
        limit,
        acc,
        row_max,
        row_sum,
        sm_scale,
    ):
        for r in range(rows):
            with T.sblock("start_row"):
                vr = T.axis.spatial(rows, r)
                # Rows past the end repeat the last one, and are not written.
                token_of[vr] = T.truncdiv(T.min(first + vr, row_end - 1), group)
                head_of[vr] = kv_head * group + T.truncmod(T.min(first + vr, row_end - 1), group)
                limit[vr] = T.min(kv_end, visible + token_of[vr])
                row_max[vr] = T.float32(NEG_INF)
        for r, x in T.grid(rows, sums):
            with T.sblock("start_sum"):
                vr, vx = T.axis.remap("SS", [r, x])
                row_sum[vr, vx] = T.float32(0)
        if tiles:
            load_q(q, q_start, token_of, head_of, sm_scale, q_rows)
        else:
            for r in range(rows):
                with T.sblock("load_row"):
                    vr = T.axis.opaque(rows, r)
                    T.reads()
                    T.writes()
                    token: T.let[T.int32] = q_start + token_of[vr]
                    head: T.let[T.int32] = head_of[vr]
                    for do in range(t.vectors):
                        for x in T.vectorized(lanes):
                            with T.sblock("load_q"):
                                vo, vx = T.axis.remap("SS", [do, x])
                                if columns:
                                    q_rows[vo * lanes + vx, vr] = T.Cast(
                                        "float32", q[token, head, vo * lanes + vx]
                                    )
                                else:
                                    q_rows[vr, vo * lanes + vx] = T.Cast(
                                        "float32", q[token, head, vo * lanes + vx]
                                    )
        for r, do in T.grid(rows, t.vectors_v):
            for x in T.vectorized(lanes):
                with T.sblock("start_acc"):
                    vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                    acc[vr, vo * lanes + vx] = T.float32(0)

    @T.inline
    def finish_rows(acc, row_max, row_sum, total, inverse, row_lse, sm_scale):
        for r, x in T.grid(rows, sums):
            with T.sblock("total"):
                vr, vx = T.axis.remap("SR", [r, x])
                with T.init():
                    total[vr] = T.float32(0)
                total[vr] = total[vr] + row_sum[vr, vx]
        for r in range(rows):
            with T.sblock("finish"):
                vr = T.axis.spatial(rows, r)
                # A row that saw no token: out = 0 and lse = -inf.
                inverse[vr] = T.if_then_else(
                    total[vr] == T.float32(0), T.float32(0), T.float32(1) / total[vr]
                )
                row_lse[vr] = T.if_then_else(
                    total[vr] == T.float32(0),
                    T.float32(NEG_INF),
                    row_max[vr] * (T.abs(sm_scale) if raw_max else T.float32(1)) + T.log(total[vr]),
                )

    @T.inline
    def write_rows(
        target, target_lse, token, token_of, head_of, first, row_end, acc, inverse, row_lse, dtype
    ):
        for r in range(T.min(rows, row_end - first)):
            with T.sblock("write_row"):
                vr = T.axis.opaque(T.min(rows, row_end - first), r)
                T.reads()
                T.writes()
                to: T.let[T.int32] = token + token_of[vr]
                head: T.let[T.int32] = head_of[vr]
                target_lse[to, head] = row_lse[vr]
                for do in range(t.vectors_v):
                    for x in T.vectorized(lanes):
                        with T.sblock("write"):
                            vo, vx = T.axis.remap("SS", [do, x])
                            target[to, head, vo * lanes + vx] = T.Cast(
                                dtype, acc[vr, vo * lanes + vx] * inverse[vr]
                            )

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

        for worker in range(num_offsets - 1):
            with T.sblock("worker"):
                w = T.axis.spatial(num_offsets - 1, worker)
                T.reads()
                T.writes()
                q_rows = T.sblock_alloc_buffer(q_shape, q_dtype)
                acc = T.sblock_alloc_buffer((rows, t.head_dim_v_cap), "float32")
                row_max = T.sblock_alloc_buffer((t.columns if pairs else rows,), "float32")
                row_sum = T.sblock_alloc_buffer((rows, sums), "float32")
                token_of = T.sblock_alloc_buffer((t.columns,), "int32")
                head_of = T.sblock_alloc_buffer((t.columns,), "int32")
                limit = T.sblock_alloc_buffer((rows,), "int32")
                total = T.sblock_alloc_buffer((rows,), "float32")
                inverse = T.sblock_alloc_buffer((rows,), "float32")
                row_lse = T.sblock_alloc_buffer((rows,), "float32")
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
                                load_rows(
                                    q,
                                    q_start,
                                    kv_head,
                                    group,
                                    first,
                                    row_end,
                                    visible,
                                    kv_end,
                                    q_rows,
                                    token_of,
                                    head_of,
                                    limit,
                                    acc,
                                    row_max,
                                    row_sum,
                                    sm_scale,
                                )
                                for s in range(T.ceildiv(kv_end - kv_begin, keys)):
                                    with T.sblock("kv_step"):
                                        vs = T.axis.opaque(T.ceildiv(kv_end - kv_begin, keys), s)
                                        T.reads()
                                        T.writes()
                                        key: T.let[T.int32] = kv_begin + vs * keys
                                        step(
                                            q_rows,
                                            k_cache,
                                            v_cache,
                                            block_table,
                                            seq,
                                            kv_head,
                                            key,
                                            kv_end,
                                            T.max(kv_end, visible),
                                            limit,
                                            sm_scale,
                                            row_max,
                                            row_sum,
                                            acc,
                                        )
                                finish_rows(
                                    acc, row_max, row_sum, total, inverse, row_lse, sm_scale
                                )
                                if restore is not None:
                                    restore(acc)
                                if partial < 0:
                                    write_rows(
                                        out,
                                        lse,
                                        q_start,
                                        token_of,
                                        head_of,
                                        first,
                                        row_end,
                                        acc,
                                        inverse,
                                        row_lse,
                                        spec.out_dtype,
                                    )
                                else:
                                    write_rows(
                                        partial_out,
                                        partial_lse,
                                        partial,
                                        token_of,
                                        head_of,
                                        first,
                                        row_end,
                                        acc,
                                        inverse,
                                        row_lse,
                                        "float32",
                                    )
                if tiles:
                    T.evaluate(amx.release())

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
