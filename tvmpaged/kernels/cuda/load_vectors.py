"""A step's K and V as they come: each thread loads its own vectors into registers, then computes.

Keys past the end are never read: their place is that of the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.source import locate_keys
from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.tile import Tile


def load_vectors(t: Tile) -> Callable[..., Any]:
    """Return the program part that loads a step's K and V into registers, as they are."""
    th, c, lanes, locate = Threads(t), t.cache, t.lanes, locate_keys(t)

    @T.inline
    def load_row(cache, dim, vectors, source, block, slot, j, raw):
        for v in T.unroll(vectors):
            if th.is_whole(dim) or (v * th.along_dim + source.x) * lanes < dim:
                for i in T.vectorized(lanes):
                    raw[j, v, i] = c.at(
                        cache,
                        block,
                        source.kv_head,
                        slot,
                        (v * th.along_dim + source.x) * lanes + i,
                    )

    @T.inline
    def load(source, key, k_raw, v_raw):
        block_of = T.sblock_alloc_buffer((th.keys,), "int64", scope="local")
        slot_of = T.sblock_alloc_buffer((th.keys,), "int32", scope="local")
        locate(source, key, block_of, slot_of)
        for j in T.unroll(th.keys):
            load_row(
                source.k_cache,
                c.head_dim,
                th.vectors(t.head_dim_cap),
                source,
                block_of[j],
                slot_of[j],
                j,
                k_raw,
            )
        for j in T.unroll(th.keys):
            load_row(
                source.v_cache,
                c.head_dim_v,
                th.vectors(t.head_dim_v_cap),
                source,
                block_of[j],
                slot_of[j],
                j,
                v_raw,
            )

    return load
