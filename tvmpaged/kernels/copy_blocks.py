"""Copy whole blocks inside one cache: the "write" of copy-on-write.

Blocks are bytes here, so one program serves every dtype, layout and size.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.script import tirx as T

from tvmpaged.spec import AttentionSpec

#: A block's bytes are a multiple of this: head_dim is one of 8, and an element has 2 bytes or more.
CHUNK_BYTES = 16


def copy_blocks(spec: AttentionSpec, choices: dict[str, Any]) -> tvm.IRModule:
    """Build the copy program.

    Its arguments::

        cache        [num_blocks, block_bytes] uint8   free block stride
        block_copies [num_copies, 2] int32             (source, destination)
    """

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
        for n in range(num_copies):
            with T.sblock("worker"):
                vn = T.axis.spatial(num_copies, n)
                T.reads()
                T.writes()
                for chunk in range(T.truncdiv(block_bytes, T.int64(CHUNK_BYTES))):
                    for x in T.vectorized(CHUNK_BYTES):
                        with T.sblock("copy"):
                            vc, vx = T.axis.remap("SS", [chunk, x])
                            cache[block_copies[vn, 1], vc * CHUNK_BYTES + vx] = cache[
                                block_copies[vn, 0], vc * CHUNK_BYTES + vx
                            ]

    return tvm.IRModule({spec.kernel: main.with_attr("global_symbol", spec.kernel)})
