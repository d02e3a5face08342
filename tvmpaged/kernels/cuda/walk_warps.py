"""A thread block's walk over a tile of rows with tensor cores.

Rows are new tokens times the group's query heads, as in the work list, so they all share K and V.
A step's K and V lie in shared memory, where `stage_keys` copies them several steps ahead; each warp
multiplies its 16 rows, or a multiple, with its keys (`warp_grid`)::

    scores = q . K     16-bit, sums float32; q is in registers or in shared memory (``q_in``)
    probs              16-bit, in the registers in which they became probabilities (`warp_softmax`)
    acc += probs . V   float32

Keys past the end are never read: they are zeros in shared memory, their score is masked. What lies
above the diagonal is in no item's kv range.

What the lanes of a warp do together is a part in two forms, of which ``fold`` names one: "shuffle",
the device's instructions (`warp_instructions`), or "shared", the same written out over shared
memory (`warp_loops`). All else is the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.finish_warps import finish_rows
from tvmpaged.kernels.cuda.source import Source
from tvmpaged.kernels.cuda.stage_keys import stage_keys
from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.cuda.warp_grid import REGISTERS, SIDE, Warps
from tvmpaged.kernels.cuda.warp_instructions import Instructions
from tvmpaged.kernels.cuda.warp_loops import Loops
from tvmpaged.kernels.cuda.warp_softmax import soften as soften_scores
from tvmpaged.kernels.tile import NEG_INF, Tile
from tvmpaged.sm import WARP_SIZE


def _start(w: Warps, parts: Any) -> Callable[..., Any]:
    """Return the program part that puts a tile's q into shared memory and clears what is summed.

    Rows past the end repeat the last one, and are not written.
    """
    t, bits = w.tile, parts.bits
    th, vectors = Threads(t), Threads(t).vectors(t.head_dim_cap)

    @T.inline
    def start(
        q,
        group,
        kv_head,
        q_start,
        first,
        row_end,
        kv_end,
        visible,
        vy,
        vx,
        at,
        tile,
        limits,
        row_max,
        row_sum,
        acc,
    ):
        for j in T.serial(-(-t.rows // th.groups)):
            row: T.let[T.int32] = T.min(first + j * th.groups + vy, row_end - 1)
            token: T.let[T.int32] = q_start + T.truncdiv(row, group)
            head: T.let[T.int32] = kv_head * group + T.truncmod(row, group)
            for v in T.unroll(vectors):
                if (
                    j * th.groups + vy < t.rows
                    and (v * th.along_dim + vx) * t.lanes < t.head_dim_cap
                ):
                    for i in T.unroll(t.lanes):
                        tile[
                            w.q_begin
                            + (j * th.groups + vy) * w.q_pitch
                            + (v * th.along_dim + vx) * t.lanes
                            + i
                        ] = T.Cast(
                            "uint16", bits(q[token, head, (v * th.along_dim + vx) * t.lanes + i])
                        )
        for v in T.unroll(2 * w.heights):
            row: T.let[T.int32] = T.min(first + w.row(at, v), row_end - 1)
            limits[v] = T.min(kv_end, visible + T.truncdiv(row, group))
        for v in parts.each(2 * w.heights):
            row_max[at.y, at.x, v] = T.float32(NEG_INF)
            row_sum[at.y, at.x, v] = T.float32(0)
        for i in parts.each(w.heights * w.acc_registers):
            acc[at.y, at.x, i] = T.float32(0)

    return start


def _load_q(w: Warps, parts: Any, dims: int) -> Callable[..., Any]:
    """Return the program part that loads so many parts of 16 dims of the warp's rows of q."""
    load = parts.load(w.q_place)

    @T.inline
    def load_q(q_rows, at, tile, begin):
        for h in parts.each(w.heights):
            for d in parts.each(dims):
                load(
                    q_rows,
                    h * w.q_registers + d * REGISTERS,
                    at,
                    tile,
                    w.q_begin
                    + (at.row_warp * w.heights + h) * (SIDE * w.q_pitch)
                    + begin
                    + d * SIDE,
                )

    return load_q


def _score(w: Warps, parts: Any) -> Callable[..., Any]:
    """Return the program part ``scores = q . K``; `begin` is where the warp's keys begin."""
    load, load_q = parts.load(w.k_place), _load_q(w, parts, 1)
    multiply = parts.multiply(w.score_registers, w.q_registers)

    @T.inline
    def score(q_rows, tile, begin, at, factor, scores):
        for i in parts.each(w.heights * w.score_registers):
            scores[at.y, at.x, i] = T.float32(0)
        for d in parts.each(w.tile.head_dim_cap // SIDE):
            if not w.keeps_q:
                load_q(q_rows, at, tile, d * SIDE)
            for k in parts.each(w.keys // SIDE):
                load(factor, 0, at, tile, begin + k * (SIDE * w.k_pitch) + d * SIDE)
                multiply(
                    scores,
                    k * (2 * REGISTERS),
                    q_rows,
                    d * REGISTERS if w.keeps_q else 0,
                    factor,
                    at,
                )

    return score


def _weigh(w: Warps, parts: Any) -> Callable[..., Any]:
    """Return the program part ``acc = acc + probs . V``; `begin` is where the warp's keys begin."""
    load = parts.load(w.v_place, transposed=True)
    multiply = parts.multiply(w.acc_registers, w.p_registers)

    @T.inline
    def weigh(probs, tile, begin, at, factor, acc):
        for k in parts.each(w.keys // SIDE):
            for d in parts.each(w.tile.head_dim_v_cap // SIDE):
                load(factor, 0, at, tile, begin + k * (SIDE * w.v_pitch) + d * SIDE)
                multiply(acc, d * (2 * REGISTERS), probs, k * REGISTERS, factor, at)

    return weigh


def _step(w: Warps, parts: Any) -> Callable[..., Any]:
    """Return the program part that takes a step's K and V, from `begin` of a tile on."""
    score, weigh, soften = _score(w, parts), _weigh(w, parts), soften_scores(w, parts)
    fragment, scope, heights = parts.fragment, parts.fragment_scope, w.heights

    @T.inline
    def step(tile, begin, key, least, at, sm_scale, q_rows, limits, row_max, row_sum, acc):
        factor = T.sblock_alloc_buffer(fragment(REGISTERS), "uint32", scope=scope)
        scores = T.sblock_alloc_buffer(
            fragment(heights * w.score_registers), "float32", scope=scope
        )
        probs = T.sblock_alloc_buffer(fragment(heights * w.p_registers), "uint32", scope=scope)
        of_warp: T.let[T.int32] = at.key_warp * w.keys
        score(q_rows, tile, begin + of_warp * w.k_pitch, at, factor, scores)
        soften(
            scores,
            limits,
            least,
            key + of_warp,
            at,
            sm_scale,
            row_max,
            row_sum,
            acc,
            probs,
        )
        weigh(probs, tile, begin + w.v_begin + of_warp * w.v_pitch, at, factor, acc)

    return step


def walk(t: Tile) -> Callable[..., Any]:
    """Return the program part that takes one tile of rows over its item's kv range."""
    th, w, c = Threads(t), Warps(t), t.cache
    parts: Any = (Loops if t.choices["fold"] == "shared" else Instructions)(w)
    stages, heights, scope = w.stages, w.heights, parts.fragment_scope
    start, step, finish = _start(w, parts), _step(w, parts), finish_rows(w, parts)
    stage, load_q = stage_keys(w, parts.copy()), _load_q(w, parts, t.head_dim_cap // SIDE)

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
                        strides=c.whole_strides(k_cache, c.head_dim_extent, t.lanes),
                    )
                    v_whole = T.decl_buffer(
                        c.shape(c.head_dim_v_extent),
                        c.spec.kv_dtype,
                        data=v_cache.data,
                        strides=c.whole_strides(v_cache, c.head_dim_v_extent, t.lanes),
                    )
                    tile = T.sblock_alloc_buffer(
                        (w.tile_elements,), "uint16", scope=parts.tile_scope
                    )
                    q_rows = T.sblock_alloc_buffer(
                        parts.fragment(heights * w.q_registers), "uint32", scope=scope
                    )
                    acc = T.sblock_alloc_buffer(
                        parts.fragment(heights * w.acc_registers), "float32", scope=scope
                    )
                    row_max = T.sblock_alloc_buffer(
                        parts.fragment(2 * heights), "float32", scope=scope
                    )
                    row_sum = T.sblock_alloc_buffer(
                        parts.fragment(2 * heights), "float32", scope=scope
                    )
                    limits = T.sblock_alloc_buffer((2 * heights,), "int32", scope="local")
                    # Loads and copies name the first of 8 elements only: named as a whole, shared
                    # memory is not cut off behind the last of them.
                    T.evaluate(tile.access_ptr("rw"))
                    warp: T.let[T.int32] = (vy * th.along_dim + vx) // WARP_SIZE
                    lane: T.let[T.int32] = (vy * th.along_dim + vx) % WARP_SIZE
                    at = T.meta_var(parts.place(warp, lane))
                    source = T.meta_var(
                        Source(k_whole, v_whole, block_table, seq, kv_head, kv_end, vy, vx, tile)
                    )
                    steps: T.let[T.int32] = T.ceildiv(kv_end - kv_begin, t.keys)
                    least: T.let[T.int32] = T.min(kv_end, visible + T.truncdiv(first, group))
                    # The rows before may still be multiplied with what lies in shared memory.
                    T.evaluate(T.tvm_storage_sync("shared"))
                    start(
                        q,
                        group,
                        kv_head,
                        q_start,
                        first,
                        row_end,
                        kv_end,
                        visible,
                        vy,
                        vx,
                        at,
                        tile,
                        limits,
                        row_max,
                        row_sum,
                        acc,
                    )
                    if w.keeps_q:
                        T.evaluate(T.tvm_storage_sync("shared"))
                        load_q(q_rows, at, tile, 0)
                        T.evaluate(T.tvm_storage_sync("shared"))
                    for ahead in T.unroll(max(1, stages - 1)):
                        stage(source, kv_begin + ahead * t.keys, ahead * w.stage)
                        T.evaluate(parts.commit())
                    for s in range(steps):
                        with T.sblock("kv_step"):
                            vs = T.axis.opaque(steps, s)
                            T.reads()
                            T.writes()
                            key: T.let[T.int32] = kv_begin + vs * t.keys
                            T.evaluate(parts.wait(max(0, stages - 2)))
                            T.evaluate(T.tvm_storage_sync("shared"))
                            if stages > 1:
                                stage(
                                    source,
                                    key + (stages - 1) * t.keys,
                                    (vs + stages - 1) % stages * w.stage,
                                )
                                T.evaluate(parts.commit())
                            step(
                                tile,
                                vs % stages * w.stage,
                                key,
                                least,
                                at,
                                sm_scale,
                                q_rows,
                                limits,
                                row_max,
                                row_sum,
                                acc,
                            )
                            if stages == 1:
                                T.evaluate(T.tvm_storage_sync("shared"))
                                stage(source, key + t.keys, 0)
                                T.evaluate(parts.commit())
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
                        at,
                        row_max,
                        row_sum,
                        acc,
                    )

    return run
