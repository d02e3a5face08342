"""K and V of a step on their way into shared memory, several steps ahead.

Shared memory holds `stages` steps. Threads along x share a key's row, 16 bytes each; those along y
take different keys, as in `walk_threads`. A step's copies are one group, closed by every thread
whether it copied or not, so that "all but so many groups" names a step::

    stages 3      step:   0        1        2        3
    started               0 1      2        3        4
    waited for            0        1        2        3       pending: 1
    where                 0 1      2        0        1       the stage of the step before is free

Rows past the end are zeros: 0 x NaN would be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.source import locate_keys
from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.cuda.warp_grid import Warps


def stage_keys(w: Warps, copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program part that starts copying a step's K and V, from `begin` of the tile on.

    A step that begins past the end has none.
    """
    t = w.tile
    th, c, lanes, locate = Threads(t), t.cache, t.lanes, locate_keys(t)

    @T.inline
    def copy_row(cache, dim, vectors, source, block, slot, exists, place):
        for v in T.unroll(vectors):
            if th.is_whole(dim) or (v * th.along_dim + source.x) * lanes < dim:
                copy(
                    cache,
                    block,
                    source.kv_head,
                    slot,
                    (v * th.along_dim + source.x) * lanes,
                    exists,
                    source.tile,
                    place + (v * th.along_dim + source.x) * lanes,
                )

    @T.inline
    def stage(source, key, begin):
        block_of = T.sblock_alloc_buffer((th.keys,), "int64", scope="local")
        slot_of = T.sblock_alloc_buffer((th.keys,), "int32", scope="local")
        if key < source.kv_end:
            locate(source, key, block_of, slot_of)
            for j in T.unroll(th.keys):
                copy_row(
                    source.k_cache,
                    c.head_dim,
                    th.vectors(t.head_dim_cap),
                    source,
                    block_of[j],
                    slot_of[j],
                    key + j * th.groups + source.y < source.kv_end,
                    begin + (j * th.groups + source.y) * w.k_pitch,
                )
            for j in T.unroll(th.keys):
                copy_row(
                    source.v_cache,
                    c.head_dim_v,
                    th.vectors(t.head_dim_v_cap),
                    source,
                    block_of[j],
                    slot_of[j],
                    key + j * th.groups + source.y < source.kv_end,
                    begin + w.v_begin + (j * th.groups + source.y) * w.v_pitch,
                )

    return stage
