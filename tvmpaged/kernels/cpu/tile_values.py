"""The second product on AMX tiles: acc ``[rows, head_dim]`` += probs ``[rows, keys]`` . V.

V is interleaved by pairs of keys on its way into scratch: element 2j of a pair's row is dim j of
the first key, 2j + 1 of the second. Whole stretches of 32 dims are interleaved within 128-bit
lanes, which is one instruction; `restore` puts the dims back in order at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.cpu import amx
from tvmpaged.kernels.cpu.transpose import shuffle
from tvmpaged.kernels.tile import Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE

_LOW = [i for lane in range(0, DEPTH, 8) for j in range(4) for i in (lane + j, DEPTH + lane + j)]
_HIGH = [lane + 4 for lane in _LOW]
_ALL = [i for j in range(SIDE) for i in (j, SIDE + j)]


def _pair_rows(t: Tile) -> Callable[..., Any]:
    """Return the program part from two rows of V to one row of pairs."""
    c, count = t.cache, t.cache.spec.head_dim_v // SIDE

    def row(cache: Any, head: Any, places: Any, key: Any, d: Any, n: int) -> Any:
        value = c.at(cache, places[0, key], head, places[1, key], T.Ramp(d, 1, n))
        return tirx.reinterpret(f"uint16x{n}", value)

    def guarded(value: Any, exists: Any, n: int) -> Any:
        return T.Select(T.Broadcast(exists, n), value, T.Broadcast(T.uint16(0), n))

    @T.inline
    def pair_rows(v_cache, kv_head, places, key, left, pairs, pair, whole):
        for chunk in T.unroll(count // 2):
            a = T.sblock_alloc_buffer((2, DEPTH), "uint16")
            for i in T.unroll(2):
                if whole:
                    a[i, T.Ramp(0, 1, DEPTH)] = row(
                        v_cache, kv_head, places, key + i, chunk * DEPTH, DEPTH
                    )
                else:
                    a[i, T.Ramp(0, 1, DEPTH)] = guarded(
                        row(v_cache, kv_head, places, key + i, chunk * DEPTH, DEPTH),
                        key + i < left,
                        DEPTH,
                    )
            pairs[pair, T.Ramp(chunk * 64, 1, DEPTH)] = shuffle(
                a[0, T.Ramp(0, 1, DEPTH)], a[1, T.Ramp(0, 1, DEPTH)], _LOW
            )
            pairs[pair, T.Ramp(chunk * 64 + DEPTH, 1, DEPTH)] = shuffle(
                a[0, T.Ramp(0, 1, DEPTH)], a[1, T.Ramp(0, 1, DEPTH)], _HIGH
            )
        if count % 2 > 0:
            rest = T.sblock_alloc_buffer((2, SIDE), "uint16")
            for i in T.unroll(2):
                rest[i, T.Ramp(0, 1, SIDE)] = guarded(
                    row(v_cache, kv_head, places, key + i, count // 2 * DEPTH, SIDE),
                    key + i < left,
                    SIDE,
                )
            pairs[pair, T.Ramp(count // 2 * 64, 1, DEPTH)] = shuffle(
                rest[0, T.Ramp(0, 1, SIDE)], rest[1, T.Ramp(0, 1, SIDE)], _ALL
            )

    return pair_rows


def _interleave(t: Tile) -> Callable[..., Any]:
    """Return the program part from some keys' V to pairs of keys."""
    c, pair_rows, count = t.cache, _pair_rows(t), t.cache.spec.head_dim_v // SIDE
    keys = t.choices["weigh_keys"]
    ahead = t.prefetch_keys if t.tiles_fit else 0
    lines = (count + 1) // 2

    @T.inline
    def locate(block_table, seq, first, kv_end, places):
        if t.tiles_fit:
            block: T.let[T.int64] = c.block(block_table, seq, T.min(first, kv_end - 1))
            slot: T.let[T.int64] = T.Cast("int64", c.slot(first))
            for k in T.unroll(SIDE):
                places[0, k] = block
                places[1, k] = slot + k
        else:
            for k in T.unroll(SIDE):
                places[0, k] = c.block(block_table, seq, T.min(first + k, kv_end - 1))
                places[1, k] = T.Cast("int64", c.slot(first + k))

    @T.inline
    def interleave(v_cache, block_table, seq, kv_head, key, kv_begin, kv_end, pairs):
        # Only keys that exist are read, and the odd ones of the last tile count as 0: 0 times the
        # NaN of an unused slot would be NaN.
        for run in range(T.ceildiv(T.min(keys, kv_end - key), DEPTH) * 2):
            with T.sblock("pairs"):
                vs = T.axis.opaque(T.ceildiv(T.min(keys, kv_end - key), DEPTH) * 2, run)
                T.reads()
                T.writes()
                first: T.let[T.int32] = key + vs * SIDE
                places = T.sblock_alloc_buffer((2, SIDE), "int64")
                locate(block_table, seq, first, kv_end, places)
                next_head: T.let[T.int32] = t.ahead(kv_head, first + ahead, kv_begin, kv_end, SIDE)[
                    0
                ]
                next_key: T.let[T.int32] = t.ahead(kv_head, first + ahead, kv_begin, kv_end, SIDE)[
                    1
                ]
                next_block: T.let[T.int64] = c.block(block_table, seq, next_key)
                next_slot: T.let[T.int32] = c.slot(next_key)
                if first + SIDE <= kv_end:
                    for p in T.unroll(SIDE // 2):
                        if ahead > 0:
                            for i, line in T.grid(2, lines):
                                T.evaluate(
                                    t.prefetch(
                                        v_cache,
                                        next_block,
                                        next_head,
                                        next_slot + 2 * p + i,
                                        line * DEPTH,
                                    )
                                )
                        pair_rows(
                            v_cache,
                            kv_head,
                            places,
                            2 * p,
                            SIDE,
                            pairs,
                            vs * (SIDE // 2) + p,
                            True,
                        )
                else:
                    for p in T.unroll(SIDE // 2):
                        pair_rows(
                            v_cache,
                            kv_head,
                            places,
                            2 * p,
                            kv_end - first,
                            pairs,
                            vs * (SIDE // 2) + p,
                            False,
                        )

    return interleave


def _multiply(t: Tile, count: int) -> Callable[..., Any]:
    """Return the program part ``acc += probs . V`` of `count` x 16 dims."""
    regs, width, side = t.registers, t.cache.spec.head_dim_v, t.choices["weigh_rows"]
    row_tiles, keys = max(1, t.rows // SIDE) // side, t.choices["weigh_keys"]
    # Scratch of probabilities counts in 16 bits for few rows, in pairs for many.
    step = DEPTH if t.few_rows else SIDE

    @T.inline
    def multiply(probs, pairs, start, key, kv_end, dim, acc):
        for rt in range(row_tiles):
            with T.sblock("acc_tiles"):
                vr = T.axis.opaque(row_tiles, rt)
                T.reads()
                T.writes()
                for r in T.unroll(side):
                    for d in T.unroll(count):
                        T.evaluate(
                            amx.load(
                                regs.acc + r * count + d,
                                T.address_of(acc[(vr * side + r) * SIDE, dim + d * SIDE]),
                                width * 4,
                            )
                        )
                for k in range(T.ceildiv(T.min(keys, kv_end - key), DEPTH)):
                    for r in T.unroll(side):
                        T.evaluate(
                            amx.load(
                                regs.probs + r,
                                T.address_of(
                                    probs[
                                        (vr * side + r) * SIDE,
                                        ((key - start) // DEPTH + k) * step,
                                    ]
                                ),
                                t.keys * 2,
                            )
                        )
                    for d in T.unroll(count):
                        T.evaluate(
                            amx.load(
                                regs.v,
                                T.address_of(pairs[k * SIDE, 2 * dim + d * DEPTH]),
                                width * 4,
                            )
                        )
                        for r in T.unroll(side):
                            T.evaluate(amx.dot(regs.acc + r * count + d, regs.probs + r, regs.v))
                for r in T.unroll(side):
                    for d in T.unroll(count):
                        T.evaluate(
                            amx.store(
                                regs.acc + r * count + d,
                                T.address_of(acc[(vr * side + r) * SIDE, dim + d * SIDE]),
                                width * 4,
                            )
                        )

    return multiply


def weigh_part(t: Tile) -> Callable[..., Any]:
    """Return the program part ``acc = acc * rescale + probs . V``.

    Many rows are rescaled where their base rises (`softmax_columns`), and not here.
    """
    dim, count, keys = t.cache.spec.head_dim_v, t.choices["weigh_vectors"], t.choices["weigh_keys"]
    parts, rest = dim // SIDE // count, dim // SIDE % count
    interleave, multiply, last = _interleave(t), _multiply(t, count), _multiply(t, rest or 1)

    @T.inline
    def weigh(probs, rescale, v_cache, block_table, seq, kv_head, start, kv_begin, kv_end, acc):
        if t.few_rows:
            for r, do in T.grid(t.rows, dim // SIDE):
                for x in T.vectorized(SIDE):
                    with T.sblock("rescale_acc"):
                        vr, vo, vx = T.axis.remap("SSS", [r, do, x])
                        acc[vr, vo * SIDE + vx] = acc[vr, vo * SIDE + vx] * rescale[vr]
        for chunk in range(T.ceildiv(T.min(t.keys, kv_end - start), keys)):
            with T.sblock("value_keys"):
                vc = T.axis.opaque(T.ceildiv(T.min(t.keys, kv_end - start), keys), chunk)
                T.reads()
                T.writes()
                key: T.let[T.int32] = start + vc * keys
                pairs = T.sblock_alloc_buffer((keys // 2, dim * 2), "uint16")
                interleave(v_cache, block_table, seq, kv_head, key, kv_begin, kv_end, pairs)
                for d in range(parts):
                    with T.sblock("dims"):
                        vd = T.axis.opaque(parts, d)
                        T.reads()
                        T.writes()
                        multiply(probs, pairs, start, key, kv_end, vd * (count * SIDE), acc)
                if rest > 0:
                    last(probs, pairs, start, key, kv_end, parts * (count * SIDE), acc)

    return weigh


_FIRST = [i for four in (0, 4) for i in (*range(four, four + 4), *range(16 + four, 20 + four))]
_SECOND = [lane + 8 for lane in _FIRST]


def restore(t: Tile) -> Callable[..., Any]:
    """Return the program part that puts the accumulators' dims in order."""
    chunks = t.cache.spec.head_dim_v // DEPTH

    @T.inline
    def run(acc):
        for r, chunk in T.grid(t.rows, chunks):
            with T.sblock("restore"):
                vr, vc = T.axis.remap("SS", [r, chunk])
                T.reads()
                T.writes()
                both = T.sblock_alloc_buffer((2, SIDE), "float32")
                for i in T.unroll(2):
                    both[i, T.Ramp(0, 1, SIDE)] = acc[vr, T.Ramp(vc * DEPTH + i * SIDE, 1, SIDE)]
                acc[vr, T.Ramp(vc * DEPTH, 1, SIDE)] = shuffle(
                    both[0, T.Ramp(0, 1, SIDE)], both[1, T.Ramp(0, 1, SIDE)], _FIRST
                )
                acc[vr, T.Ramp(vc * DEPTH + SIDE, 1, SIDE)] = shuffle(
                    both[0, T.Ramp(0, 1, SIDE)], both[1, T.Ramp(0, 1, SIDE)], _SECOND
                )

    return run
