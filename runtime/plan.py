"""One step's work list, made from the step's lengths alone: no tensor of K or V is touched here.

All of it is vectorised; nothing loops over sequences, heads or splits in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvmpaged.worklist import ITEM_FIELDS, MAX_SPLIT_Q_LEN, MERGE_FIELDS, Item, Merge

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

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


@dataclass(frozen=True)
class Step:
    """A step's checked inputs, as contiguous copies, and what follows from them.

    ``positions`` and ``slot_mapping`` are per new token; ``max_block_id`` and ``max_slot`` are the
    largest used, for `run` and `append_kv` to compare with a cache's shape.
    """

    query_start_loc: LongArray
    seq_lens: LongArray
    block_table: IntArray
    slot_mapping: LongArray
    max_block_id: int
    max_slot: int

    @property
    def q_lens(self) -> LongArray:
        """New tokens of each sequence, ``[num_seqs]``."""
        return np.diff(self.query_start_loc)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return int(self.query_start_loc[-1])


def check_step(query_start_loc: Any, seq_lens: Any, block_table: Any, block_size: int) -> Step:
    """Check a step's lengths and block ids once, and derive its slots.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, the sequence and what is wrong.
    """
    starts = _index_array("query_start_loc", query_start_loc, 1)
    lens = _index_array("seq_lens", seq_lens, 1)
    table = _index_array("block_table", block_table, 2)
    if len(starts) != len(lens) + 1 or starts[0] != 0:
        raise ValueError(
            f"query_start_loc must have num_seqs + 1 = {len(lens) + 1} entries and start at 0; "
            f"got {len(starts)} entries" + (f" starting at {starts[0]}" if len(starts) else "")
        )
    q_lens = np.diff(starts)
    if (q_lens < 0).any():
        raise ValueError(f"query_start_loc must not fall; it does after entry {q_lens.argmin()}")
    if len(table) != len(lens):
        raise ValueError(
            f"block_table must have {len(lens)} rows, one per sequence; got {len(table)}"
        )
    limit = np.iinfo(np.int32).max
    if len(lens) and (lens.min() < 0 or lens.max() >= limit or starts[-1] >= limit):
        raise ValueError(f"seq_lens and query_start_loc must lie in 0..{limit - 1}")
    needed = -(-lens // block_size)
    if len(lens) and needed.max() > table.shape[1]:
        seq = int(needed.argmax())
        raise ValueError(
            f"seq_lens[{seq}]={lens[seq]} needs {needed[seq]} blocks of {block_size}; block_table "
            f"has {table.shape[1]} columns"
        )
    used = np.arange(table.shape[1]) < needed[:, None]
    bad = used & ((table < 0) | (table >= limit))
    if bad.any():
        seq, column = (int(x[0]) for x in np.nonzero(bad))
        raise ValueError(
            f"block_table[{seq}, {column}]={table[seq, column]} is no block id, but "
            f"seq_lens[{seq}]={lens[seq]} reaches into that block"
        )
    slots = _slot_mapping(starts, lens, table, block_size)
    return Step(
        query_start_loc=starts,
        seq_lens=lens,
        block_table=np.where(used, table, 0).astype(np.int32),
        slot_mapping=slots,
        max_block_id=int(table[used].max(initial=-1)),
        max_slot=int(slots.max(initial=-1)),
    )


def _index_array(name: str, value: Any, ndim: int) -> LongArray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.size == 0 and array.dtype.kind == "f":  # an empty list has no dtype of its own
        array = array.astype(np.int64)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise TypeError(f"{name} must be int32 or int64; got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s); got shape {array.shape}")
    return array.astype(np.int64)


def _slot_mapping(
    starts: LongArray, lens: LongArray, table: LongArray, block_size: int
) -> LongArray:
    """Return each new token's slot; -1 for a token before position 0 (seq_len < q_len)."""
    q_lens = np.diff(starts)
    seq = np.repeat(np.arange(len(lens)), q_lens)
    position = np.arange(starts[-1]) - starts[:-1][seq] + (lens - q_lens)[seq]
    exists = position >= 0
    safe = np.where(exists, position, 0)
    slots = np.full(len(seq), -1, np.int64)
    if exists.any():
        blocks = table[seq[exists], safe[exists] // block_size]
        slots[exists] = blocks * block_size + safe[exists] % block_size
        check_distinct_slots(slots)
    return slots


def check_distinct_slots(slots: LongArray) -> None:
    """Refuse a slot mapping that writes one slot twice (the result would depend on a race)."""
    taken = np.sort(slots[slots >= 0])
    twice = taken[1:][taken[1:] == taken[:-1]]
    if len(twice):
        raise ValueError(f"slot_mapping writes slot {int(twice[0])} more than once")


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
    rows = items[:, Item.ROW_END] - items[:, Item.ROW_BEGIN]
    keys = items[:, Item.KV_END].astype(np.int64) - items[:, Item.KV_BEGIN]
    done = np.cumsum((keys + ITEM_OVERHEAD_KEYS) * np.maximum(rows, 1))
    shares = np.arange(1, num_workers) * (done[-1] if len(done) else 0) / num_workers
    # An item belongs to the worker in whose share its middle lies.
    middle = done - np.diff(done, prepend=0) / 2
    cuts = np.searchsorted(middle, shares)
    return WorkList(items, np.concatenate([[0], cuts, [len(items)]]).astype(np.int32))
