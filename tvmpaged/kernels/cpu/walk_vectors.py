"""One worker's walk over a tile of rows, with vectors: the form of CPUs.

A tile of rows is loaded, walks its kv range `keys_per_step` keys at a time with a running maximum
and sum, and is written. What a step does is one of `step_rows`, `step_columns`, `step_tiles` and
`step_pairs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cpu import (
    step_columns,
    step_pairs,
    step_rows,
    step_tiles,
    tile_scores,
    tile_values,
)
from tvmpaged.kernels.cpu.fold import fold
from tvmpaged.kernels.cpu.log import log
from tvmpaged.kernels.cpu.registers import registers
from tvmpaged.kernels.tile import NEG_INF, Tile


def walk(t: Tile) -> Callable[..., Any]:
    """Return the program part that takes one tile of rows over its item's kv range."""
    rows, keys, lanes = t.rows, t.keys, t.lanes
    columns = t.choices["step"] == "columns"
    tiles, pairs = t.choices["isa"] == "amx", t.choices["step"] == "pairs"
    tiled = step_pairs if pairs else step_tiles
    step = (tiled if tiles else step_columns if columns else step_rows).kv_step(t)
    sums = 1 if columns else lanes  # row sums are kept per lane where vectors go along the keys
    sums_shape = (sums, rows) if columns else (rows, sums)
    q_shape = (t.head_dim_cap, rows) if columns else (rows, t.head_dim_cap)
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
                if columns:
                    row_sum[vx, vr] = T.float32(0)
                else:
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

    def fold_sums(row_sum: Any, total: Any, group: Any) -> None:
        """Emit the sums over lanes of a vector of rows."""
        vectors = registers(lanes, lanes)
        for i, each in enumerate(vectors):
            each.set(row_sum[group * lanes + i, T.Ramp(0, 1, lanes)])
        fold(lambda a, b: a + b, vectors, lanes, lanes // 2, 1)
        T.buffer_store(total, vectors[0].value, [T.Ramp(group * lanes, 1, lanes)])

    @T.inline
    def finish_row(row_max, total, inverse, row_lse, sm_scale, row):
        # A row that saw no token: out = 0 and lse = -inf.
        inverse[row] = T.Select(total[row] == T.float32(0), T.float32(0), T.float32(1) / total[row])
        row_lse[row] = T.Select(
            total[row] == T.float32(0),
            T.float32(NEG_INF),
            row_max[row] * (T.abs(sm_scale) if raw_max else T.float32(1)) + log(total[row]),
        )

    @T.inline
    def finish_rows(acc, row_max, row_sum, total, inverse, row_lse, sm_scale):
        if columns:
            for r in range(rows):
                with T.sblock("total"):
                    vr = T.axis.spatial(rows, r)
                    total[vr] = row_sum[0, vr]
        elif rows % lanes == 0:
            for ro in range(rows // lanes):
                with T.sblock("total"):
                    vr = T.axis.opaque(rows // lanes, ro)
                    T.reads()
                    T.writes()
                    fold_sums(row_sum, total, vr)
        else:
            for r, x in T.grid(rows, sums):
                with T.sblock("total"):
                    vr, vx = T.axis.remap("SR", [r, x])
                    with T.init():
                        total[vr] = T.float32(0)
                    total[vr] = total[vr] + row_sum[vr, vx]
        if rows % lanes == 0:
            for ro in range(rows // lanes):
                for x in T.vectorized(lanes):
                    with T.sblock("finish"):
                        vr, vx = T.axis.remap("SS", [ro, x])
                        finish_row(row_max, total, inverse, row_lse, sm_scale, vr * lanes + vx)
        else:
            for r in range(rows):
                with T.sblock("finish"):
                    vr = T.axis.spatial(rows, r)
                    finish_row(row_max, total, inverse, row_lse, sm_scale, vr)

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
        q_rows = T.sblock_alloc_buffer(q_shape, q_dtype)
        acc = T.sblock_alloc_buffer((rows, t.head_dim_v_cap), "float32")
        row_max = T.sblock_alloc_buffer((t.columns if pairs else rows,), "float32")
        row_sum = T.sblock_alloc_buffer(sums_shape, "float32")
        token_of = T.sblock_alloc_buffer((t.columns,), "int32")
        head_of = T.sblock_alloc_buffer((t.columns,), "int32")
        limit = T.sblock_alloc_buffer((rows,), "int32")
        total = T.sblock_alloc_buffer((rows,), "float32")
        inverse = T.sblock_alloc_buffer((rows,), "float32")
        row_lse = T.sblock_alloc_buffer((rows,), "float32")
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
                    kv_begin,
                    kv_end,
                    limit,
                    sm_scale,
                    row_max,
                    row_sum,
                    acc,
                )
        finish_rows(acc, row_max, row_sum, total, inverse, row_lse, sm_scale)
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
                t.cache.spec.out_dtype,
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

    return run
