"""One step's work list, made from its lengths alone: no tensor of K or V is touched here.

Vectorised: nothing loops over sequences, heads or splits in Python. Sequences become items in up to
three cuts, each of which writes a few columns: by kv head, by tile of rows, by kv range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvmpaged.planning.indices import IntArray, LongArray, greatest
from tvmpaged.planning.step import Step
from tvmpaged.worklist import ITEM_FIELDS, MAX_SPLIT_Q_LEN, MERGE_FIELDS, Item, Merge

#: What starting an item costs, in key rows: its q is loaded, its result normalised and written.
ITEM_OVERHEAD_KEYS = 16

# While they are cut, items carry what is the same for all of a sequence in columns of their own.
_Q_LEN, _RANGES, _RANGE_KEYS, _FIELDS = range(ITEM_FIELDS, ITEM_FIELDS + 4)

#: Columns of a sequence's item that make its first token's merge, in the order of `Merge`.
_MERGE_COLUMNS = (Item.Q_START, Item.PARTIAL, _RANGES, _Q_LEN)


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
    merges, next_partial = np.zeros((0, MERGE_FIELDS), np.int32), first_partial
    if not len(sequences):  # most steps have one kind of sequences only
        return np.zeros((0, ITEM_FIELDS), np.int32), merges, next_partial
    each = _whole_sequences(step, sequences, group_size, causal)
    is_split = _count_ranges(each, shape.split_length)
    if is_split is not None:
        merges, next_partial = _number_partials(each, is_split, first_partial)
    rows = each.repeat(num_kv_heads, axis=0)
    rows.reshape(-1, num_kv_heads, _FIELDS)[:, :, Item.KV_HEAD] = np.arange(num_kv_heads)
    if greatest(each[:, Item.ROW_END] - 1) >= shape.row_tile:  # too many rows, or none
        rows = _cut_rows(rows, shape.row_tile, group_size, causal)
    if is_split is not None:
        rows = _cut_keys(rows)
    return rows[:, :ITEM_FIELDS], merges, next_partial


def _whole_sequences(step: Step, sequences: LongArray, group_size: int, causal: bool) -> IntArray:
    """Return one item per sequence, of its first kv head: all rows, all keys, not split."""
    q_len, seq_len = step.q_lens[sequences], step.seq_lens[sequences]
    each = np.zeros((len(sequences), _FIELDS), np.int32)
    each[:, Item.SEQ] = sequences
    each[:, Item.Q_START] = step.query_start_loc[sequences]
    each[:, Item.ROW_END] = q_len * group_size
    each[:, Item.KV_END] = seq_len
    each[:, Item.VISIBLE] = seq_len - q_len + 1 if causal else seq_len
    each[:, Item.PARTIAL] = -1
    each[:, _Q_LEN] = q_len
    return each


def _count_ranges(each: IntArray, split_length: int) -> npt.NDArray[np.bool_] | None:
    """Write how many kv ranges each sequence has, and the keys of one; return which have several.

    None when no sequence is split.
    """
    if not split_length or greatest(each[:, Item.KV_END]) <= split_length:
        return None
    ranges = (each[:, Item.KV_END].astype(np.int64) + (split_length - 1)) // split_length
    is_split = (ranges > 1) & (each[:, _Q_LEN] <= MAX_SPLIT_Q_LEN)
    each[:, _RANGES] = np.where(is_split, ranges, 1)
    each[:, _RANGE_KEYS] = np.where(is_split, split_length, np.iinfo(np.int32).max)
    return is_split if np.logical_or.reduce(is_split) else None


def _number_partials(
    each: IntArray, is_split: npt.NDArray[np.bool_], first_partial: int
) -> tuple[IntArray, int]:
    """Give split sequences their partial rows; return these rows' merges and the next free row."""
    split = each[is_split]
    counts = split[:, _RANGES].astype(np.int64) * split[:, _Q_LEN]
    ends = first_partial + counts.cumsum()
    each[is_split, Item.PARTIAL] = split[:, Item.PARTIAL] = ends - counts
    merges, token = _expand(split.take(_MERGE_COLUMNS, axis=1), split[:, _Q_LEN])
    merges[:, Merge.OUT_ROW] += token
    merges[:, Merge.PARTIAL] += token
    return merges, int(ends[-1])


def _cut_rows(rows: IntArray, row_tile: int, group_size: int, causal: bool) -> IntArray:
    """Cut items into tiles of rows; a tile reads no key that its last token does not see."""
    rows, tile = _expand(rows, -(-rows[:, Item.ROW_END] // row_tile))
    begin = tile * row_tile
    end = np.minimum(begin + row_tile, rows[:, Item.ROW_END])
    rows[:, Item.ROW_BEGIN], rows[:, Item.ROW_END] = begin, end
    if causal:
        rows[:, Item.KV_END] = np.maximum(rows[:, Item.VISIBLE] + (end - 1) // group_size, 0)
    return rows


def _cut_keys(rows: IntArray) -> IntArray:
    """Cut items into kv ranges; of a sequence that is not split, the one range holds all keys."""
    rows, kv_range = _expand(rows, rows[:, _RANGES])
    begin = kv_range * rows[:, _RANGE_KEYS]
    keys = np.minimum(rows[:, Item.KV_END] - begin, rows[:, _RANGE_KEYS])
    rows[:, Item.KV_BEGIN], rows[:, Item.KV_END] = begin, begin + np.maximum(keys, 0)
    rows[:, Item.PARTIAL] += kv_range * rows[:, _Q_LEN]
    return rows


def _expand(rows: IntArray, counts: npt.NDArray[Any]) -> tuple[IntArray, LongArray]:
    """Return each row as often as its count says, and which of its copies each one is."""
    first = (counts.cumsum() - counts).repeat(counts)
    return rows.repeat(counts, axis=0), np.arange(len(first)) - first


def balance(items: IntArray, num_workers: int) -> WorkList:
    """Deal items out in stretches of about equal work, in order (so a worker's K/V stay near).

    The heaviest worker has at most one item more than the mean.
    """
    if not len(items):
        return WorkList(items, np.zeros(num_workers + 1, np.int32))
    rows = items[:, Item.ROW_END] - items[:, Item.ROW_BEGIN]
    keys = items[:, Item.KV_END] - items[:, Item.KV_BEGIN] + np.int64(ITEM_OVERHEAD_KEYS)
    cost = keys * rows
    done = cost.cumsum()
    shares = np.arange(1, num_workers) * done[-1] / num_workers
    # An item belongs to the worker in whose share its middle lies.
    offsets = np.zeros(num_workers + 1, np.int32)
    offsets[1:-1] = (done - cost / 2).searchsorted(shares)
    offsets[-1] = len(items)
    return WorkList(items, offsets)
