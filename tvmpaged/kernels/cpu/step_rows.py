"""One kv step for few rows (decode): scores ``[rows, keys]``, vectors along head_dim.

K and V are read once, straight from the cache, a group of `lanes` keys at a time. A group's dot
products along head_dim are folded together, so that its scores come out as one vector; the running
maximum and sum go along the keys. What lies past the end is neither read nor computed, but for the
rest of a group of K.

Keys of a later group are asked for one line at a time among the products: in a burst they hold up
the loads that are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.cpu.fold import fold
from tvmpaged.kernels.cpu.places import Places
from tvmpaged.kernels.cpu.registers import Register, registers, zero
from tvmpaged.kernels.cpu.row_softmax import softmax
from tvmpaged.kernels.tile import Tile


def _add(a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr:
    return a + b


def _unrolled(vectors: int) -> int:
    """Return how many vectors of a row are unrolled: whole rows, as far as they are not long.

    In part, the accumulators of many rows are stored and loaded. A run-time extent counts as 0.
    """
    return max(each for each in range(1, 9) if vectors % each == 0) if vectors else 1


def _score(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = q . K``.

    Of a group's keys every `parts`-th is multiplied and folded at a time, as many as have room in
    registers.
    """
    places, rows, lanes = Places(t), t.rows, t.lanes
    count = t.choices["dot_keys"]
    parts = lanes // count
    unroll = _unrolled(t.cache.spec.head_dim // lanes)

    def multiply(
        q_rows: Any, k_cache: Any, head: Any, g: Any, part: int, where: Any
    ) -> list[Register]:
        """Emit a part's products; return one vector for each row."""
        products = registers(rows * count, lanes)
        zero(products, lanes)
        with T.serial(t.vectors // unroll) as outer:
            for i in range(unroll):
                number = outer * unroll + i
                for k in range(count):
                    key = part + k * parts
                    places.ask(k_cache, where, g, key, number)
                    value = places.vector(k_cache, where, head, g, key, number)
                    for r in range(rows):
                        total, q = (
                            products[r * count + k],
                            q_rows[r, T.Ramp(number * lanes, 1, lanes)],
                        )
                        total.set(total.value + q * value)
        for r in range(rows):
            fold(_add, products[r * count : (r + 1) * count], lanes, lanes // 2, parts)
        return products[::count]

    def group(q_rows: Any, k_cache: Any, head: Any, g: Any, where: Any, scores: Any) -> None:
        """Emit the scores of a group."""
        folded = [multiply(q_rows, k_cache, head, g, part, where) for part in range(parts)]
        for r in range(rows):
            of_row = [each[r] for each in folded]
            fold(_add, of_row, lanes, parts // 2, 1)
            T.buffer_store(scores, of_row[0].value, [r, T.Ramp(g * lanes, 1, lanes)])

    @T.inline
    def score(q_rows, k_cache, kv_head, groups, where, scores):
        for each in range(groups):
            with T.sblock("score"):
                g = T.axis.opaque(groups, each)
                T.reads()
                T.writes()
                group(q_rows, k_cache, kv_head, g, where, scores)

    return score


def _weigh(t: Tile) -> Callable[..., Any]:
    """Return the program part ``acc = acc * rescale + probs . V``."""
    places, rows, lanes, count = Places(t), t.rows, t.lanes, t.choices["weigh_vectors"]
    parts, together = t.vectors_v // count, 4  # keys unrolled

    def at(part: Any, i: int) -> list[Any]:
        return [i // count, T.Ramp((part * count + i % count) * lanes, 1, lanes)]

    def ask(v_cache: Any, g: Any, k: Any, part: Any, where: Any) -> None:
        for d in range(count):
            places.ask(v_cache, where, g, k, part * count + d)

    def add(
        probs: Any, v_cache: Any, head: Any, g: Any, k: Any, part: Any, where: Any, sums: Any
    ) -> None:
        """Emit what a key adds."""
        for d in range(count):
            value = places.vector(v_cache, where, head, g, k, part * count + d)
            for r in range(rows):
                total = sums[r * count + d]
                total.set(total.value + T.Broadcast(probs[r, g * lanes + k], lanes) * value)

    def whole(
        probs: Any, v_cache: Any, head: Any, g: Any, part: Any, where: Any, sums: Any
    ) -> None:
        """Emit what a group of keys that all exist adds."""
        with T.serial(lanes // together) as k:
            for i in range(together):
                ask(v_cache, g, k * together + i, part, where)
                add(probs, v_cache, head, g, k * together + i, part, where, sums)

    def load(acc: Any, part: Any) -> list[Register]:
        sums = registers(rows * count, lanes)
        for i, each in enumerate(sums):
            row, dims = at(part, i)
            each.set(acc[row, dims])
        return sums

    def store(acc: Any, part: Any, sums: list[Register]) -> None:
        for i, each in enumerate(sums):
            T.buffer_store(acc, each.value, at(part, i))

    @T.inline
    def weigh(probs, rescale, v_cache, kv_head, key, groups, kv_end, where, acc):
        for r, do in T.grid(rows, t.vectors_v):
            for x in T.vectorized(lanes):
                with T.sblock("rescale_acc"):
                    vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                    acc[vr, vo * lanes + vx] = acc[vr, vo * lanes + vx] * rescale[vr]
        for each, part in T.grid(groups, parts):
            with T.sblock("weigh"):
                g = T.axis.opaque(groups, each)
                p = T.axis.opaque(parts, part)
                T.reads()
                T.writes()
                # Only keys that exist are read: 0 times the NaN of an unused slot would be NaN.
                left: T.let[T.int32] = kv_end - key - g * lanes
                sums = T.meta_var(load(acc, p))
                if left >= lanes:
                    whole(probs, v_cache, kv_head, g, p, where, sums)
                else:
                    for k in range(lanes):
                        ask(v_cache, g, k, p, where)
                    for k in range(left):
                        add(probs, v_cache, kv_head, g, k, p, where, sums)
                store(acc, p, sums)

    return weigh


def kv_step(t: Tile) -> Callable[..., Any]:
    """Return the program part of one step."""
    rows, keys, lanes = t.rows, t.keys, t.lanes
    places = Places(t)
    locate, score, probabilities, weigh = places.locate(), _score(t), softmax(t), _weigh(t)

    @T.inline
    def step(
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
    ):
        scores = T.sblock_alloc_buffer((rows, keys), "float32")
        probs = T.sblock_alloc_buffer((rows, keys), "float32")
        rescale = T.sblock_alloc_buffer((rows,), "float32")
        where = T.sblock_alloc_buffer(places.shape, "int64")
        groups: T.let[T.int32] = T.ceildiv(T.min(keys, kv_end - key), lanes)
        locate(block_table, seq, kv_head, key, groups, kv_begin, kv_end, where)
        score(q_rows, k_cache, kv_head, groups, where, scores)
        probabilities(scores, probs, groups, limit, key, sm_scale, row_max, row_sum, rescale)
        weigh(probs, rescale, v_cache, kv_head, key, groups, kv_end, where, acc)

    return step
