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
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.cuda.warp_grid import Warps
from tvmpaged.kernels.tile import Expr


@dataclass(frozen=True)
class Source:
    """What a thread copies from, and where to.

    Parameters
    ----------
    k_cache, v_cache, block_table : Buffer
        The cache, its strides known to be whole vectors.
    seq, kv_head, kv_end : Expr
        Of the item.
    y, x : Expr
        The thread's place.
    tile : Buffer
        All stages.
    """

    k_cache: Any
    v_cache: Any
    block_table: Any
    seq: Expr
    kv_head: Expr
    kv_end: Expr
    y: Expr
    x: Expr
    tile: Any


def stage_keys(w: Warps, copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program part that starts copying a step's K and V, from `begin` of the tile on.

    A step that begins past the end has none.
    """
    t = w.tile
    th, c, lanes = Threads(t), t.cache, t.lanes

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
            for j in T.unroll(th.keys):
                position: T.let[T.int32] = T.min(key + j * th.groups + source.y, source.kv_end - 1)
                block_of[j] = c.block(source.block_table, source.seq, position)
                slot_of[j] = T.truncmod(position, c.block_size)
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
