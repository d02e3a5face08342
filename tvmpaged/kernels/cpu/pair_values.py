"""acc ``[rows, head_dim]`` += probs ``[rows, keys]`` . V, over a cache of pairs.

V's lines are the right operand as they lie. Copied are only the lines of the last keys of a range,
because a line holds two keys and one of them may not exist (0 times the NaN of an unused slot would
be NaN); and, for many rows, lines of blocks too short to fill a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.cpu import amx
from tvmpaged.kernels.tile import Tile
from tvmpaged.kernels.tile_registers import DEPTH, SIDE
from tvmpaged.layout import stretch


def _gather(t: Tile, count: int) -> Callable[..., Any]:
    """Return the program part that copies lines of `count` x 16 dims, without keys past the end."""
    c, keys = t.cache, t.value_keys
    own = stretch(c.spec.block_size)
    lines, pieces, half = keys // 2, keys // own, own // 2

    def line(v_cache: Any, block: Any, head: Any, first: Any) -> Any:
        return tirx.reinterpret("uint32x16", v_cache[block, head, first, T.Ramp(0, 1, DEPTH)])

    @T.inline
    def copy(v_cache, block, head, source, laid, to):
        for d in T.unroll(count):
            for pair in T.unroll(half):
                laid[to + d * lines + pair, T.Ramp(0, 1, SIDE)] = line(
                    v_cache, block, head, source + d * half + pair
                )

    @T.inline
    def copy_some(v_cache, block, head, source, laid, to, left):
        for pair in range(half):
            with T.sblock("copy_pair"):
                vp = T.axis.opaque(half, pair)
                T.reads()
                T.writes()
                exists: T.let[T.uint32] = T.Select(
                    left > 2 * vp + 1,
                    T.uint32(0xFFFFFFFF),
                    T.Select(left > 2 * vp, T.uint32(0xFFFF), T.uint32(0)),
                )
                for d in T.unroll(count):
                    laid[to + d * lines + vp, T.Ramp(0, 1, SIDE)] = T.bitwise_and(
                        line(v_cache, block, head, source + d * half + vp),
                        T.Broadcast(exists, SIDE),
                    )

    @T.inline
    def gather(v_cache, block_table, seq, kv_head, start, tiles, kv_end, dim, laid):
        for piece in range(tiles * pieces):
            with T.sblock("gather"):
                vp = T.axis.opaque(tiles * pieces, piece)
                T.reads()
                T.writes()
                first: T.let[T.int32] = start + vp * own
                block: T.let[T.int64] = c.block(block_table, seq, T.min(first, kv_end - 1))
                source: T.let[T.int32] = c.v_line(c.slot(first), dim)
                to: T.let[T.int32] = (
                    T.truncdiv(vp, pieces) * (count * lines) + T.truncmod(vp, pieces) * half
                )
                if first + own <= kv_end:
                    copy(v_cache, block, kv_head, source, laid, to)
                else:
                    copy_some(v_cache, block, kv_head, source, laid, to, kv_end - first)

    return gather


def _multiply(t: Tile, count: int) -> Callable[..., Any]:
    """Return the program part ``acc += probs . V`` of `count` x 16 dims."""
    c, regs, width = t.cache, t.registers, t.cache.spec.head_dim_v
    side, gather = t.choices["weigh_rows"], _gather(t, count)
    row_tiles, depth = max(1, t.rows // SIDE) // side, t.value_keys
    lines, gathered = depth // 2, t.gathers_values
    laid_tiles = t.keys // depth if gathered else 1
    ahead = -(-t.prefetch_keys // depth) * depth if not gathered else 0

    @T.inline
    def move(move_tile, row_tile, dim, acc):
        for r in T.unroll(side):
            for d in T.unroll(count):
                T.evaluate(
                    move_tile(
                        regs.acc + r * count + d,
                        T.address_of(acc[(row_tile + r) * SIDE, dim + d * SIDE]),
                        width * 4,
                    )
                )

    @T.inline
    def load_probs(probs, row_tile, chunk):
        for r in T.unroll(side):
            T.evaluate(
                amx.load(
                    regs.probs + r,
                    T.address_of(probs[(row_tile + r) * SIDE, chunk * depth]),
                    t.keys * 2,
                )
            )

    @T.inline
    def add(d, address):
        T.evaluate(amx.load(regs.v, address, 2 * DEPTH))
        for r in T.unroll(side):
            T.evaluate(amx.dot(regs.acc + r * count + d, regs.probs + r, regs.v))

    @T.inline
    def from_cache(
        probs, v_cache, block_table, seq, kv_head, start, whole, kv_begin, kv_end, row_tile, dim
    ):
        for chunk in range(whole):
            with T.sblock("value_tiles"):
                vk = T.axis.opaque(whole, chunk)
                T.reads()
                T.writes()
                key: T.let[T.int32] = start + vk * depth
                block: T.let[T.int64] = c.block(block_table, seq, key)
                line: T.let[T.int32] = c.v_line(c.slot(key), dim)
                next_head: T.let[T.int32] = t.ahead(kv_head, key + ahead, kv_begin, kv_end, depth)[
                    0
                ]
                next_key: T.let[T.int32] = (
                    T.truncdiv(t.ahead(kv_head, key + ahead, kv_begin, kv_end, depth)[1], depth)
                    * depth
                )
                next_block: T.let[T.int64] = c.block(block_table, seq, next_key)
                next_line: T.let[T.int32] = c.v_line(c.slot(next_key), dim)
                load_probs(probs, row_tile, vk)
                for d in T.unroll(count):
                    if ahead > 0:
                        for i in T.unroll(lines):
                            T.evaluate(
                                t.prefetch_at(
                                    T.address_of(
                                        v_cache[next_block, next_head, next_line + d * lines + i, 0]
                                    )
                                )
                            )
                    add(d, T.address_of(v_cache[block, kv_head, line + d * lines, 0]))

    @T.inline
    def from_scratch(probs, laid, at, chunk, row_tile):
        load_probs(probs, row_tile, chunk)
        for d in T.unroll(count):
            add(d, T.address_of(laid[(at * count + d) * lines, 0]))

    @T.inline
    def multiply(
        probs, v_cache, block_table, seq, kv_head, start, keys, kv_begin, kv_end, dim, acc
    ):
        laid = T.sblock_alloc_buffer((laid_tiles * count * lines, SIDE), "uint32")
        whole: T.let[T.int32] = 0 if gathered else T.truncdiv(keys, depth)
        if keys > whole * depth:
            gather(
                v_cache,
                block_table,
                seq,
                kv_head,
                start + whole * depth,
                T.ceildiv(keys, depth) - whole,
                kv_end,
                dim,
                laid,
            )
        for rt in range(row_tiles):
            with T.sblock("acc_tiles"):
                vr = T.axis.opaque(row_tiles, rt)
                T.reads()
                T.writes()
                move(amx.load, vr * side, dim, acc)
                if not gathered:
                    from_cache(
                        probs,
                        v_cache,
                        block_table,
                        seq,
                        kv_head,
                        start,
                        whole,
                        kv_begin,
                        kv_end,
                        vr * side,
                        dim,
                    )
                for tile in range(T.ceildiv(keys, depth) - whole):
                    from_scratch(probs, laid, tile, whole + tile, vr * side)
                move(amx.store, vr * side, dim, acc)

    return multiply


def weigh_part(t: Tile) -> Callable[..., Any]:
    """Return the program part ``acc = acc + probs . V``."""
    dim, count = t.cache.spec.head_dim_v, t.choices["weigh_vectors"]
    parts, rest = dim // SIDE // count, dim // SIDE % count
    multiply, last = _multiply(t, count), _multiply(t, rest or 1)

    @T.inline
    def weigh(probs, v_cache, block_table, seq, kv_head, start, kv_begin, kv_end, acc):
        keys: T.let[T.int32] = T.min(t.keys, kv_end - start)
        for d in range(parts):
            with T.sblock("dims"):
                vd = T.axis.opaque(parts, d)
                T.reads()
                T.writes()
                multiply(
                    probs,
                    v_cache,
                    block_table,
                    seq,
                    kv_head,
                    start,
                    keys,
                    kv_begin,
                    kv_end,
                    vd * (count * SIDE),
                    acc,
                )
        if rest > 0:
            last(
                probs,
                v_cache,
                block_table,
                seq,
                kv_head,
                start,
                keys,
                kv_begin,
                kv_end,
                parts * (count * SIDE),
                acc,
            )

    return weigh
