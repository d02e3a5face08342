"""Which blocks a prompt finds, and which go first."""

from __future__ import annotations

import itertools

import pytest
from block_manager_tools import counts, start

from tvmpaged.runtime import prefix_cache
from tvmpaged.runtime.block_manager import BlockManager

pytestmark = pytest.mark.runtime


def test_only_committed_tokens_enter_the_prefix_cache() -> None:
    bm = BlockManager(16, 2)
    bm.allocate("a", [1, 2, 3, 4, 5])
    assert bm.allocate("b", [1, 2, 3, 4, 5]) == 0
    bm.commit("a", 3)  # the first chunk of the prompt
    assert bm.num_committed_tokens("a") == 3
    assert bm.allocate("c", [1, 2, 3, 4, 5]) == 2
    bm.commit("a")
    assert bm.allocate("d", [1, 2, 3, 4, 5]) == 4
    bm.check_integrity()


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_computed() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", range(8))
    assert bm.allocate("b", range(8)) == 7
    assert bm.block_table("b") == [0, 2]
    assert bm.num_committed_tokens("b") == 7
    assert bm.take_copies() == [(1, 2)]
    bm.commit("b")
    bm.free("a")
    bm.free("b")
    assert counts(bm) == (8, 2)  # the index kept a's block; b's equal one is simply free
    assert bm.allocate("c", range(8)) == 7
    assert bm.take_copies() == [(1, bm.block_table("c")[1])]
    assert counts(bm) == (6, 1)
    assert (bm.num_prompt_tokens, bm.num_hit_tokens) == (24, 14)


def test_a_prompt_cached_whole_needs_no_extra_block() -> None:
    # The only free block for the last one's copy is the cached block itself: its bytes are there.
    bm = BlockManager(2, 4)
    start(bm, "a", range(8))
    bm.free("a")
    assert bm.can_allocate(range(8))
    assert bm.allocate("b", range(8)) == 7
    assert bm.block_table("b") == [0, 1]
    assert bm.take_copies() == []
    assert counts(bm) == (0, 0)
    bm.commit("b")
    bm.free("b")
    assert counts(bm) == (2, 2)


def test_block_size_one_takes_a_block_per_token_and_copies_nothing() -> None:
    bm = BlockManager(8, 1)
    start(bm, "a", [1])
    for token in (2, 3, 4):
        bm.append("a", [token])
        assert bm.take_copies() == []
        bm.commit("a")
    assert bm.block_table("a") == [0, 1, 2, 3]
    bm.fork("a", "b")
    bm.append("b", [5])
    bm.append("a", [6])
    assert bm.take_copies() == []
    assert (bm.block_table("a")[4], bm.block_table("b")[4]) == (5, 4)
    bm.free("b")
    assert bm.allocate("c", [1, 2, 3, 4]) == 3
    assert bm.block_table("c") == [0, 1, 2, 6]
    assert bm.take_copies() == []
    bm.check_integrity()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_new_tokens_land_after_the_cached_prefix(block_size: int) -> None:
    for length in range(1, 4 * block_size + 2):
        bm = BlockManager(64, block_size)
        start(bm, "a", range(length))
        cached_blocks = bm.block_table("a")[: length // block_size]
        num_cached = bm.allocate("b", [*range(length), 777])
        assert num_cached == length // block_size * block_size
        assert bm.block_table("b")[: len(cached_blocks)] == cached_blocks
        written = {bm.block_table("b")[p // block_size] for p in range(num_cached, length + 1)}
        assert not written & set(bm.block_table("a"))
        assert bm.take_copies() == []
        bm.check_integrity()


def test_the_same_tokens_after_another_prefix_are_no_hit() -> None:
    bm = BlockManager(16, 2)
    start(bm, "a", [1, 2, 3, 4, 5])
    assert bm.allocate("b", [9, 9, 3, 4, 5]) == 0
    assert bm.allocate("c", [3, 4, 5]) == 0
    assert bm.allocate("d", [2, 1, 3, 4, 5]) == 0


def test_equal_blocks_at_different_positions_are_cached_each() -> None:
    bm = BlockManager(16, 2)
    start(bm, "a", [1, 2, 1, 2, 1, 2, 9])
    assert bm.allocate("b", [1, 2, 1, 2, 1, 2, 7]) == 6
    assert bm.block_table("b")[:3] == bm.block_table("a")[:3]


def test_an_evicted_and_reused_block_is_a_miss() -> None:
    bm = BlockManager(2, 2)
    start(bm, "a", [1, 2, 3, 4])
    bm.free("a")
    start(bm, "b", [5, 6, 7, 8])  # takes both blocks
    bm.free("b")
    assert bm.allocate("c", [1, 2, 3, 4]) == 0
    bm.check_integrity()


def test_eviction_takes_the_least_recently_used_and_tails_before_heads() -> None:
    bm = BlockManager(6, 1)
    start(bm, "old", [1, 2, 3])  # blocks 0 1 2
    start(bm, "new", [4, 5, 6])  # blocks 3 4 5
    bm.free("old")
    bm.free("new")
    assert counts(bm) == (6, 6)
    bm.allocate("x", [70, 71])
    assert bm.block_table("x") == [2, 1]
    start(bm, "again", [1, 9])  # the head of `old` survived; using it makes it recent
    assert bm.block_table("again") == [0, 5]
    bm.free("again")
    bm.allocate("y", [80, 81, 82])
    assert bm.block_table("y") == [4, 3, 5]
    bm.check_integrity()
    bm.free("x")
    assert bm.allocate("z", [1, 99]) == 1


def test_a_cached_block_that_is_copied_counts_as_used_recently() -> None:
    bm = BlockManager(4, 2)
    start(bm, "old", [1, 2])
    start(bm, "new", [3, 4])
    bm.allocate("rest", [0, 0, 0])
    bm.free("old")
    bm.free("new")
    assert bm.allocate("again", [1, 2]) == 1
    assert bm.take_copies() == [(0, 1)]
    assert bm.block_table("again") == [1]  # the block of `new` made room
    assert counts(bm) == (1, 1)
    assert bm.allocate("hit", [1, 2]) == 1


def test_free_blocks_without_a_prefix_go_before_cached_ones() -> None:
    bm = BlockManager(4, 2)
    start(bm, "a", [1, 2, 3])
    bm.free("a")
    bm.allocate("b", [7, 8, 9, 9, 9])
    assert counts(bm) == (1, 1)
    assert bm.block_table("b") == [2, 3, 1]


def test_two_sequences_that_compute_the_same_block_keep_their_own() -> None:
    bm = BlockManager(8, 2)
    bm.allocate("a", [1, 2, 3])
    bm.allocate("b", [1, 2, 3])
    assert bm.take_copies() == []
    bm.commit("a")
    bm.commit("b")
    assert (bm.block_table("a"), bm.block_table("b")) == ([0, 1], [2, 3])
    bm.append("b", [4])  # completes a block that continues the shared prefix
    bm.commit("b")
    bm.check_integrity()
    assert bm.allocate("c", [1, 2, 3, 4, 5]) == 4
    assert bm.block_table("c")[:2] == [0, 3]
    for seq_id in "bca":
        bm.free(seq_id)
    assert counts(bm) == (8, 2)


def test_a_prefix_computed_again_after_eviction_finds_its_old_tail() -> None:
    bm = BlockManager(8, 2)
    start(bm, "a", [1, 2])
    start(bm, "b", [1, 2, 3, 4])
    tail = bm.block_table("b")[1]
    bm.free("a")
    bm._cache.drop(0)  # as if the head had been evicted before the tail
    assert bm.allocate("c", [1, 2, 9]) == 0
    bm.commit("c")
    assert bm.allocate("d", [1, 2, 3, 4]) == 3
    assert bm.take_copies() == [(tail, bm.block_table("d")[1])]


def test_prefix_caching_off_never_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("hashed")

    monkeypatch.setattr(prefix_cache, "digest_of", refuse)
    bm = BlockManager(8, 2, enable_prefix_caching=False)
    for seq_id in "ab":
        assert start(bm, seq_id, [1, 2, 3, 4]) == 0
    bm.truncate("a", 3)
    bm.append("a", [5])
    bm.free("a")
    bm.free("b")
    assert counts(bm) == (8, 0)


@pytest.mark.parametrize("num_digests", [1, 2, 3])
def test_equal_digests_never_serve_other_tokens(
    num_digests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        prefix_cache, "digest_of", lambda _, token_ids: bytes([sum(token_ids) % num_digests])
    )
    prompts = list(itertools.product([1, 2], repeat=4))
    for first, second in itertools.product(prompts, repeat=2):
        bm = BlockManager(12, 1)
        start(bm, "a", first)
        shared = next((i for i in range(4) if first[i] != second[i]), 4)
        assert bm.allocate("b", [*second, 3]) <= shared
        bm.commit("b")
        bm.check_integrity()
        bm.free("a")
        bm.allocate("c", [*first, 3, 3])
        bm.check_integrity()


def test_a_long_prefix_is_compared_and_dropped_without_recursion() -> None:
    length = 50_000
    bm = BlockManager(length, 1)
    start(bm, "a", range(length))
    bm.free("a")
    assert bm.allocate("b", range(length)) == length - 1
    bm.free("b")
    for block in list(bm._evictable):
        bm._take(block)
