"""Write a step's new K and V rows into the paged cache; slot -1 skips the token."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.tile import PagedCache
from tvmpaged.layout import SIDE, pair_place
from tvmpaged.spec import AttentionSpec


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
    lanes = choices["lanes"]
    c = PagedCache(spec, choices)
    k_dim, v_dim = c.head_dim_extent, c.head_dim_v_extent

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
                            ] = T.Cast(spec.kv_dtype, rows[token, vh, vo * lanes + vx])
                        else:
                            cache[
                                T.truncdiv(slot, c.block_size_extent),
                                vh,
                                T.truncmod(slot, c.block_size_extent),
                                vo * lanes + vx,
                            ] = T.Cast(spec.kv_dtype, rows[token, vh, vo * lanes + vx])

    def place(which: str, slot: Any, dim: Any) -> tuple[Any, Any]:
        head_dim = spec.head_dim if which == "k" else spec.head_dim_v
        return pair_place(which, slot, dim, spec.block_size, head_dim)

    def some(first: Any, count: int) -> Any:
        return first if count == 1 else T.Ramp(first, 1, count)

    @T.inline
    def write_pairs(rows, cache, which, token, slot, dim, step):
        # `step` elements of a row stand side by side in a line, between those of the token's
        # neighbours, which other threads may write: so they are stored one by one.
        for h in range(c.num_kv_heads):
            with T.sblock("write_pairs"):
                vh = T.axis.opaque(c.num_kv_heads, h)
                T.reads()
                T.writes()
                block: T.let[T.int64] = T.truncdiv(slot, c.block_size_extent)
                at: T.let[T.int32] = T.Cast("int32", T.truncmod(slot, c.block_size_extent))
                for do in range(dim // SIDE):
                    for x in T.unroll(SIDE // step):
                        cache[
                            block,
                            vh,
                            place(which, at, do * SIDE + x * step)[0],
                            some(place(which, at, do * SIDE + x * step)[1], step),
                        ] = rows[token, vh, some(do * SIDE + x * step, step)]

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
        for token in range(num_tokens):
            with T.sblock("worker"):
                n = T.axis.spatial(num_tokens, token)
                T.reads()
                T.writes()
                slot: T.let[T.int64] = slot_mapping[n]
                if slot >= T.int64(0):
                    if c.pairs:
                        write_pairs(k, k_cache, "k", n, slot, spec.head_dim, 2)
                        write_pairs(v, v_cache, "v", n, slot, spec.head_dim_v, 1)
                    else:
                        write(k, k_cache, n, slot, k_dim)
                        write(v, v_cache, n, slot, v_dim)

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
