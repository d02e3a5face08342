"""Who holds which block of the KV cache: allocation, sharing, copy-on-write, prefix reuse.

Nothing here knows of tensors. One step of an engine runs in this order::

    allocate / append / fork / truncate / free    any number, in any order
    take_copies                                   the caller copies whole blocks, in any order
    (the step writes K/V, positions [num_committed, num_tokens) of its sequences)
    commit

A sequence of 10 tokens with block_size 4, of which 7 are committed::

    positions    0 1 2 3 | 4 5 6 7 | 8 9 . .
    committed    [                )                 K/V are in the cache
    uncommitted                  [        )         K/V come with the next step
    blocks          b0   |    b1   |    b2
    may be shared   yes  |    no   |    no          a block that a step writes has one holder
    prefix index    yes  |    no   |    no          committed and full blocks only

Every block is in exactly one place, so free + used = num_blocks at all times::

    used         ref_count >= 1    in that many block tables
    evictable    ref_count == 0    in the prefix index; a hit revives it, a shortage evicts it
    free         ref_count == 0    holds nothing of use

Why a pending copy may outlive its source: K/V are written by steps alone, and every step runs the
pending copies first. Until they run, the source's bytes stay what they were when the copy was
queued, even if the source is freed and handed to another sequence meanwhile. The one exception
would be a source that becomes a destination; `_take_destination` rules it out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from tvmpaged.runtime.errors import (
    IntegrityError,
    OutOfBlocksError,
    check_hashable,
    checked_int,
    checked_token_ids,
)
from tvmpaged.runtime.prefix_cache import Prefix, PrefixCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator


@dataclass(slots=True, eq=False)
class _Sequence:
    """The books of one sequence; `prefixes` names its committed, full blocks in order."""

    token_ids: list[int]
    num_committed: int = 0
    blocks: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)


class _Copy(NamedTuple):
    """A pending copy: where the bytes are, and the destination's place in its block tables."""

    source: int
    place: int


class _Match(NamedTuple):
    """What a prompt finds: blocks to share, a block to copy, free blocks that it needs."""

    hits: list[tuple[Prefix, int]]
    copied: int | None
    num_cached: int
    num_needed: int


class BlockManager:
    """Hand out the blocks of a KV cache to sequences, share them, and say what to copy.

    Every operation costs O(tokens and blocks it touches), never O(num_blocks).

    Parameters
    ----------
    num_blocks : int
        Blocks in the cache, at least 1. No block is reserved.
    block_size : int
        Tokens per block, at least 1.
    enable_prefix_caching : bool
        Keep committed, full blocks for prompts that start with the same tokens. When False
        nothing is hashed.

    Attributes
    ----------
    num_blocks, block_size, enable_prefix_caching
        As given.
    num_shared_blocks : int
        Blocks with ref_count above 1, now.
    num_copied_blocks : int
        Copies handed over by `take_copies`, in total.
    num_prompt_tokens, num_hit_tokens : int
        Tokens passed to `allocate`, and those of them found in the cache, in total.

    Raises
    ------
    TypeError, ValueError
        Here and in every method: an argument is of the wrong kind, out of range, or names a
        sequence that is not (or already) there. The call has changed nothing.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = checked_int("num_blocks", num_blocks, 1)
        self.block_size = checked_int("block_size", block_size, 1)
        self.enable_prefix_caching = bool(enable_prefix_caching)
        self.num_shared_blocks = 0
        self.num_copied_blocks = 0
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0
        self._sequences: dict[Hashable, _Sequence] = {}
        self._cache = PrefixCache(self.block_size)  # stays empty when caching is off
        self._ref_counts = [0] * self.num_blocks
        # Both in the order in which blocks are handed out: longest free, least recently used.
        self._free = OrderedDict.fromkeys(range(self.num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._copies: dict[int, _Copy] = {}  # by destination
        self._num_reads: Counter[int] = Counter()  # pending copies by source

    @property
    def num_free_blocks(self) -> int:
        """Blocks obtainable now, the evictable cached ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used_blocks(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that still hold a reusable prefix."""
        return len(self._evictable)

    def block_table(self, seq_id: Hashable) -> list[int]:
        """Return a fresh list of the sequence's block ids, in order of position.

        Read it when the step is planned: `append`, `truncate`, and a copy made while every free
        block is the source of another one, may change it.
        """
        return list(self._find(seq_id).blocks)

    def num_tokens(self, seq_id: Hashable) -> int:
        """Return the sequence's length in tokens, the uncommitted ones included."""
        return len(self._find(seq_id).token_ids)

    def num_committed_tokens(self, seq_id: Hashable) -> int:
        """Return how many tokens have K/V in the cache: the first position the next step writes."""
        return self._find(seq_id).num_committed

    def can_allocate(self, token_ids: Iterable[int]) -> bool:
        """Tell whether `allocate` would find enough free blocks for this prompt."""
        match = self._match(checked_token_ids("token_ids", token_ids, least=1))
        return match.num_needed <= self.num_free_blocks

    def can_append(self, seq_id: Hashable, num_tokens: int = 1) -> bool:
        """Tell whether `append` would find enough free blocks for this many tokens."""
        count = checked_int("num_tokens", num_tokens, 0)
        return self._num_needed(self._find(seq_id), count) <= self.num_free_blocks

    def allocate(self, seq_id: Hashable, token_ids: Iterable[int]) -> int:
        """Start a sequence: give it blocks for its prompt, shared ones where the prefix is cached.

        At least the last token is left to compute. If all of a prompt is cached, its last block
        comes as a pending copy, because the step writes that token's slot.

        Parameters
        ----------
        seq_id : hashable
            A new name.
        token_ids : iterable of int
            The prompt, at least one token.

        Returns
        -------
        int
            num_cached: the tokens whose K/V need no computing, at most len(token_ids) - 1.

        Raises
        ------
        OutOfBlocksError
            Too few free blocks. Nothing has changed.
        """
        self._check_new("seq_id", seq_id)
        seq = _Sequence(checked_token_ids("token_ids", token_ids, least=1))
        match = self._match(seq.token_ids)
        self._check_room("allocate", seq_id, match.num_needed)
        for prefix, block_id in match.hits:
            self._hold(block_id)
            seq.blocks.append(block_id)
            seq.prefixes.append(prefix)
        if match.copied is not None:
            if match.copied in self._evictable:
                self._evictable.move_to_end(match.copied)  # read just now: the last to be evicted
            seq.blocks.append(self._take_copy_of(match.copied, len(seq.blocks)))
        self._grow(seq)
        seq.num_committed = match.num_cached
        self._sequences[seq_id] = seq
        self.num_prompt_tokens += len(seq.token_ids)
        self.num_hit_tokens += match.num_cached
        return match.num_cached

    def append(self, seq_id: Hashable, token_ids: Iterable[int]) -> None:
        """Make room for new tokens; a partly filled block that others hold too is copied first.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        token_ids : iterable of int
            Tokens at positions [num_tokens, num_tokens + len(token_ids)); none is legal.

        Raises
        ------
        OutOfBlocksError
            Too few free blocks. Nothing has changed.
        """
        seq = self._find(seq_id)
        new = checked_token_ids("token_ids", token_ids)
        self._check_room("append", seq_id, self._num_needed(seq, len(new)))
        if new and len(seq.token_ids) % self.block_size:
            last = seq.blocks[-1]
            if self._ref_counts[last] > 1:
                seq.blocks[-1] = self._take_copy_of(last, len(seq.blocks) - 1)
                self._release(last)
            else:
                self._cache.drop(last)  # a truncation left it partly filled; no stale prefix stays
        seq.token_ids += new
        self._grow(seq)

    def pending_copies(self) -> list[tuple[int, int]]:
        """Return what `take_copies` would hand over; they stay pending.

        Who runs them first and takes them afterwards loses none to an interrupt in between: until
        a step writes K/V, copies may run twice.
        """
        return [(copy.source, destination) for destination, copy in self._copies.items()]

    def take_copies(self) -> list[tuple[int, int]]:
        """Hand over the pending copies, each once; run them before the step writes K/V.

        Returns
        -------
        list of (int, int)
            (source, destination) block ids. No destination occurs twice or is also a source, so
            the copies may run in any order, or all at once.
        """
        copies = self.pending_copies()
        self.num_copied_blocks += len(copies)
        self._copies, self._num_reads = {}, Counter()
        return copies

    def commit(self, seq_id: Hashable, num_tokens: int | None = None) -> None:
        """Record that the step's K/V are in the cache; full blocks enter the prefix index.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        num_tokens : int, optional
            Positions [0, num_tokens) have their K/V; all tokens if not given. A prompt that is
            computed in chunks is committed chunk by chunk.

        Raises
        ------
        ValueError
            Also when a block that the step wrote still waits for `take_copies`: the copy ought to
            have run first.
        """
        seq = self._find(seq_id)
        length, start = len(seq.token_ids), seq.num_committed
        end = length if num_tokens is None else num_tokens
        end = checked_int("num_tokens", end, start, length)
        if end == start:
            return
        size = self.block_size
        for block_id in seq.blocks[start // size : self._num_blocks_for(end)]:
            if block_id in self._copies or block_id in self._num_reads:
                raise ValueError(
                    f"seq_id={seq_id!r} cannot be committed while a copy of its block {block_id} "
                    "is pending; call take_copies() and run the copies before the step"
                )
        seq.num_committed = end
        if self.enable_prefix_caching:
            for place in range(len(seq.prefixes), end // size):
                parent = seq.prefixes[-1] if seq.prefixes else None
                prefix = Prefix.extend(parent, seq.token_ids[place * size : (place + 1) * size])
                seq.prefixes.append(self._cache.add(prefix, seq.blocks[place]))

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Start a sequence with all of the parent's tokens, sharing all of its blocks.

        Parameters
        ----------
        parent_id : hashable
            A sequence whose tokens are all committed; what a step has yet to write is not shared.
        child_id : hashable
            A new name.
        """
        parent = self._find(parent_id, "parent_id")
        self._check_new("child_id", child_id)
        uncommitted = len(parent.token_ids) - parent.num_committed
        if uncommitted:
            raise ValueError(
                f"parent_id={parent_id!r} has {uncommitted} uncommitted tokens; "
                "only a sequence without any can be forked: commit it first"
            )
        for block_id in parent.blocks:
            self._hold(block_id)
        self._sequences[child_id] = _Sequence(
            parent.token_ids.copy(),
            parent.num_committed,
            parent.blocks.copy(),
            parent.prefixes.copy(),
        )

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """Drop tokens from the end, committed or not, and the blocks that only they needed.

        Parameters
        ----------
        seq_id : hashable
            The sequence.
        num_tokens : int
            Tokens to keep, from 0 to the sequence's length.
        """
        seq = self._find(seq_id)
        kept = checked_int("num_tokens", num_tokens, 0, len(seq.token_ids))
        del seq.token_ids[kept:]
        del seq.prefixes[kept // self.block_size :]
        seq.num_committed = min(seq.num_committed, kept)
        num_blocks = self._num_blocks_for(kept)
        self._release_all(seq.blocks[num_blocks:])
        del seq.blocks[num_blocks:]

    def free(self, seq_id: Hashable) -> None:
        """End a sequence. Blocks that nobody else holds are free; indexed ones stay reusable."""
        blocks = self._find(seq_id).blocks
        del self._sequences[seq_id]
        self._release_all(blocks)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_needed(self, seq: _Sequence, num_new: int) -> int:
        """Free blocks an append takes: those past the end, and a copy if it writes a shared one."""
        length = len(seq.token_ids)
        partly_filled = num_new > 0 and length % self.block_size > 0
        num_copies = partly_filled and self._ref_counts[seq.blocks[-1]] > 1
        return self._num_blocks_for(length + num_new) - len(seq.blocks) + num_copies

    def _match(self, token_ids: list[int]) -> _Match:
        """Look a prompt up; it always keeps at least its last token to compute."""
        hits = self._cache.match(token_ids) if self.enable_prefix_caching else []
        num_cached = min(len(hits) * self.block_size, len(token_ids) - 1)
        num_shared, tail = divmod(num_cached, self.block_size)
        # All cached: the last block is written, so it cannot be shared. With block_size 1 it
        # holds the uncomputed token alone and there is nothing to copy.
        copied = hits[num_shared][1] if tail else None
        del hits[num_shared:]
        revived = sum(self._ref_counts[block_id] == 0 for _, block_id in hits)
        num_needed = self._num_blocks_for(len(token_ids)) - num_shared + revived
        return _Match(hits, copied, num_cached, num_needed)

    def _grow(self, seq: _Sequence) -> None:
        """Add free blocks until every token has its slot."""
        while len(seq.blocks) * self.block_size < len(seq.token_ids):
            seq.blocks.append(self._take(next(self._obtainable())))

    def _obtainable(self) -> Iterator[int]:
        return chain(self._free, self._evictable)

    def _take(self, block_id: int) -> int:
        """Make a free block a used one with one holder; what it was cached as is forgotten."""
        if block_id in self._evictable:
            self._cache.drop(block_id)
            del self._evictable[block_id]
        else:
            del self._free[block_id]
        self._ref_counts[block_id] = 1
        return block_id

    def _hold(self, block_id: int) -> None:
        """Add a holder to a used block, or revive an evictable one."""
        self._ref_counts[block_id] += 1
        if self._ref_counts[block_id] == 1:
            del self._evictable[block_id]
        elif self._ref_counts[block_id] == 2:
            self.num_shared_blocks += 1

    def _release(self, block_id: int) -> None:
        """Remove a holder; the last one's leaving frees the block and cancels a copy into it."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 1:
            self.num_shared_blocks -= 1
        elif self._ref_counts[block_id] == 0:
            if block_id in self._copies:
                self._cancel_copy(block_id)
            (self._evictable if block_id in self._cache else self._free)[block_id] = None

    def _release_all(self, blocks: list[int]) -> None:
        """Release tails before heads: a head without its tail is of use, not so the reverse."""
        for block_id in reversed(blocks):
            self._release(block_id)

    def _take_copy_of(self, source: int, place: int) -> int:
        """Take a block that will hold the bytes of `source`, at `place` in a block table."""
        if source in self._copies:  # not there yet itself: read where it is copied from
            source = self._copies[source].source
        destination = self._take_destination(source)
        if destination != source:
            self._copies[destination] = _Copy(source, place)
            self._num_reads[source] += 1
        return destination

    def _cancel_copy(self, destination: int) -> _Copy:
        copy = self._copies.pop(destination)
        self._num_reads[copy.source] -= 1
        if not self._num_reads[copy.source]:
            del self._num_reads[copy.source]
        return copy

    def _take_destination(self, source: int) -> int:
        """Take a free block that no pending copy reads, so that copies may run in any order."""
        for block_id in self._obtainable():
            # The source itself, if it is free, holds the bytes already: no copy at all.
            if block_id == source or block_id not in self._num_reads:
                return self._take(block_id)
        # Every free block is the source of a pending copy. Its bytes are what that copy's
        # destination waits for, so the two change places and the destination comes free:
        #     pending  free -> other          other's holders take over `free`
        #     wanted   source -> free         pending: source -> other
        free = next(self._obtainable())
        other = next(d for d, copy in self._copies.items() if copy.source == free)
        place = self._cancel_copy(other).place
        self._take(free)
        self._ref_counts[free] = self._ref_counts[other]
        self._ref_counts[other] = 1
        for seq in self._sequences.values():
            if seq.blocks[place : place + 1] == [other]:
                seq.blocks[place] = free
        return other

    def _find(self, seq_id: Hashable, name: str = "seq_id") -> _Sequence:
        check_hashable(name, seq_id)
        if seq_id not in self._sequences:
            raise ValueError(f"{name}={seq_id!r} is unknown: never allocated, or already freed")
        return self._sequences[seq_id]

    def _check_new(self, name: str, seq_id: Hashable) -> None:
        check_hashable(name, seq_id)
        if seq_id in self._sequences:
            raise ValueError(f"{name}={seq_id!r} is in use; free it or choose a new name")

    def _check_room(self, verb: str, seq_id: Hashable, num_needed: int) -> None:
        if num_needed > self.num_free_blocks:
            raise OutOfBlocksError(
                f"{verb}(seq_id={seq_id!r}) needs {num_needed} free blocks, "
                f"{self.num_free_blocks} of {self.num_blocks} are free"
            )

    def check_integrity(self) -> None:
        """Recount every block from the block tables; O(num_blocks + tokens), for tests.

        Raises
        ------
        IntegrityError
            (an AssertionError) naming the block or sequence whose books are wrong.
        """
        holders: Counter[int] = Counter()
        for seq_id, seq in self._sequences.items():
            self._check_sequence(seq_id, seq)
            holders.update(seq.blocks)
        for block_id in range(self.num_blocks):
            self._check_block(block_id, holders[block_id])
        shared = sum(count > 1 for count in holders.values())
        _require(shared == self.num_shared_blocks, f"{shared} blocks are shared, not as counted")
        reads = Counter(copy.source for copy in self._copies.values())
        _require(reads == self._num_reads, f"pending copies read {reads}, not as counted")
        for destination, copy in self._copies.items():
            told = f"pending copy {copy.source} -> {destination}"
            _require(destination not in reads, f"{told}: its destination is a source")
            for seq in self._sequences.values():
                if destination in seq.blocks:
                    place = seq.blocks.index(destination)
                    _require(place == copy.place, f"{told}: at {place}, not {copy.place}")
        self._cache.check_integrity()

    def _check_sequence(self, seq_id: Hashable, seq: _Sequence) -> None:
        told = f"sequence {seq_id!r}"
        length, size = len(seq.token_ids), self.block_size
        _require(0 <= seq.num_committed <= length, f"{told}: committed past its end")
        _require(len(seq.blocks) == self._num_blocks_for(length), f"{told}: blocks do not fit")
        _require(len(set(seq.blocks)) == len(seq.blocks), f"{told}: holds a block twice")
        num_prefixes = seq.num_committed // size if self.enable_prefix_caching else 0
        _require(len(seq.prefixes) == num_prefixes, f"{told}: prefixes do not fit")
        for index, block_id in enumerate(seq.blocks):
            start, end = index * size, min((index + 1) * size, length)
            if end > seq.num_committed:
                _require(block_id not in self._cache, f"block {block_id}: indexed, uncommitted")
            parent = seq.prefixes[index - 1] if 0 < index <= num_prefixes else None
            self._cache.check_block(block_id, parent, seq.token_ids[start:end])

    def _check_block(self, block_id: int, num_holders: int) -> None:
        told = f"block {block_id}"
        count = self._ref_counts[block_id]
        _require(count == num_holders, f"{told}: ref_count {count}, {num_holders} holders")
        cached = block_id in self._cache
        free, evictable = block_id in self._free, block_id in self._evictable
        _require(free == (count == 0 and not cached), f"{told}: wrongly (not) in the free list")
        _require(evictable == (count == 0 and cached), f"{told}: wrongly (not) evictable")
        _require(count > 0 or block_id not in self._copies, f"{told}: free, a copy is pending")


def _require(condition: bool, message: str) -> None:
    """Assert, also under ``python -O``."""
    if not condition:
        raise IntegrityError(message)
