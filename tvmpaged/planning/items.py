"""One step's work list, made from its lengths alone: no tensor of K or V is touched here.

Vectorised: nothing loops over sequences, heads or splits in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvmpaged.planning.indices import IntArray, LongArray
from tvmpaged.planning.step import Step
from tvmpaged.worklist import ITEM_FIELDS, MAX_SPLIT_Q_LEN, MERGE_FIELDS, Item, Merge

#: What starting an item costs, in key rows: its q is loaded, its result normalised and written.
ITEM_OVERHEAD_KEYS = 16


@dataclass(frozen=True)
class Shape:
    """What of an artifact's choices shapes its work list.

    Parameters
    ----------
    row_tile : int
        Query rows an item of a prefill sequence holds.
    split_length : int
        Keys of one kv range; 0 means that a sequence is never split.
    """

    row_tile: int
    split_length: int


@dataclass(frozen=True)
class WorkList:
    """Items of one kernel, ordered by worker."""

    items: IntArray
    offsets: IntArray

    @property
    def is_empty(self) -> bool:
        """True when the kernel has nothing to do in this step."""
        return not len(self.items)


def make_items(
    step: Step,
    sequences: LongArray,
    shape: Shape,
    num_kv_heads: int,
    group_size: int,
    causal: bool,
    first_partial: int,
) -> tuple[IntArray, IntArray, int]:
    """Cut sequences into items and the merges of those that are split.

    Parameters
    ----------
    step : Step
        The step's checked inputs.
    sequences : array of int
        Those that this kernel does.
    shape : Shape
        The artifact's row tile and split length.
    num_kv_heads, group_size : int
        Heads; query heads per kv head.
    causal : bool
        Whether a row sees only what came before.
    first_partial : int
        Where this kernel's partial rows start.

    Returns
    -------
    items : array
        ``[num_items, ITEM_FIELDS]`` int32.
    merges : array
        ``[num_merges, MERGE_FIELDS]`` int32.
    next_partial : int
        The first partial row that is still free.
    """
    if not len(sequences):  # most steps have one kind of sequences only
        nothing = np.zeros((0, ITEM_FIELDS), np.int32), np.zeros((0, MERGE_FIELDS), np.int32)
        return *nothing, first_partial
    q_len, seq_len = step.q_lens[sequences], step.seq_lens[sequences]
    split = shape.split_length or np.iinfo(np.int32).max
    may_split = q_len <= MAX_SPLIT_Q_LEN
    ranges = np.where(may_split, np.maximum(1, -(-seq_len // split)), 1)
    tiles = -(-(q_len * group_size) // shape.row_tile)
    partial_rows = np.where(ranges > 1, ranges * q_len, 0)
    partial = first_partial + np.cumsum(partial_rows) - partial_rows

    # One entry per item: (sequence, kv head, tile, range), the range running fastest.
    counts = num_kv_heads * tiles * ranges
    owner = np.repeat(np.arange(len(sequences)), counts)
    rest = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    rest, kv_range = np.divmod(rest, ranges[owner])
    kv_head, tile = np.divmod(rest, tiles[owner])

    items = np.zeros((len(owner), ITEM_FIELDS), np.int64)
    items[:, Item.SEQ] = sequences[owner]
    items[:, Item.KV_HEAD] = kv_head
    items[:, Item.Q_START] = step.query_start_loc[sequences][owner]
    items[:, Item.ROW_BEGIN] = tile * shape.row_tile
    items[:, Item.ROW_END] = np.minimum((tile + 1) * shape.row_tile, q_len[owner] * group_size)
    visible = (seq_len - q_len)[owner] + 1 if causal else seq_len[owner]
    items[:, Item.VISIBLE] = visible
    last_token = (items[:, Item.ROW_END] - 1) // group_size
    reach = np.clip(visible + last_token, 0, seq_len[owner]) if causal else seq_len[owner]
    is_split = ranges[owner] > 1
    begin = np.where(is_split, kv_range * split, 0)
    items[:, Item.KV_BEGIN] = begin
    end = np.where(is_split, np.minimum(begin + split, reach), reach)
    items[:, Item.KV_END] = np.maximum(begin, end)
    items[:, Item.PARTIAL] = np.where(is_split, partial[owner] + kv_range * q_len[owner], -1)

    split_seqs = np.flatnonzero(ranges > 1)
    merged = np.repeat(split_seqs, q_len[split_seqs])
    token = np.arange(len(merged)) - np.repeat(
        np.cumsum(q_len[split_seqs]) - q_len[split_seqs], q_len[split_seqs]
    )
    merges = np.zeros((len(merged), MERGE_FIELDS), np.int64)
    merges[:, Merge.OUT_ROW] = step.query_start_loc[sequences][merged] + token
    merges[:, Merge.PARTIAL] = partial[merged] + token
    merges[:, Merge.COUNT] = ranges[merged]
    merges[:, Merge.STRIDE] = q_len[merged]
    return (
        items.astype(np.int32),
        merges.astype(np.int32),
        first_partial + int(partial_rows.sum()),
    )


def balance(items: IntArray, num_workers: int) -> WorkList:
    """Deal items out in stretches of about equal work, in order (so a worker's K/V stay near).

    The heaviest worker has at most one item more than the mean.
    """
    if not len(items):
        return WorkList(items, np.zeros(num_workers + 1, np.int32))
    rows = items[:, Item.ROW_END] - items[:, Item.ROW_BEGIN]
    keys = items[:, Item.KV_END].astype(np.int64) - items[:, Item.KV_BEGIN]
    done = np.cumsum((keys + ITEM_OVERHEAD_KEYS) * np.maximum(rows, 1))
    shares = np.arange(1, num_workers) * done[-1] / num_workers
    # An item belongs to the worker in whose share its middle lies.
    middle = done - np.diff(done, prepend=0) / 2
    cuts = np.searchsorted(middle, shares)
    return WorkList(items, np.concatenate([[0], cuts, [len(items)]]).astype(np.int32))
