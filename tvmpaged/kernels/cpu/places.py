"""Where the keys of a step lie, looked up once for K and V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.tile import Tile
from tvmpaged.kernels.tile_registers import SIDE

#: The rows of such scratch.
BLOCK, SLOT, NEXT_BLOCK, NEXT_SLOT, NEXT_HEAD = range(5)


class Places:
    """Where a step's keys lie, and the keys to ask for: int64 scratch of `shape`.

    Where a group of `lanes` keys always lies in one block, that is one look-up and slots that
    follow each other.
    """

    def __init__(self, t: Tile) -> None:
        self.t = t
        self.shape = (5, t.keys // t.lanes if t.one_block else t.keys)

    def block(self, where: Any, g: Any, k: Any, row: int = BLOCK) -> Any:
        """Return the block id of a group's key."""
        return where[row, g if self.t.one_block else g * self.t.lanes + k]

    def slot(self, where: Any, g: Any, k: Any, row: int = SLOT) -> Any:
        """Return the slot of a group's key in its block."""
        return where[row, g] + k if self.t.one_block else where[row, g * self.t.lanes + k]

    def vector(self, cache: Any, where: Any, head: Any, g: Any, k: Any, number: Any) -> Any:
        """Return a vector of a group's key as float32."""
        c, lanes = self.t.cache, self.t.lanes
        block, slot = self.block(where, g, k), self.slot(where, g, k)
        return c.wide(c.at(cache, block, head, slot, T.Ramp(number * lanes, 1, lanes)), lanes)

    def ask(self, cache: Any, where: Any, g: Any, k: Any, number: Any) -> None:
        """Emit the prefetch of the line that a vector of a later key begins, if it begins one."""
        if not self.t.prefetch_keys:
            return
        block = self.block(where, g, k, NEXT_BLOCK)
        slot = self.slot(where, g, k, NEXT_SLOT)
        head = where[NEXT_HEAD, g]
        fetch = self.t.prefetch(cache, block, head, slot, number * self.t.lanes)
        begins = tirx.truncmod(T.int32(0) + number, self.t.line // self.t.lanes) == 0
        with T.If(begins), T.Then():
            T.evaluate(fetch)

    def _find(
        self, block_table: Any, seq: Any, first: Any, end: Any, g: Any, where: Any, row: int
    ) -> None:
        """Emit the look-up of a group's keys."""
        c, lanes = self.t.cache, self.t.lanes
        if self.t.one_block:
            block = c.block(block_table, seq, tirx.min(first, end - 1))
            T.buffer_store(where, block, [row, g])
            T.buffer_store(where, tirx.Cast("int64", c.slot(first)), [row + 1, g])
        else:
            with T.unroll(lanes) as k:
                block = c.block(block_table, seq, tirx.min(first + k, end - 1))
                T.buffer_store(where, block, [row, g * lanes + k])
                slot = tirx.Cast("int64", c.slot(first + k))
                T.buffer_store(where, slot, [row + 1, g * lanes + k])

    def locate(self) -> Callable[..., Any]:
        """Return the program part that fills them in."""
        t, lanes, find = self.t, self.t.lanes, self._find

        @T.inline
        def locate(block_table, seq, kv_head, key, groups, kv_begin, kv_end, where):
            for group in range(groups):
                with T.sblock("locate"):
                    g = T.axis.opaque(groups, group)
                    T.reads()
                    T.writes()
                    find(block_table, seq, key + g * lanes, kv_end, g, where, BLOCK)
                    if t.prefetch_keys > 0:
                        later: T.let[T.int32] = key + g * lanes + t.prefetch_keys
                        first: T.let[T.int32] = t.ahead(kv_head, later, kv_begin, kv_end, lanes)[1]
                        where[NEXT_HEAD, g] = T.Cast(
                            "int64", t.ahead(kv_head, later, kv_begin, kv_end, lanes)[0]
                        )
                        find(block_table, seq, first, kv_end, g, where, NEXT_BLOCK)

        return locate


class TilePlaces:
    """Where a few tiles of 16 keys lie, and those to ask for: int64 scratch of `shape`."""

    def __init__(self, t: Tile, count: int, ahead: int) -> None:
        self.t = t
        self.count = count
        self.ahead = ahead
        self.shape = (5, count)

    def locate(self) -> Callable[..., Any]:
        """Return the program part that fills them in, for the tiles from `key` on."""
        t, c, count, ahead = self.t, self.t.cache, self.count, self.ahead

        @T.inline
        def locate(block_table, seq, kv_head, key, kv_begin, kv_end, where):
            for a in T.unroll(count):
                at: T.let[T.int32] = key + a * SIDE
                where[BLOCK, a] = c.block(block_table, seq, T.min(at, kv_end - 1))
                where[SLOT, a] = T.Cast("int64", c.slot(at))
                if ahead > 0:
                    later: T.let[T.int32] = t.ahead(kv_head, at + ahead, kv_begin, kv_end, SIDE)[1]
                    where[NEXT_HEAD, a] = T.Cast(
                        "int64", t.ahead(kv_head, at + ahead, kv_begin, kv_end, SIDE)[0]
                    )
                    where[NEXT_BLOCK, a] = c.block(block_table, seq, later)
                    where[NEXT_SLOT, a] = T.Cast("int64", c.slot(later))

        return locate
