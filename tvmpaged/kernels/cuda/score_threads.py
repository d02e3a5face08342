"""The scores of a step: each thread multiplies its part of the dims, those of a key are folded.

Within a warp by shuffles, where there are none through local memory, as the target has it; the rest
of the program is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.thread_grid import Threads
from tvmpaged.kernels.tile import Tile
from tvmpaged.sm import ALL_LANES, WARP_SIZE


def _fold(t: Tile) -> Callable[..., Any]:
    """Return the program part that sums scores along the threads of a group, for all of them.

    A butterfly: in each stage a thread adds what the one `width` away has. Both forms add the same
    numbers in the same order.
    """
    th = Threads(t)
    stages = th.along_dim.bit_length() - 1

    @T.inline
    def shuffle(scores, vy, vx):
        for stage in T.unroll(stages):
            for r, j in T.grid(t.rows, th.keys):
                scores[r, j] = scores[r, j] + T.tvm_warp_shuffle_xor(
                    T.uint32(ALL_LANES), scores[r, j], 1 << stage, WARP_SIZE, WARP_SIZE
                )

    @T.inline
    def shared(scores, vy, vx):
        parts = T.sblock_alloc_buffer(
            (t.rows, th.keys, th.groups, th.along_dim), "float32", scope="shared"
        )
        for stage in T.unroll(stages):
            for r, j in T.grid(t.rows, th.keys):
                parts[r, j, vy, vx] = scores[r, j]
            T.evaluate(T.tvm_storage_sync("shared"))
            for r, j in T.grid(t.rows, th.keys):
                scores[r, j] = scores[r, j] + parts[r, j, vy, T.bitwise_xor(vx, 1 << stage)]
            T.evaluate(T.tvm_storage_sync("shared"))

    return shuffle if t.choices["fold"] == "shuffle" else shared


def score_keys(t: Tile) -> Callable[..., Any]:
    """Return the program part ``scores = q . K``, folded along the threads of a group."""
    th, c, lanes = Threads(t), t.cache, t.lanes
    fold = _fold(t)

    @T.inline
    def score(q_rows, k_raw, vy, vx, scores):
        for r, j in T.grid(t.rows, th.keys):
            scores[r, j] = T.float32(0)
        for v in T.unroll(th.vectors(t.head_dim_cap)):
            if th.is_whole(c.head_dim) or (v * th.along_dim + vx) * lanes < c.head_dim:
                for r, j, i in T.grid(t.rows, th.keys, lanes):
                    scores[r, j] = scores[r, j] + q_rows[r, v, i] * c.wide(k_raw[j, v, i])
        fold(scores, vy, vx)

    return score
