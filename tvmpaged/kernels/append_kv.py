"""Write a step's new K and V rows into the paged cache; slot -1 skips the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.tile import WHOLE, PagedCache
from tvmpaged.layout import LINE, SIDE, pair_place
from tvmpaged.spec import AttentionSpec


def _by_worker(c: PagedCache, choices: dict[str, Any]) -> Callable[..., Any]:
    """Return the program part that writes one token's rows by one worker."""
    lanes, dtype = choices["lanes"], c.spec.kv_dtype

    @T.inline
    def write(rows, cache, token, slot, dim):
        for h in range(c.num_kv_heads):
            for do in range(tirx.truncdiv(dim, lanes)):
                for x in T.vectorized(lanes):
                    with T.sblock("write"):
                        vh, vo, vx = T.axis.remap("SSS", [h, do, x])
                        if c.nhd:
                            cache[
                                T.truncdiv(slot, c.block_size_extent),
                                T.truncmod(slot, c.block_size_extent),
                                vh,
                                vo * lanes + vx,
                            ] = T.Cast(dtype, rows[token, vh, vo * lanes + vx])
                        else:
                            cache[
                                T.truncdiv(slot, c.block_size_extent),
                                vh,
                                T.truncmod(slot, c.block_size_extent),
                                vo * lanes + vx,
                            ] = T.Cast(dtype, rows[token, vh, vo * lanes + vx])

    return write


def _by_pairs(c: PagedCache, which: str) -> Callable[..., Any]:
    """Return the program part that writes one token's rows of K or V into a cache of pairs.

    The elements of a row that stand side by side in a line stand between those of the token's
    neighbours, which other threads may write: so those are never stored, not even as they were.
    """
    return _dim_pairs(c) if which == "k" else _key_pairs(c)


def _dim_pairs(c: PagedCache) -> Callable[..., Any]:
    """Return what writes a row of K: two dims a line, so it touches as many lines as pairs."""
    head_dim, count = c.spec.head_dim, 2

    def place(slot: Any, dim: Any) -> tuple[Any, Any]:
        return pair_place("k", slot, dim, c.spec.block_size, head_dim)

    @T.inline
    def write(rows, cache, token, slot, dim):
        for h in range(c.num_kv_heads):
            with T.sblock("write_pairs"):
                vh = T.axis.opaque(c.num_kv_heads, h)
                T.reads()
                T.writes()
                block: T.let[T.int64] = T.truncdiv(slot, c.block_size_extent)
                at: T.let[T.int32] = T.Cast("int32", T.truncmod(slot, c.block_size_extent))
                for do in range(head_dim // SIDE):
                    for x in T.unroll(SIDE // count):
                        cache[
                            block,
                            vh,
                            place(at, do * SIDE + x * count)[0],
                            T.Ramp(place(at, do * SIDE + x * count)[1], 1, count),
                        ] = rows[token, vh, T.Ramp(do * SIDE + x * count, 1, count)]

    return write


def _key_pairs(c: PagedCache) -> Callable[..., Any]:
    """Return what writes a row of V: 16 dims a line, each beside the other key's.

    A line is one store, masked: what the mask leaves out is not touched. (Where there are tiles,
    there are masks for 16-bit elements.)
    """
    head_dim = c.spec.head_dim_v

    def line(slot: Any, dim: Any) -> Any:
        return pair_place("v", slot, dim, c.spec.block_size, head_dim)[0]

    def twice(dims: Any) -> Any:
        each = T.Cast(f"uint32x{SIDE}", T.reinterpret(f"uint16x{SIDE}", dims))
        both = each | T.shift_left(each, T.Broadcast(T.uint32(16), SIDE))
        return T.reinterpret(f"uint16x{LINE}", both)

    @T.inline
    def write(rows, cache, token, slot, dim):
        for h in range(c.num_kv_heads):
            with T.sblock("write_pairs"):
                vh = T.axis.opaque(c.num_kv_heads, h)
                T.reads()
                T.writes()
                block: T.let[T.int64] = T.truncdiv(slot, c.block_size_extent)
                at: T.let[T.int32] = T.Cast("int32", T.truncmod(slot, c.block_size_extent))
                for do in range(head_dim // SIDE):
                    T.evaluate(
                        T.call_llvm_intrin(
                            "void",
                            f"llvm.masked.store.v{LINE}i16.p0",
                            twice(rows[token, vh, T.Ramp(do * SIDE, 1, SIDE)]),
                            T.address_of(cache[block, vh, line(at, do * SIDE), 0]),
                            T.Ramp(0, 1, LINE) % T.Broadcast(2, LINE) == T.Broadcast(at % 2, LINE),
                        )
                    )

    return write


def _by_threads(c: PagedCache, choices: dict[str, Any]) -> Callable[..., Any]:
    """Return the program part that writes one token's rows by a thread block per head.

    The strides of new rows are free, so a thread reads its elements one by one; in the cache they
    are one store.
    """
    lanes, threads, dtype = choices["lanes"], choices["threads"], c.spec.kv_dtype

    @T.inline
    def write(rows, cache, token, slot, dim):
        for h in T.thread_binding(c.num_kv_heads, thread="blockIdx.y"):
            for x in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("thread"):
                    vh, vx = T.axis.remap("SS", [h, x])
                    T.reads()
                    T.writes()
                    each = T.sblock_alloc_buffer((lanes,), dtype, scope="local")
                    for step in range(T.ceildiv(dim, lanes * threads)):
                        if (step * threads + vx) * lanes < dim:
                            for i in T.unroll(lanes):
                                each[i] = T.Cast(
                                    dtype, rows[token, vh, (step * threads + vx) * lanes + i]
                                )
                            for i in T.vectorized(lanes):
                                if c.nhd:
                                    cache[
                                        T.truncdiv(slot, c.block_size_extent),
                                        T.truncmod(slot, c.block_size_extent),
                                        vh,
                                        (step * threads + vx) * lanes + i,
                                    ] = each[i]
                                else:
                                    cache[
                                        T.truncdiv(slot, c.block_size_extent),
                                        vh,
                                        T.truncmod(slot, c.block_size_extent),
                                        (step * threads + vx) * lanes + i,
                                    ] = each[i]

    return write


def append_kv(spec: AttentionSpec, choices: dict[str, Any]) -> tvm.IRModule:
    """Build the append program.

    Its arguments::

        k            [num_tokens, num_kv_heads, head_dim]     free token and head strides
        v            [num_tokens, num_kv_heads, head_dim_v]   free token and head strides
        k_cache      [num_blocks, num_kv_heads, block_size, head_dim]     (HND) free block stride
        v_cache      [num_blocks, num_kv_heads, block_size, head_dim_v]   (HND) free block stride
                     (other layouts: `tvmpaged.layout`)
        slot_mapping [num_tokens] int64
    """
    c, lanes = PagedCache(spec, choices), choices["lanes"]
    k_dim, v_dim = c.head_dim_extent, c.head_dim_v_extent

    write_k = write_v = (_by_threads if "threads" in choices else _by_worker)(c, choices)
    if c.pairs:
        write_k, write_v = _by_pairs(c, "k"), _by_pairs(c, "v")

    @T.prim_func(s_tir=True)
    def main(
        k_handle: T.handle,
        v_handle: T.handle,
        k_cache_handle: T.handle,
        v_cache_handle: T.handle,
        slot_mapping_handle: T.handle,
    ):
        T.func_attr({"tirx.noalias": True})
        num_tokens = T.int64()
        k_token_stride = T.int64()
        k_head_stride = T.int64()
        v_token_stride = T.int64()
        v_head_stride = T.int64()
        k = T.match_buffer(
            k_handle,
            (num_tokens, c.num_kv_heads, k_dim),
            spec.q_dtype,
            strides=(k_token_stride, k_head_stride, T.int64(1)),
        )
        v = T.match_buffer(
            v_handle,
            (num_tokens, c.num_kv_heads, v_dim),
            spec.q_dtype,
            strides=(v_token_stride, v_head_stride, T.int64(1)),
        )
        k_cache = T.match_buffer(
            k_cache_handle, c.shape(k_dim), spec.kv_dtype, strides=c.strides(k_dim, "k")
        )
        v_cache = T.match_buffer(
            v_cache_handle, c.shape(v_dim), spec.kv_dtype, strides=c.strides(v_dim, "v")
        )
        slot_mapping = T.match_buffer(slot_mapping_handle, (num_tokens,), "int64")
        if "threads" in choices:
            assert c.is_whole(k_cache, lanes), WHOLE
            assert c.is_whole(v_cache, lanes), WHOLE
        for token in range(num_tokens):
            with T.sblock("worker"):
                n = T.axis.spatial(num_tokens, token)
                T.reads()
                T.writes()
                slot: T.let[T.int64] = slot_mapping[n]
                if slot >= T.int64(0):
                    write_k(k, k_cache, n, slot, k_dim)
                    write_v(v, v_cache, n, slot, v_dim)

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
