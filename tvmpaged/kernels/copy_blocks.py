"""Copy whole blocks inside one cache: the "write" of copy-on-write.

Blocks are bytes here, so one program serves every dtype, layout and size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.tile import WHOLE
from tvmpaged.spec import AttentionSpec

#: A block's bytes are a multiple of this: head_dim is one of 8, and an element has 2 bytes or more.
CHUNK_BYTES = 16


def _by_worker(choices: dict[str, Any]) -> Callable[..., Any]:
    """Return the program part of one copy by one worker."""

    @T.inline
    def run(cache, block_copies, vn):
        for chunk in range(T.truncdiv(cache.shape[1], T.int64(CHUNK_BYTES))):
            for x in T.vectorized(CHUNK_BYTES):
                with T.sblock("copy"):
                    vc, vx = T.axis.remap("SS", [chunk, x])
                    cache[block_copies[vn, 1], vc * CHUNK_BYTES + vx] = cache[
                        block_copies[vn, 0], vc * CHUNK_BYTES + vx
                    ]

    return run


def _by_threads(choices: dict[str, Any]) -> Callable[..., Any]:
    """Return the program part of one copy by several thread blocks: few copies fill a GPU, too."""
    threads, stripes = choices["threads"], choices["stripes"]

    def whole(stride: tirx.Var) -> tirx.PrimExpr:
        """Return a stride as a multiple of chunks; see `PagedCache.whole_strides`."""
        chunk = tirx.const(CHUNK_BYTES, "int64")
        return tirx.truncdiv(stride, chunk) * chunk

    @T.inline
    def run(cache, block_copies, vn):
        for y in T.thread_binding(stripes, thread="blockIdx.y"):
            for x in T.thread_binding(threads, thread="threadIdx.x"):
                with T.sblock("thread"):
                    vy, vx = T.axis.remap("SS", [y, x])
                    T.reads()
                    T.writes()
                    chunks = T.decl_buffer(
                        cache.shape,
                        "uint8",
                        data=cache.data,
                        strides=(whole(cache.strides[0]), T.int64(1)),
                    )
                    for step in range(
                        T.ceildiv(cache.shape[1], T.int64(CHUNK_BYTES * threads * stripes))
                    ):
                        if ((step * stripes + vy) * threads + vx) * CHUNK_BYTES < cache.shape[1]:
                            for i in T.vectorized(CHUNK_BYTES):
                                chunks[
                                    block_copies[vn, 1],
                                    ((step * stripes + vy) * threads + vx) * CHUNK_BYTES + i,
                                ] = chunks[
                                    block_copies[vn, 0],
                                    ((step * stripes + vy) * threads + vx) * CHUNK_BYTES + i,
                                ]

    return run


def copy_blocks(spec: AttentionSpec, choices: dict[str, Any]) -> tvm.IRModule:
    """Build the copy program.

    Its arguments::

        cache        [num_blocks, block_bytes] uint8   free block stride
        block_copies [num_copies, 2] int32             (source, destination)
    """
    copy = (_by_threads if "threads" in choices else _by_worker)(choices)

    @T.prim_func(s_tir=True)
    def main(cache_handle: T.handle, block_copies_handle: T.handle):
        T.func_attr({"tirx.noalias": True})
        num_blocks = T.int64()
        block_bytes = T.int64()
        block_stride = T.int64()
        num_copies = T.int32()
        cache = T.match_buffer(
            cache_handle,
            (num_blocks, block_bytes),
            "uint8",
            strides=(block_stride, T.int64(1)),
        )
        block_copies = T.match_buffer(block_copies_handle, (num_copies, 2), "int32")
        if "threads" in choices:
            assert T.truncmod(block_stride, T.int64(CHUNK_BYTES)) == T.int64(0), WHOLE
        for n in range(num_copies):
            with T.sblock("worker"):
                vn = T.axis.spatial(num_copies, n)
                T.reads()
                T.writes()
                copy(cache, block_copies, vn)

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
