"""One step's lengths, checked once: everything later trusts them.

Vectorised: nothing loops over sequences or tokens in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmpaged.planning.indices import IntArray, LongArray, check_distinct_slots, index_array

#: New tokens of one step. Rows of a sequence, ``tokens x group_size``, are counted in int32.
MAX_STEP_TOKENS = 2**22


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
    starts = index_array("query_start_loc", query_start_loc, 1)
    lens = index_array("seq_lens", seq_lens, 1)
    table = index_array("block_table", block_table, 2)
    limit = np.iinfo(np.int32).max
    for name, values, most in (
        ("query_start_loc", starts, MAX_STEP_TOKENS),
        ("seq_lens", lens, limit - 1),
    ):
        if len(values) and not 0 <= values.min() <= values.max() <= most:
            bad = values[(values < 0) | (values > most)][0]
            raise ValueError(f"{name} must lie in 0..{most}; got {bad}")
    if len(starts) != len(lens) + 1 or starts[0] != 0:
        raise ValueError(
            f"query_start_loc must start at 0 and have one entry more than seq_lens has, "
            f"{len(lens) + 1}; got {len(starts)}" + (f" from {starts[0]}" if len(starts) else "")
        )
    q_lens = np.diff(starts)
    if (q_lens < 0).any():
        raise ValueError(f"query_start_loc must not fall; it does after entry {q_lens.argmin()}")
    if len(table) != len(lens):
        raise ValueError(
            f"block_table must have {len(lens)} rows, one per sequence; got {len(table)}"
        )
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
        check_distinct_slots("block_table", slots)
    return slots
