"""What a thread reads K and V from, and where the keys that it takes of a step lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.tile import Expr, Tile


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


def locate_keys(t: Tile) -> Callable[..., Any]:
    """Return the program part that looks up block and slot of a thread's keys of a step.

    Keys past the end have the place of the last one.
    """
    th, c = Threads(t), t.cache

    @T.inline
    def locate(source, key, block_of, slot_of):
        for j in T.unroll(th.keys):
            position: T.let[T.int32] = T.min(key + j * th.groups + source.y, source.kv_end - 1)
            block_of[j] = c.block(source.block_table, source.seq, position)
            slot_of[j] = T.truncmod(position, c.block_size)

    return locate
