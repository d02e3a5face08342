"""Which sequences run in the next step, and how many tokens of each.

Oldest first, decode before prefill, under two limits: ``max_num_batched_tokens`` tokens per step
and ``max_num_seqs`` sequences with blocks. A prompt gets its blocks when it is admitted and is then
computed in as many chunks as the limit asks for. When the pool runs out, the newest sequence gives
its blocks back and waits in its old place in the line; later it is computed again.

What cannot happen: an endless loop. A sequence that would not fit in an empty pool is refused when
it is added, and the oldest one is only ever preempted by itself, when it is alone; so each step
with work to do computes at least one token.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from tvmpaged.runtime.errors import OutOfBlocksError
from tvmpaged.runtime.sequence import Sequence, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tvmpaged.runtime.block_manager import BlockManager


class Row(NamedTuple):
    """One sequence of a step: its next `num_new` uncomputed tokens run."""

    seq: Sequence
    num_new: int

    @property
    def reaches_end(self) -> bool:
        """True when the sequence has no uncomputed token after the step, so that logits count."""
        return self.num_new == self.seq.num_uncomputed


@dataclass
class Scheduler:
    """The line of waiting sequences and the ones that have blocks.

    Parameters
    ----------
    block_manager : BlockManager
        Where blocks come from.
    max_num_seqs, max_num_batched_tokens : int
        The limits of a step.
    """

    block_manager: BlockManager
    max_num_seqs: int
    max_num_batched_tokens: int

    def __post_init__(self) -> None:
        self.running: list[Sequence] = []  # both sorted by Sequence.order
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self.num_admitted_tokens = 0
        self.num_hit_tokens = 0  # those of them found in the prefix cache

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait for blocks."""
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=attrgetter("order"))

    @property
    def num_slots(self) -> int:
        """Places taken of max_num_seqs, those of siblings to come included."""
        return sum(seq.num_slots for seq in self.running)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child`, a copy of `parent`, on the parent's blocks, or else in the line."""
        whole = parent.num_in_blocks == parent.num_computed
        fits = self.num_slots + child.num_slots <= self.max_num_seqs
        if parent.status is Status.RUNNING and whole and fits:
            self.block_manager.fork(parent.seq_id, child.seq_id)
            child.status = Status.RUNNING
            insort(self.running, child, key=attrgetter("order"))
        else:
            child.num_in_blocks = child.num_computed = 0
            self.add(child)

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """Take sequences out and give their blocks back."""
        for seq in sequences:
            if seq.status is Status.RUNNING:
                self.block_manager.free(seq.seq_id)
                self.running.remove(seq)
            elif seq in self.waiting:
                self.waiting.remove(seq)
            seq.status = Status.FINISHED

    def schedule(self) -> list[Row]:
        """Choose the next step's rows; all of their tokens have blocks when it returns.

        Raises
        ------
        OutOfBlocksError
            When a sequence does not fit although nothing else holds blocks.
        """
        preemptions_before = self.num_preemptions
        rows = self._decode_rows()
        budget = self.max_num_batched_tokens - len(rows)
        budget -= self._prefill(self.running, rows, budget)
        if self.num_preemptions == preemptions_before:
            budget -= self._admit(rows, budget)
        while not rows and self.waiting:
            # Only sequences that wait for a sibling's logits hold blocks: beams of one prompt.
            self._make_way()
            self._admit(rows, budget)
        return rows

    def _decode_rows(self) -> list[Row]:
        rows: list[Row] = []
        for seq in self.running.copy():
            if len(rows) == self.max_num_batched_tokens:
                break
            decodes = seq.num_uncomputed == 1 and seq.status is Status.RUNNING
            if decodes and self._make_room(seq):
                rows.append(Row(seq, 1))
        return rows

    def _make_room(self, seq: Sequence) -> bool:
        """Give `seq` room for its new tokens; False when it was preempted for want of it."""
        new = seq.token_ids[seq.num_in_blocks :]
        while True:
            try:
                self.block_manager.append(seq.seq_id, new)
            except OutOfBlocksError:
                # Never one of the step's rows: those are older than `seq`.
                victim = self.running[-1]
                if victim is seq and len(self.running) == 1:
                    raise
                self._preempt(victim)
                if victim is seq:
                    return False
            else:
                seq.num_in_blocks = len(seq.token_ids)
                return True

    def _preempt(self, seq: Sequence) -> None:
        self.block_manager.free(seq.seq_id)
        self.running.remove(seq)
        self.num_preemptions += 1
        seq.request.metrics.num_preemptions += 1
        seq.num_in_blocks = 0
        computed, seq.num_computed = seq.num_computed, 0
        seq.status = Status.WAITING
        if computed < len(seq.token_ids):
            self.add(seq)
        # Otherwise its logits are known and it waits for its siblings, with nothing to compute.

    def _prefill(self, sequences: list[Sequence], rows: list[Row], budget: int) -> int:
        """Add chunks of admitted prompts; return how many tokens."""
        used = 0
        for seq in sequences:
            if used == budget:
                break
            if seq.num_uncomputed > 1:
                num_new = min(seq.num_uncomputed, budget - used)
                rows.append(Row(seq, num_new))
                used += num_new
        return used

    def _admit(self, rows: list[Row], budget: int) -> int:
        """Give waiting sequences blocks, first come first served; return how many tokens run."""
        used = 0
        num_seqs = self.num_slots
        while self.waiting and used < budget:
            seq = self.waiting[0]
            num_seqs += seq.num_slots
            if num_seqs > self.max_num_seqs or not self._allocate(seq):
                break
            self.waiting.pop(0)
            insort(self.running, seq, key=attrgetter("order"))
            num_new = min(seq.num_uncomputed, budget - used)
            rows.append(Row(seq, num_new))
            used += num_new
        return used

    def _allocate(self, seq: Sequence) -> bool:
        manager = self.block_manager
        try:
            num_cached = manager.allocate(seq.seq_id, seq.token_ids)
        except OutOfBlocksError:
            if not self.running:
                raise
            return False
        if manager.num_free_blocks < len(self.running):
            # The next steps of those that run would take the blocks away again.
            manager.free(seq.seq_id)
            return False
        seq.status = Status.RUNNING
        seq.num_in_blocks = len(seq.token_ids)
        seq.num_computed = num_cached
        self.num_admitted_tokens += len(seq.token_ids)
        self.num_hit_tokens += num_cached
        if not seq.request.metrics.num_preemptions:
            seq.request.num_cached_tokens = num_cached
        return True

    def _make_way(self) -> None:
        if self.running:
            self._preempt(self.running[-1])
