"""The block manager under any mix of operations, against a model that keeps what blocks contain.

The model is a dictionary of blocks, each a list of cells. K/V at a position depend on every token
up to it, so a cell holds that whole tuple of tokens: a cell from another sequence, another
position or another past is never mistaken for the right one. The model knows the manager through
its public face alone, and learns of pending copies by asking a deep copy of it for them.

Two drivers share it: Hypothesis, which shrinks what it finds, and plain random walks, whose
weights keep the pool short of blocks and full of shared ones.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tvmpaged.runtime import prefix_cache
from tvmpaged.runtime.block_manager import BlockManager
from tvmpaged.runtime.errors import OutOfBlocksError

pytestmark = pytest.mark.runtime

Cells = dict[int, list[tuple[int, ...] | None]]

MOST_SEQUENCES = 5  # with more, every pool is full and nothing happens
TOKEN = st.integers(0, 1)  # two token ids, so that prefixes meet often
PICK = st.integers(0, 59)  # modulo the number of sequences, each is as likely


def weak_digest(_: bytes, token_ids: list[int]) -> bytes:
    return bytes([sum(token_ids) % 3])


def after_copies(cells: Cells, copies: list[tuple[int, int]]) -> Cells:
    """Run all copies at once, as a parallel kernel may: every source is read before any write."""
    result = {block: list(content) for block, content in cells.items()}
    for source, destination in copies:
        result[destination] = list(cells[source])
    return result


@dataclass
class Known:
    """What the model knows of one sequence: 0 <= num_committed <= num_written <= length."""

    token_ids: list[int]
    num_committed: int
    num_written: int


class Model:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.bm = BlockManager(num_blocks, block_size, enable_prefix_caching)
        self.size = block_size
        self.cells: Cells = {block: [None] * block_size for block in range(num_blocks)}
        self.known: dict[int, Known] = {}
        self.tables: dict[int, list[int]] = {}
        self.pending: list[tuple[int, int]] = []
        self.next_id = 0

    # -- what the model can tell by itself -------------------------------------------------------

    def pick(self, number: int) -> int:
        return sorted(self.known)[number % len(self.known)]

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def num_blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def holders(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)

    def num_free(self) -> int:
        return len(self.cells) - len(self.holders())

    def most_shared(self, prompt: list[int]) -> int:
        """Count the full blocks that the prompt could share with live sequences at best."""
        used = [self.cells[block] for block in self.holders()]
        for count in range(len(prompt) // self.size):
            ends = range(count * self.size + 1, (count + 1) * self.size + 1)
            if [tuple(prompt[:end]) for end in ends] not in used:
                return count
        return len(prompt) // self.size

    # -- operations ------------------------------------------------------------------------------

    def allocate(self, prompt: list[int]) -> None:
        seq_id, num_needed = self.new_id(), self.num_blocks_for(len(prompt))
        num_free, cached_before = self.num_free(), self.bm.num_cached_blocks
        can = self.bm.can_allocate(prompt)
        try:
            num_cached = self.bm.allocate(seq_id, prompt)
        except OutOfBlocksError:
            assert not can
            assert num_needed > num_free
            assert self.bm.num_cached_blocks == cached_before
            self.check(unchanged=True)
            return
        assert can
        assert num_needed - self.most_shared(prompt) <= num_free
        assert 0 <= num_cached < len(prompt)
        assert num_cached % self.size == 0 or num_cached == len(prompt) - 1
        assert self.bm.enable_prefix_caching or num_cached == 0
        self.known[seq_id] = Known(list(prompt), num_cached, num_cached)
        self.check(seq_id)

    def append(self, seq_id: int, new: list[int]) -> None:
        known, table, holders = self.known[seq_id], self.tables[seq_id], self.holders()
        length = len(known.token_ids)
        copied = bool(new) and length % self.size > 0 and holders[table[-1]] > 1
        num_needed = self.num_blocks_for(length + len(new)) - len(table) + copied
        num_free, num_pending = self.num_free(), len(self.pending)
        assert self.bm.can_append(seq_id, len(new)) == (num_needed <= num_free)
        try:
            self.bm.append(seq_id, new)
        except OutOfBlocksError:
            assert num_needed > num_free
            self.check(unchanged=True)
            return
        assert num_needed <= num_free
        known.token_ids += new
        self.check(seq_id)
        assert copied or len(self.pending) == num_pending
        kept = len(table) - copied
        assert self.tables[seq_id][:kept] == table[:kept]

    def fork(self, parent_id: int) -> int:
        child_id, parent = self.new_id(), self.known[parent_id]
        if parent.num_committed < len(parent.token_ids):
            with pytest.raises(ValueError, match="uncommitted"):
                self.bm.fork(parent_id, child_id)
            self.check(unchanged=True)
            return parent_id
        self.bm.fork(parent_id, child_id)
        self.known[child_id] = Known(
            list(parent.token_ids), parent.num_committed, parent.num_written
        )
        self.check(child_id)
        assert self.tables[child_id] == self.tables[parent_id]
        return child_id

    def branch(self, parent_id: int, new: list[int], keep: bool) -> None:
        """As samples do (the parent stays) and beams (it is freed before its block is copied)."""
        parent = self.known[parent_id]
        if parent.num_committed < len(parent.token_ids):
            self.step(dict.fromkeys(self.known, 99))
        self.append(self.fork(parent_id), new)
        if not keep:
            self.free(parent_id)

    def fork_after_withdrawing(self, parent_id: int, new: list[int]) -> None:
        """Append and take it back, as a rejected draft does; a copy it asked for stays pending."""
        length = self.known[parent_id].num_committed
        self.truncate(parent_id, length)
        self.append(parent_id, new)
        self.truncate(parent_id, length)
        self.append(self.fork(parent_id), new)

    def truncate(self, seq_id: int, kept: int) -> None:
        known, table = self.known[seq_id], self.tables[seq_id]
        self.bm.truncate(seq_id, kept)
        del known.token_ids[kept:]
        known.num_committed = min(known.num_committed, kept)
        known.num_written = min(known.num_written, kept)
        self.check(seq_id)
        assert self.tables[seq_id] == table[: self.num_blocks_for(kept)]

    def free(self, seq_id: int) -> None:
        self.bm.free(seq_id)
        del self.known[seq_id]
        with pytest.raises(ValueError, match="unknown"):
            self.bm.free(seq_id)
        self.check()

    def step(self, chunks: dict[int, int], commit_now: bool = True) -> None:
        """Copy, then write up to chunks[seq_id] tokens of each sequence, then commit them."""
        num_copied = self.bm.num_copied_blocks
        copies = self.bm.take_copies()
        assert copies == self.pending
        assert self.bm.num_copied_blocks == num_copied + len(copies)
        self.cells = after_copies(self.cells, copies)
        holders = self.holders()
        for seq_id, chunk in chunks.items():
            known = self.known[seq_id]
            end = min(len(known.token_ids), known.num_committed + chunk)
            for position in range(known.num_committed, end):
                block = self.tables[seq_id][position // self.size]
                assert holders[block] == 1
                past = tuple(known.token_ids[: position + 1])
                self.cells[block][position % self.size] = past
            known.num_written = max(known.num_written, end)
        self.check()
        assert self.pending == []
        for seq_id in chunks if commit_now else ():
            self.commit(seq_id)

    def commit(self, seq_id: int) -> None:
        """Commit what was written, maybe after other sequences have gone on to the next step."""
        known = self.known[seq_id]
        whole = known.num_written == len(known.token_ids)
        self.bm.commit(seq_id, None if whole else known.num_written)
        known.num_committed = known.num_written
        self.check()

    def commit_too_early(self, seq_id: int) -> None:
        known = self.known[seq_id]
        written = set(self.tables[seq_id][known.num_committed // self.size :])
        waits = written & {block for pair in self.pending for block in pair}
        if waits and known.num_committed < len(known.token_ids):
            with pytest.raises(ValueError, match="pending"):
                self.bm.commit(seq_id)
            self.check(unchanged=True)

    # -- what holds after every operation --------------------------------------------------------

    def check(self, *changed: int, unchanged: bool = False) -> None:
        self.bm.check_integrity()
        before, tables_before = self.pending, self.tables
        free_before = self.cells.keys() - self.holders().keys()
        self.pending = copy.deepcopy(self.bm).take_copies()
        self.tables = {seq_id: self.bm.block_table(seq_id) for seq_id in self.known}
        if unchanged:
            assert (self.pending, self.tables) == (before, tables_before)
        revived = {block for seq_id in changed for block in self.tables[seq_id][:-1]}
        if not free_before - revived <= {source for source, _ in before}:
            # Some free block could take any copy, so no two blocks had to change places.
            for seq_id in self.tables.keys() & tables_before.keys() - set(changed):
                assert self.tables[seq_id] == tables_before[seq_id]
        self.check_counts()
        self.check_contents()

    def check_counts(self) -> None:
        holders = self.holders()
        assert self.bm.num_used_blocks == len(holders)
        assert self.bm.num_free_blocks == self.bm.num_blocks - len(holders)
        assert 0 <= self.bm.num_cached_blocks <= self.bm.num_free_blocks
        assert self.bm.num_shared_blocks == sum(count > 1 for count in holders.values())
        for seq_id, known in self.known.items():
            assert len(self.tables[seq_id]) == self.num_blocks_for(len(known.token_ids))
            assert self.bm.num_tokens(seq_id) == len(known.token_ids)
            assert self.bm.num_committed_tokens(seq_id) == known.num_committed
            for block in self.tables[seq_id][known.num_committed // self.size :]:
                assert holders[block] == 1 or known.num_committed == len(known.token_ids)

    def check_contents(self) -> None:
        """Once the pending copies have run, every sequence sees its own past and no other."""
        sources = {source for source, _ in self.pending}
        destinations = [destination for _, destination in self.pending]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations)
        assert set(destinations) <= self.holders().keys()
        cells = after_copies(self.cells, self.pending)
        for seq_id, known in self.known.items():
            for position in range(known.num_written):
                block = self.tables[seq_id][position // self.size]
                past = tuple(known.token_ids[: position + 1])
                assert cells[block][position % self.size] == past


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([6, 5, 4, 7, 8, 3, 10, 2]),
        block_size=st.sampled_from([3, 4, 2, 1]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        weak=st.sampled_from([False, False, True]),
    )
    def build(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, weak: bool
    ) -> None:
        digest_of = weak_digest if weak else prefix_cache.digest_of
        self.patch = mock.patch.object(prefix_cache, "digest_of", digest_of)
        self.patch.start()
        self.model = Model(num_blocks, block_size, enable_prefix_caching)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.stop()

    def has_room(self) -> bool:
        return len(self.model.known) < MOST_SEQUENCES

    def has_some(self) -> bool:
        return bool(self.model.known)

    @precondition(has_room)
    @rule(prompt=st.lists(TOKEN, min_size=1, max_size=9))
    def allocate(self, prompt: list[int]) -> None:
        self.model.allocate(prompt)

    @precondition(has_room)
    @precondition(has_some)
    @rule(number=PICK, length=st.integers(1, 12), more=st.lists(TOKEN, max_size=3))
    def allocate_alike(self, number: int, length: int, more: list[int]) -> None:
        like = self.model.known[self.model.pick(number)].token_ids[:length]
        self.model.allocate([*like, *more] or [0])

    @precondition(has_some)
    @rule(number=PICK, new=st.lists(TOKEN, max_size=5))
    def append(self, number: int, new: list[int]) -> None:
        self.model.append(self.model.pick(number), new)

    @precondition(has_room)
    @precondition(has_some)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        self.model.fork(self.model.pick(number))

    @precondition(has_room)
    @precondition(has_some)
    @rule(number=PICK, new=st.lists(TOKEN, min_size=1, max_size=2), keep=st.booleans())
    def branch(self, number: int, new: list[int], keep: bool) -> None:
        self.model.branch(self.model.pick(number), new, keep)

    @precondition(has_room)
    @precondition(has_some)
    @rule(number=PICK, new=st.lists(TOKEN, max_size=2))
    def fork_after_withdrawing(self, number: int, new: list[int]) -> None:
        self.model.fork_after_withdrawing(self.model.pick(number), new)

    @precondition(has_some)
    @rule(number=PICK, dropped=st.integers(0, 6))
    def truncate(self, number: int, dropped: int) -> None:
        seq_id = self.model.pick(number)
        self.model.truncate(seq_id, max(0, len(self.model.known[seq_id].token_ids) - dropped))

    @precondition(has_some)
    @rule(number=PICK)
    def free(self, number: int) -> None:
        self.model.free(self.model.pick(number))

    @precondition(has_some)
    @rule(
        numbers=st.lists(st.tuples(PICK, st.integers(1, 12)), max_size=3), commit_now=st.booleans()
    )
    def step_of_some(self, numbers: list[tuple[int, int]], commit_now: bool) -> None:
        chunks = {self.model.pick(number): chunk for number, chunk in numbers}
        self.model.step(chunks, commit_now)

    @precondition(has_some)
    @rule(commit_now=st.booleans())
    def step_of_all(self, commit_now: bool) -> None:
        self.model.step(dict.fromkeys(self.model.known, 99), commit_now)

    @precondition(has_some)
    @rule(number=PICK)
    def commit(self, number: int) -> None:
        self.model.commit(self.model.pick(number))

    @precondition(has_some)
    @rule(number=PICK)
    def commit_too_early(self, number: int) -> None:
        self.model.commit_too_early(self.model.pick(number))


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def walk(model: Model, rng: random.Random) -> None:
    """Take one random operation."""

    def tokens(least: int, most: int) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randint(least, most))]

    seq_id = rng.choice(sorted(model.known)) if model.known else 0
    if not model.known or (rng.random() < 0.2 and len(model.known) < MOST_SEQUENCES):
        known = model.known.get(seq_id)
        like = known.token_ids[: rng.randint(0, 12)] if known else []
        model.allocate([*like, *tokens(0, 5)] or [0])
        return
    if len(model.known) < MOST_SEQUENCES and rng.random() < 0.4:
        if rng.random() < 0.2:
            model.fork_after_withdrawing(seq_id, tokens(1, 2))
        else:
            model.branch(seq_id, tokens(1, 2), keep=rng.random() < 0.5)
        return
    length = len(model.known[seq_id].token_ids)
    match rng.randrange(8):
        case 0 | 1:
            model.append(seq_id, tokens(0, 3))
        case 2:
            model.truncate(seq_id, max(0, length - rng.randint(0, 3)))
        case 3 | 4:
            model.free(seq_id)
        case 5:
            model.commit(seq_id)
        case 6:
            model.commit_too_early(seq_id)
        case _:
            chosen = [other for other in model.known if rng.random() < 0.8]
            model.step({other: rng.randint(1, 12) for other in chosen}, rng.random() < 0.6)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_walk_keeps_every_promise(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    if rng.random() < 0.3:
        monkeypatch.setattr(prefix_cache, "digest_of", weak_digest)
    model = Model(rng.randint(2, 9), rng.randint(1, 4), rng.random() < 0.8)
    for _ in range(200):
        walk(model, rng)
