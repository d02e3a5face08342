"""One step's work list, made from its lengths alone: no tensor of K or V is touched here.

Vectorised: nothing loops over sequences, heads or splits in Python. From step to step of a batch
that decodes, lengths grow by one, and all but two columns of the work list stay as they are until a
sequence needs another kv range. What stays is an *outline*, a pure function whose last results are
kept; only ``VISIBLE`` and ``KV_END`` are written anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tvmpaged.planning.indices import IntArray, LongArray, greatest
from tvmpaged.planning.step import Step
from tvmpaged.worklist import ITEM_FIELDS, MAX_SPLIT_Q_LEN, MERGE_FIELDS, Item, Merge

#: What starting an item costs, in key rows: its q is loaded, its result normalised and written.
ITEM_OVERHEAD_KEYS = 16

#: Threads that a GPU's multiprocessor holds at most.
RESIDENT_THREADS = 2048

#: Outlines kept: of decode and prefill, of a few batches.
_OUTLINES = 8


@dataclass(frozen=True)
class Shape:
    """What of an artifact's choices shapes its work list.

    Parameters
    ----------
    row_tile : int
        Query rows an item of a prefill sequence holds.
    split_length : int
        Keys of one kv range; 0 means that a sequence is never split.
    max_seq_len : int
        Sequences that would be split at this length write partials and are merged at any: so the
        number of merges follows from the new tokens alone. 0: only where there is more than one.
    """

    row_tile: int
    split_length: int
    max_seq_len: int = 0


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
    if not len(sequences):
        return np.zeros((0, ITEM_FIELDS), np.int32), NO_MERGES, first_partial
    q_len, seq_len = step.q_lens.take(sequences), step.seq_lens.take(sequences)
    ranges = _num_ranges(q_len, seq_len, shape.split_length)
    outline = _outline(
        sequences.tobytes(),
        step.query_start_loc.take(sequences).tobytes(),
        q_len.tobytes(),
        ranges.tobytes(),
        shape,
        num_kv_heads,
        group_size,
        causal,
        first_partial,
    )
    visible = (seq_len - q_len + 1 if causal else seq_len).take(outline.owner)
    reach = visible + outline.reach
    items = outline.items.copy()
    items[:, Item.VISIBLE] = visible
    items[:, Item.KV_END] = outline.begin + np.minimum(np.maximum(reach, 0), outline.keys)
    return items, outline.merges, outline.next_partial


def _num_ranges(q_len: LongArray, seq_len: LongArray, split_length: int) -> LongArray:
    """Return the kv ranges of each sequence: several where it is split, else one."""
    if not split_length or greatest(seq_len) <= split_length:
        return np.ones_like(seq_len)
    is_split = (seq_len > split_length) & (q_len <= MAX_SPLIT_Q_LEN)
    return np.where(is_split, (seq_len + (split_length - 1)) // split_length, 1)


@dataclass(frozen=True)
class _Outline:
    """A work list but for its items' ``VISIBLE`` and ``KV_END``.

    Parameters
    ----------
    items, merges, next_partial
        As of `make_items`; not to be written to.
    owner : array
        ``[num_items]``, the place of an item's sequence among those it was made of.
    begin, keys : array
        ``[num_items]``, the first key of an item's kv range, and the most it can hold.
    reach : array
        ``[num_items]``, keys from `begin` on that an item's last row sees, less ``VISIBLE``.
    """

    items: IntArray
    merges: IntArray
    next_partial: int
    owner: LongArray
    begin: LongArray
    keys: LongArray
    reach: LongArray


@lru_cache(_OUTLINES)
def _outline(
    sequences: bytes,
    q_starts: bytes,
    q_lens: bytes,
    num_ranges: bytes,
    shape: Shape,
    num_kv_heads: int,
    group_size: int,
    causal: bool,
    first_partial: int,
) -> _Outline:
    """Cut sequences, given as the bytes of int64 arrays, by kv range, kv head and row tile."""
    seq, q_start, q_len, ranges = (
        np.frombuffer(each, np.int64) for each in (sequences, q_starts, q_lens, num_ranges)
    )
    tiles = -(-(q_len * group_size) // shape.row_tile)
    # The heads of a block lie side by side: those of one kv range before the next range.
    of_range, kv_range = _expand(ranges)
    of_head, kv_head = _expand(np.full(len(of_range), num_kv_heads))
    of_tile, tile = _expand(tiles[of_range[of_head]])
    kv_head, kv_range = kv_head[of_tile], kv_range[of_head[of_tile]]
    owner = of_range[of_head[of_tile]]

    is_split = ranges > 1
    if 0 < shape.split_length < shape.max_seq_len:
        is_split |= q_len <= MAX_SPLIT_Q_LEN
    rows = np.where(is_split, ranges * q_len, 0)
    ends = first_partial + rows.cumsum()
    partial = np.where(is_split, ends - rows, -1)
    keys = np.where(is_split, shape.split_length, np.iinfo(np.int32).max)[owner]

    items = np.zeros((len(owner), ITEM_FIELDS), np.int32)
    items[:, Item.SEQ] = seq[owner]
    items[:, Item.KV_HEAD] = kv_head
    items[:, Item.Q_START] = q_start[owner]
    items[:, Item.ROW_BEGIN] = tile * shape.row_tile
    row_end = np.minimum((tile + 1) * shape.row_tile, (q_len * group_size)[owner])
    items[:, Item.ROW_END] = row_end
    begin = kv_range * keys
    items[:, Item.KV_BEGIN] = begin
    items[:, Item.PARTIAL] = partial[owner] + kv_range * q_len[owner]

    merged, token = _expand(np.where(is_split, q_len, 0))
    merges = np.zeros((len(merged), MERGE_FIELDS), np.int32)
    merges[:, Merge.OUT_ROW] = q_start[merged] + token
    merges[:, Merge.PARTIAL] = partial[merged] + token
    merges[:, Merge.COUNT] = ranges[merged]
    merges[:, Merge.STRIDE] = q_len[merged]
    for each in (items, merges):
        each.flags.writeable = False
    last_token = (row_end - 1) // group_size if causal else 0
    return _Outline(items, merges, int(ends[-1]), owner, begin, keys, last_token - begin)


def _expand(counts: LongArray) -> tuple[LongArray, LongArray]:
    """Return, for as many copies of each index as its count says: the index, and which copy."""
    index = np.arange(len(counts)).repeat(counts)
    return index, np.arange(len(index)) - (counts.cumsum() - counts)[index]


NO_MERGES = np.zeros((0, MERGE_FIELDS), np.int32)


def workers_on(num_units: int, choices: Mapping[str, int | str]) -> int:
    """Return the workers of a kernel on a device of so many units.

    A CPU's unit is a thread, and a worker too. A GPU's is a multiprocessor, and its workers are as
    many thread blocks as it has room for by their threads; their number leaves no trace in the
    bits and does not depend on the step, so that a captured launch serves other steps.

    Parameters
    ----------
    num_units : int
        Threads, or multiprocessors.
    choices : mapping
        The artifact's; a GPU's name the ``threads`` of a block.
    """
    threads = int(choices.get("threads", RESIDENT_THREADS))
    return num_units * max(1, RESIDENT_THREADS // threads)


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
