"""One kv step for many rows (prefill): scores ``[keys, rows]``, vectors along the rows.

q stands transposed, ``[head_dim, rows]``. Then a score is a sum over head_dim of K elements, each
broadcast over the rows: K is used as it lies, nothing is folded across lanes, and the running
maximum and sum are vectors too. K and V are widened into float32 tiles first, which costs one pass
over the step's keys and serves all rows. What lies past the end is neither read nor computed, but
for the rest of a register tile's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cpu.registers import Register, registers, zero
from tvmpaged.kernels.exp2 import LOG2E, exp2_vector
from tvmpaged.kernels.tile import NEG_INF, Tile


def _load(t: Tile) -> Callable[..., Any]:
    """Return the program part that widens the step's K and V into tiles."""
    c = t.cache
    lanes, run = t.lanes, t.run

    @T.inline
    def load(k_cache, v_cache, block_table, seq, kv_head, key, count, k_tile, v_tile):
        for key_run in range(T.ceildiv(count, run)):
            with T.sblock("key_run"):
                b = T.axis.opaque(T.ceildiv(count, run), key_run)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + b * run
                block: T.let[T.int64] = c.block(block_table, seq, first)
                slot: T.let[T.int32] = c.slot(first)
                for k, do in T.grid(run, t.vectors):
                    for x in T.vectorized(lanes):
                        with T.sblock("load_k"):
                            vk, vo, vx = T.axis.remap("SSS", [k, do, x])
                            k_tile[b * run + vk, vo * lanes + vx] = c.wide(
                                c.at(k_cache, block, kv_head, slot + vk, vo * lanes + vx)
                            )
                for k, do in T.grid(run, t.vectors_v):
                    for x in T.vectorized(lanes):
                        with T.sblock("load_v"):
                            vk, vo, vx = T.axis.remap("SSS", [k, do, x])
                            v_tile[b * run + vk, vo * lanes + vx] = c.wide(
                                c.at(v_cache, block, kv_head, slot + vk, vo * lanes + vx)
                            )

    return load


def _score(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = K . q``."""
    c, lanes = t.cache, t.lanes
    side_keys, side_rows = t.choices["dot_keys"], t.choices["dot_vectors"]
    row_tiles = t.rows // lanes // side_rows

    def multiply(q_columns: Any, k_tile: Any, kt: Any, rt: Any, scores: Any) -> None:
        """Emit a register tile's scores."""
        sums = registers(side_keys * side_rows, lanes)
        rows = [T.Ramp((rt * side_rows + r) * lanes, 1, lanes) for r in range(side_rows)]
        zero(sums, lanes)
        with T.serial(c.head_dim) as d:
            for i, each in enumerate(sums):
                k, r = divmod(i, side_rows)
                key = T.Broadcast(k_tile[kt * side_keys + k, d], lanes)
                each.set(each.value + key * q_columns[d, rows[r]])
        for i, each in enumerate(sums):
            k, r = divmod(i, side_rows)
            T.buffer_store(scores, each.value, [kt * side_keys + k, rows[r]])

    @T.inline
    def score(q_columns, k_tile, count, scores):
        for key_tile, row_tile in T.grid(T.ceildiv(count, side_keys), row_tiles):
            with T.sblock("score"):
                kt = T.axis.opaque(T.ceildiv(count, side_keys), key_tile)
                rt = T.axis.opaque(row_tiles, row_tile)
                T.reads()
                T.writes()
                multiply(q_columns, k_tile, kt, rt, scores)

    return score


def _softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics."""
    lanes, vectors = t.lanes, t.rows // t.lanes
    rows = [T.Ramp(r * lanes, 1, lanes) for r in range(vectors)]

    def every(value: Any) -> Any:
        return T.Broadcast(value, lanes)

    def load(row_max: Any) -> list[Register]:
        base = registers(vectors, lanes)
        for r, each in enumerate(base):
            each.set(row_max[rows[r]])
        return base

    def scale(
        scores: Any, k: Any, key: Any, limit: Any, sm_scale: Any, base: Any, some_hidden: bool
    ) -> None:
        """Emit the scaling of a key's scores, the masking where it may be hidden, and maxima."""
        for r, top in enumerate(base):
            value = scores[k, rows[r]] * every(sm_scale)
            if some_hidden:
                visible = every(key + k) < limit[rows[r]]
                value = T.Select(visible, value, every(T.float32(NEG_INF)))
            T.buffer_store(scores, value, [k, rows[r]])
            top.set(T.max(top.value, scores[k, rows[r]]))

    def rescale_sums(row_max: Any, row_sum: Any, rescale: Any, base: Any) -> list[Register]:
        """Emit the new maxima; return the sums so far, on their scale."""
        sums = registers(vectors, lanes)
        for r, (top, total) in enumerate(zip(base, sums, strict=True)):
            total.set(row_max[rows[r]])
            T.buffer_store(row_max, top.value, [rows[r]])
            # See row_softmax: 0 stands in for the -inf of a row that has seen no key yet.
            unseen = top.value == every(T.float32(NEG_INF))
            top.set(T.Select(unseen, every(T.float32(0)), top.value))
            total.set((total.value - top.value) * every(T.float32(LOG2E)))
            total.set(exp2_vector(total.value, lanes))
            T.buffer_store(rescale, total.value, [rows[r]])
            total.set(total.value * row_sum[0, rows[r]])
        return sums

    def weights(scores: Any, k: Any, base: Any, sums: Any) -> None:
        """Emit a key's probabilities."""
        for r, total in enumerate(sums):
            at = [k, rows[r]]
            power = (scores[k, rows[r]] - base[r].value) * every(T.float32(LOG2E))
            T.buffer_store(scores, power, at)
            T.buffer_store(scores, exp2_vector(scores[k, rows[r]], lanes), at)
            total.set(total.value + scores[k, rows[r]])

    def store(row_sum: Any, sums: Any) -> None:
        for r, total in enumerate(sums):
            T.buffer_store(row_sum, total.value, [0, rows[r]])

    @T.inline
    def softmax(scores, count, limit, key, sm_scale, row_max, row_sum, rescale):
        base = T.meta_var(load(row_max))
        # The first row sees the fewest keys.
        if key + count > limit[0]:
            for k in range(count):
                scale(scores, k, key, limit, sm_scale, base, True)
        else:
            for k in range(count):
                scale(scores, k, key, limit, sm_scale, base, False)
        sums = T.meta_var(rescale_sums(row_max, row_sum, rescale, base))
        for k in range(count):
            weights(scores, k, base, sums)
        store(row_sum, sums)

    return softmax


def _weigh(t: Tile) -> Callable[..., Any]:
    """Return the program part ``acc = acc * rescale + probs . V``."""
    lanes, side_rows, side = t.lanes, t.choices["weigh_rows"], t.choices["weigh_vectors"]
    row_tiles, dim_tiles = t.rows // side_rows, t.vectors_v // side

    def multiply(
        probs: Any, rescale: Any, v_tile: Any, count: Any, rt: Any, dt: Any, acc: Any
    ) -> None:
        """Emit a register tile's sums."""
        sums = registers(side_rows * side, lanes)
        rows = [rt * side_rows + r for r in range(side_rows)]
        dims = [T.Ramp((dt * side + d) * lanes, 1, lanes) for d in range(side)]
        for i, each in enumerate(sums):
            r, d = divmod(i, side)
            each.set(acc[rows[r], dims[d]] * T.Broadcast(rescale[rows[r]], lanes))
        # Only keys that exist are read: 0 times the NaN of an unused slot would be NaN.
        with T.serial(count) as k:
            for i, each in enumerate(sums):
                r, d = divmod(i, side)
                weight = T.Broadcast(probs[k, rows[r]], lanes)
                each.set(each.value + weight * v_tile[k, dims[d]])
        for i, each in enumerate(sums):
            r, d = divmod(i, side)
            T.buffer_store(acc, each.value, [rows[r], dims[d]])

    @T.inline
    def weigh(probs, rescale, v_tile, count, acc):
        for row_tile, dim_tile in T.grid(row_tiles, dim_tiles):
            with T.sblock("weigh"):
                rt = T.axis.opaque(row_tiles, row_tile)
                dt = T.axis.opaque(dim_tiles, dim_tile)
                T.reads()
                T.writes()
                multiply(probs, rescale, v_tile, count, rt, dt, acc)

    return weigh


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    load, score, softmax, weigh = _load(t), _score(t), _softmax(t), _weigh(t)

    @T.inline
    def step(
        q_columns,
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
    ):
        k_tile = T.sblock_alloc_buffer((t.keys, t.head_dim_cap), "float32")
        v_tile = T.sblock_alloc_buffer((t.keys, t.head_dim_v_cap), "float32")
        scores = T.sblock_alloc_buffer((t.keys, t.rows), "float32")
        rescale = T.sblock_alloc_buffer((t.rows,), "float32")
        count: T.let[T.int32] = T.min(t.keys, kv_end - key)
        load(k_cache, v_cache, block_table, seq, kv_head, key, count, k_tile, v_tile)
        score(q_columns, k_tile, count, scores)
        softmax(scores, count, limit, key, sm_scale, row_max, row_sum, rescale)
        weigh(scores, rescale, v_tile, count, acc)

    return step
