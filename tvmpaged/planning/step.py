"""One step's lengths, checked once: everything later trusts them.

Vectorised: nothing loops over sequences or tokens in Python. A plan is made between layers that
have emptied the caches of all that it needs, so what costs is how much code and memory it touches:
few array operations, the same ones again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmpaged.planning.indices import (
    IntArray,
    LongArray,
    check_distinct_slots,
    greatest,
    index_array,
)

#: New tokens of one step. Rows of a sequence, ``tokens x group_size``, are counted in int32.
MAX_STEP_TOKENS = 2**22

#: One less than the most that int32 holds, so that a length and one more fit.
MAX_SEQ_LEN = MAX_BLOCK_ID = 2**31 - 2


@dataclass(frozen=True)
class Step:
    """A step's checked inputs, as contiguous copies, and what follows from them.

    ``q_lens`` is the number of each sequence's new tokens, ``slot_mapping`` is per new token;
    ``max_block_id`` and ``max_slot`` are the largest used, for `run` and `append_kv` to compare
    with a cache's shape.
    """

    query_start_loc: LongArray
    seq_lens: LongArray
    q_lens: LongArray
    block_table: IntArray
    slot_mapping: LongArray
    max_block_id: int
    max_slot: int

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return len(self.slot_mapping)


def check_step(query_start_loc: Any, seq_lens: Any, block_table: Any, block_size: int) -> Step:
    """Check a step's lengths and block ids once, and derive its slots.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, the sequence and what is wrong.
    """
    starts = index_array("query_start_loc", query_start_loc, 1).astype(np.int64)
    lens = index_array("seq_lens", seq_lens, 1).astype(np.int64)
    given = index_array("block_table", block_table, 2)
    q_lens = starts[1:] - starts[:-1]
    max_seq_len = greatest(lens)
    if (
        len(starts) != len(lens) + 1
        or starts[0] != 0
        or starts[-1] > MAX_STEP_TOKENS
        or greatest(q_lens) > MAX_STEP_TOKENS  # or negative
        or max_seq_len > MAX_SEQ_LEN
    ):
        _refuse_lengths(starts, lens)
    table, max_block_id = _block_table(given, lens, max_seq_len, block_size)
    slots, max_slot = _slot_mapping(starts, lens, q_lens, table, block_size)
    return Step(starts, lens, q_lens, table, slots, max_block_id, max_slot)


def _refuse_lengths(starts: LongArray, lens: LongArray) -> None:
    """Say what is wrong with lengths of which something is."""
    for name, values, most in (
        ("query_start_loc", starts, MAX_STEP_TOKENS),
        ("seq_lens", lens, MAX_SEQ_LEN),
    ):
        bad = values[(values < 0) | (values > most)]
        if len(bad):
            raise ValueError(f"{name} must lie in 0..{most}; got {bad[0]}")
    if len(starts) != len(lens) + 1 or starts[0] != 0:
        raise ValueError(
            f"query_start_loc must start at 0 and have one entry more than seq_lens has, "
            f"{len(lens) + 1}; got {len(starts)}" + (f" from {starts[0]}" if len(starts) else "")
        )
    after = int((starts[1:] - starts[:-1]).argmin())
    raise ValueError(f"query_start_loc must not fall; it does after entry {after}")


def _block_table(
    given: np.ndarray[Any, Any], lens: LongArray, max_seq_len: int, block_size: int
) -> tuple[IntArray, int]:
    """Return a copy with 0 in place of what no length reaches, and the largest id reached."""
    if len(given) != len(lens):
        raise ValueError(
            f"block_table must have {len(lens)} rows, one per sequence; got {len(given)}"
        )
    needed = (lens + (block_size - 1)) // block_size
    if max_seq_len > given.shape[1] * block_size:
        seq = int(needed.argmax())
        raise ValueError(
            f"seq_lens[{seq}]={lens[seq]} needs {needed[seq]} blocks of {block_size}; block_table "
            f"has {given.shape[1]} columns"
        )
    table = np.where(np.arange(given.shape[1]) < needed[:, None], given, 0)
    max_block_id = greatest(table)
    if max_block_id > MAX_BLOCK_ID:
        seq, column = (int(x[0]) for x in np.nonzero((table < 0) | (table > MAX_BLOCK_ID)))
        raise ValueError(
            f"block_table[{seq}, {column}]={table[seq, column]} is no block id, but "
            f"seq_lens[{seq}]={lens[seq]} reaches into that block"
        )
    return table.astype(np.int32, copy=False), max_block_id if max_seq_len > 0 else -1


def _slot_mapping(
    starts: LongArray, lens: LongArray, q_lens: LongArray, table: IntArray, block_size: int
) -> tuple[LongArray, int]:
    """Return each new token's slot, and the largest.

    -1 for a token before position 0 (seq_len < q_len).
    """
    # Places count on from sequence to sequence, as if their rows of the table were one:
    #     seq 0: [0, columns * block_size)    seq 1: [columns * block_size, 2 * ...)    ...
    first = np.arange(len(lens)) * (table.shape[1] * block_size)
    place = np.arange(starts[-1]) + (first + lens - starts[1:]).repeat(q_lens)

    def slots_at(place: LongArray) -> LongArray:
        cell = place // block_size
        return (table.take(cell) - cell) * block_size + place

    if greatest(lens - q_lens) <= MAX_SEQ_LEN:
        slots = slots_at(place)
    else:
        exists = place >= first.repeat(q_lens)
        slots = np.full(len(place), -1)
        slots[exists] = slots_at(place[exists])
    return slots, check_distinct_slots("block_table", slots)
