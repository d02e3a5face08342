"""K and V on their way to the threads that read them, several steps ahead.

Shared memory holds `stages` steps. A thread copies exactly the vectors that it reads later, so it
waits for its own copies only, and no barrier stands in the walk: threads keep no step with each
other. A step's copies are one group, closed by every thread whether it copied or not, so that "all
but so many groups" names a step::

    stages 3        turn:   0    1    2    3    4    5    ...
    taken, step             -    -    -    0    1    2         waited for; pending: 2
    then started, step      0    1    2    3    4    5         where the step taken lay

A thread has read its part of a stage, and used it, before it starts the copy that goes there: what
CUDA's own pipeline of a single thread relies on, too. Where a copy comes from is looked up before
the wait, so that the block table is on its way at the same time. Copies stand in one place of the
program: with those of the first steps before the loop, ptxas kept some bytes outside registers.

In a stage K comes before V. Vectors that threads along x read at once lie side by side, and behind
them those of the next key, so that any 8 threads which follow each other meet all banks::

    head_dim 24, dim_threads 2, lanes 4     key 0: 0 1   key 1: 0 1   ...   key 0: 4 5   key 1: 4 5
    (vectors of a row: 6, two to a thread)

Keys past the end are never read: they are zeros in shared memory, their score is masked. A step
that begins past the end has no copies, and is not taken.

The copy is an asynchronous one of 16, 8 or 4 bytes, or, where ``fold`` is "shared" because a device
has none, a plain one that is done when it is started.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.tile import Expr, Tile
from tvmpaged.spec import DTYPE_BYTES

#: Bytes of the one asynchronous copy that leaves the first-level cache alone.
WIDEST = 16


@dataclass(frozen=True)
class Stages:
    """Where vectors lie in shared memory."""

    tile: Tile

    @property
    def count(self) -> int:
        """Steps of which K and V lie in shared memory, or are on their way there."""
        return int(self.tile.choices["stages"])

    @property
    def ahead(self) -> int:
        """Steps by which copies are started before they are used; 0: there are no copies."""
        return self.count if self.count > 1 else 0

    @property
    def v_begin(self) -> int:
        """Element of a stage where V begins."""
        return self.tile.keys * self.tile.head_dim_cap

    @property
    def stage(self) -> int:
        """Elements of a step's K and V."""
        return self.v_begin + self.tile.keys * self.tile.head_dim_v_cap

    @property
    def elements(self) -> int:
        """Elements of all stages; an array has one at least."""
        return max(1, self.ahead * self.stage)

    def place(self, dim_cap: int, v: Expr, key: Expr, x: Expr) -> Expr:
        """Return the element of a step's K, or V, where a thread's v-th vector of a key begins."""
        along, lanes = Threads(self.tile).along_dim, self.tile.lanes
        width = T.min(along, dim_cap // lanes - v * along)
        return (v * (self.tile.keys * along) + key * width + x) * lanes


def _copy(t: Tile) -> Callable[..., Any]:
    """Return the program part that starts copying a vector of the cache; zeros unless `exists`."""
    c, lanes = t.cache, t.lanes
    size, zero = lanes * DTYPE_BYTES[c.spec.kv_dtype], T.Cast(c.spec.kv_dtype, T.float32(0))
    start = (T.ptx.cp.async_.cg if size == WIDEST else T.ptx.cp.async_.ca).shared.global_

    @T.inline
    def asynchronous(cache, block, kv_head, slot, dim, exists, tile, place):
        T.evaluate(
            start(
                T.address_of(tile[place]),
                T.address_of(c.at(cache, block, kv_head, slot, dim)),
                size,
                T.Select(exists, T.uint32(size), T.uint32(0)),
            )
        )

    @T.inline
    def plain(cache, block, kv_head, slot, dim, exists, tile, place):
        for i in T.vectorized(lanes):
            tile[place + i] = zero
        if exists:
            for i in T.vectorized(lanes):
                tile[place + i] = c.at(cache, block, kv_head, slot, dim + i)

    return plain if t.choices["fold"] == "shared" else asynchronous


def commit(t: Tile) -> Any:
    """Close a group of copies."""
    return 0 if t.choices["fold"] == "shared" else T.ptx.cp.async_.commit_group()


def wait(t: Tile, pending: int) -> Any:
    """Wait until no more than so many groups of copies, the latest, may be under way."""
    return 0 if t.choices["fold"] == "shared" else T.ptx.cp.async_.wait_group(pending)


def find_blocks(t: Tile) -> Callable[..., Any]:
    """Return the program part that looks up the blocks of a step's keys; never past the end."""
    th, c = Threads(t), t.cache

    @T.inline
    def find(source, key, block_of):
        for j in T.unroll(th.keys):
            block_of[j] = source.block_table[
                source.seq,
                c.block_number(T.min(key + j * th.groups + source.y, source.kv_end - 1)),
            ]

    return find


def stage_vectors(t: Tile) -> Callable[..., Any]:
    """Return the program part that starts copying a step's K and V to `begin` of shared memory."""
    th, c, lanes, s = Threads(t), t.cache, t.lanes, Stages(t)
    copy = _copy(t)

    @T.inline
    def copy_row(cache, dim, dim_cap, source, block, position, begin, key):
        for v in T.unroll(th.vectors(dim_cap)):
            if th.is_whole(dim) or (v * th.along_dim + source.x) * lanes < dim:
                copy(
                    cache,
                    block,
                    source.kv_head,
                    c.slot(position),
                    (v * th.along_dim + source.x) * lanes,
                    position < source.kv_end,
                    source.tile,
                    begin + s.place(dim_cap, v, key, source.x),
                )

    @T.inline
    def stage(source, key, block_of, begin):
        for j in T.unroll(th.keys):
            copy_row(
                source.k_cache,
                c.head_dim,
                t.head_dim_cap,
                source,
                T.Cast("int64", block_of[j]),
                key + j * th.groups + source.y,
                begin,
                j * th.groups + source.y,
            )
            copy_row(
                source.v_cache,
                c.head_dim_v,
                t.head_dim_v_cap,
                source,
                T.Cast("int64", block_of[j]),
                key + j * th.groups + source.y,
                begin + s.v_begin,
                j * th.groups + source.y,
            )

    return stage


def take_vectors(t: Tile, dim: Expr, dim_cap: int) -> Callable[..., Any]:
    """Return the program part that takes a step's K, or V, from shared memory into registers."""
    th, lanes, s = Threads(t), t.lanes, Stages(t)

    @T.inline
    def take(source, begin, raw):
        for j in T.unroll(th.keys):
            for v in T.unroll(th.vectors(dim_cap)):
                if th.is_whole(dim) or (v * th.along_dim + source.x) * lanes < dim:
                    for i in T.vectorized(lanes):
                        raw[j, v, i] = source.tile[
                            begin + s.place(dim_cap, v, j * th.groups + source.y, source.x) + i
                        ]

    return take
