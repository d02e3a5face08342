"""The block manager's promises, one by one; test_block_manager_machine.py mixes them at random."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tvmpaged.runtime import block_manager, prefix_cache
from tvmpaged.runtime.block_manager import BlockManager
from tvmpaged.runtime.errors import IntegrityError, OutOfBlocksError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

pytestmark = pytest.mark.runtime


def start(bm: BlockManager, seq_id: Hashable, token_ids: Iterable[int]) -> int:
    """Allocate a prompt and run the step that computes it."""
    num_cached = bm.allocate(seq_id, token_ids)
    bm.take_copies()
    bm.commit(seq_id)
    bm.check_integrity()
    return num_cached


def counts(bm: BlockManager) -> tuple[int, int]:
    bm.check_integrity()
    assert bm.num_free_blocks + bm.num_used_blocks == bm.num_blocks
    return bm.num_free_blocks, bm.num_cached_blocks


def books(bm: BlockManager) -> tuple[object, ...]:
    """Everything that a refused call must leave alone."""
    return (
        {
            seq_id: (list(seq.blocks), list(seq.token_ids), seq.num_committed, list(seq.prefixes))
            for seq_id, seq in bm._sequences.items()
        },
        list(bm._free),
        list(bm._evictable),
        list(bm._ref_counts),
        dict(bm._copies),
        (bm.num_shared_blocks, bm.num_copied_blocks, bm.num_prompt_tokens, bm.num_hit_tokens),
    )


# -- the worked example --------------------------------------------------------------------------


def test_worked_example_line_for_line() -> None:
    bm = BlockManager(num_blocks=8, block_size=4)
    first = [10, 11, 12, 13]

    assert bm.allocate("a", [*first, 14, 15]) == 0
    assert bm.block_table("a") == [0, 1]
    assert counts(bm) == (6, 0)

    assert bm.take_copies() == []
    bm.commit("a")
    assert bm.block_table("a") == [0, 1]
    assert counts(bm) == (6, 0)

    bm.fork("a", "b")
    assert (bm.block_table("a"), bm.block_table("b")) == ([0, 1], [0, 1])
    assert bm.num_shared_blocks == 2
    assert counts(bm) == (6, 0)

    bm.append("b", [20])
    assert (bm.block_table("a"), bm.block_table("b")) == ([0, 1], [0, 2])
    assert counts(bm) == (5, 0)

    bm.append("a", [30])
    assert (bm.block_table("a"), bm.block_table("b")) == ([0, 1], [0, 2])
    assert counts(bm) == (5, 0)

    assert bm.take_copies() == [(1, 2)]
    assert bm.take_copies() == []
    bm.commit("a")
    bm.commit("b")
    assert counts(bm) == (5, 0)

    bm.free("a")
    bm.free("b")
    assert counts(bm) == (8, 1)

    assert bm.allocate("c", [*first, 99]) == 4
    assert bm.block_table("c") == [0, 3]
    assert bm.take_copies() == []
    assert counts(bm) == (6, 0)


# -- sharing and copy-on-write -------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")))
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_forks_freed_in_every_order_drop_each_reference_once(
    order: tuple[str, ...], enable_prefix_caching: bool
) -> None:
    bm = BlockManager(8, 2, enable_prefix_caching)
    start(bm, "a", [1, 2, 3])
    bm.fork("a", "b")
    bm.fork("b", "c")
    bm.append("c", [4, 5])
    bm.take_copies()
    bm.commit("c")
    bm.fork("c", "d")
    bm.append("d", [6])
    left = set("abcd")
    for seq_id in order:
        bm.free(seq_id)
        left.remove(seq_id)
        used = {block for other in left for block in bm.block_table(other)}
        assert counts(bm)[0] == 8 - len(used)
    assert bm.num_free_blocks == 8
    assert bm.num_shared_blocks == 0
    assert bm.take_copies() == []


def test_a_copy_is_made_exactly_when_a_shared_partly_filled_block_is_written() -> None:
    bm = BlockManager(16, 4)
    start(bm, "a", range(6))
    for child in "bc":
        bm.fork("a", child)
    bm.append("b", [7])  # three holders: a copy
    bm.append("c", [8, 9, 10])  # two holders: a copy, and a block past the end
    bm.append("a", [11])  # alone now: in place
    assert bm.block_table("a") == [0, 1]
    assert bm.block_table("b") == [0, 2]
    assert bm.block_table("c") == [0, 3, 4]
    assert bm.take_copies() == [(1, 2), (1, 3)]
    assert bm.num_copied_blocks == 2

    start(bm, "full", range(100, 108))
    bm.fork("full", "child")
    shared = bm.block_table("full")
    bm.append("child", [1])  # the shared last block is full and is not written
    assert bm.take_copies() == []
    assert bm.block_table("child")[:2] == shared
    bm.check_integrity()


def test_appending_nothing_copies_nothing() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", [1])
    bm.fork("a", "b")
    bm.append("b", [])
    assert bm.block_table("a") == bm.block_table("b")
    assert bm.take_copies() == []


def test_a_sequence_with_uncommitted_tokens_cannot_be_forked() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", [1, 2, 3, 4, 5])
    bm.fork("a", "child")
    bm.append("child", [6])
    before = books(bm)
    with pytest.raises(ValueError, match=r"parent_id='child' has 1 uncommitted tokens"):
        bm.fork("child", "grandchild")
    assert books(bm) == before
    assert bm.take_copies() == [(1, 2)]
    bm.commit("child")
    bm.fork("child", "grandchild")
    bm.append("grandchild", [7])
    assert bm.take_copies() == [(2, 3)]


def test_a_copy_into_a_freed_block_is_dropped() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", [1, 2, 3, 4, 5])
    for child in ("freed", "truncated", "kept"):
        bm.fork("a", child)
        bm.append(child, [6])
    assert [bm.block_table(child)[1] for child in ("freed", "truncated", "kept")] == [2, 3, 4]
    bm.free("freed")
    bm.truncate("truncated", 4)
    counts(bm)
    assert bm.take_copies() == [(1, 4)]
    assert bm.num_copied_blocks == 1


def test_a_commit_before_the_copies_have_run_is_refused() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", [1, 2])
    bm.fork("a", "b")
    bm.append("b", [3])  # waits for the copy
    bm.append("a", [4])  # will overwrite nothing that the copy needs, but only after it
    for seq_id in "ab":
        with pytest.raises(ValueError, match=r"call take_copies\(\)"):
            bm.commit(seq_id)
    bm.take_copies()
    bm.commit("a")
    bm.commit("b")


# -- copies whose source moves on ----------------------------------------------------------------


def test_a_freed_source_may_be_handed_out_before_its_copy_has_run() -> None:
    # The copies run before the step writes, so at that time the source's bytes are still those of
    # `a`, though the block is x's by now.
    bm = BlockManager(3, 4)
    start(bm, "a", [1, 2])
    bm.fork("a", "b")
    bm.append("b", [3])
    bm.free("a")
    assert bm.num_free_blocks == 2
    bm.allocate("x", range(8))
    assert bm.block_table("x") == [2, 0]
    bm.check_integrity()
    with pytest.raises(ValueError, match="block 0 is pending"):
        bm.commit("x")
    assert bm.take_copies() == [(0, 1)]
    bm.commit("x")
    bm.commit("b")


def test_a_pending_source_is_passed_over_as_a_destination() -> None:
    bm = BlockManager(5, 4)
    start(bm, "a", [1, 2])
    start(bm, "c", [5, 6])
    bm.fork("a", "b")
    bm.append("b", [3])
    bm.free("a")
    for freed in (3, 4):
        bm.allocate(freed, [9])
    bm.free(3)  # free now: block 0, which the copy into b's block reads, then block 3
    bm.fork("c", "d")
    bm.append("d", [7])
    assert bm.block_table("d") == [3]
    bm.check_integrity()
    assert bm.take_copies() == [(0, 2), (1, 3)]


def test_when_every_free_block_is_a_pending_source_two_blocks_change_places() -> None:
    bm = BlockManager(3, 4)
    start(bm, "a", [1, 2])
    start(bm, "c", [5, 6])
    bm.fork("a", "b")
    bm.append("b", [3])
    bm.free("a")
    bm.fork("c", "d")
    assert bm.num_free_blocks == 1
    assert bm.block_table("b") == [2]
    bm.append("d", [7])  # 0 -> 2 and 1 -> 0 would depend on the order
    assert bm.block_table("b") == [0]
    assert bm.block_table("d") == [2]
    assert counts(bm) == (0, 0)
    assert bm.take_copies() == [(1, 2)]


def test_a_fork_of_a_truncated_child_copies_from_where_the_bytes_are() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", [1, 2])
    bm.fork("a", "b")
    bm.append("b", [3])  # 0 -> 1 is pending
    bm.truncate("b", 2)  # nothing uncommitted is left, the copy is still to come
    bm.fork("b", "c")
    bm.append("c", [4])  # 1 -> 2 would make a destination a source
    bm.check_integrity()
    assert bm.take_copies() == [(0, 1), (0, 2)]


def test_blocks_that_change_places_keep_all_their_holders() -> None:
    bm = BlockManager(3, 4)
    start(bm, "a", [1, 2])
    start(bm, "c", [5, 6])
    bm.fork("a", "b")
    bm.append("b", [3])
    bm.truncate("b", 2)
    bm.fork("b", "e")  # both wait for 0 -> 2
    bm.free("a")
    bm.fork("c", "d")
    bm.append("d", [7])
    assert bm.block_table("b") == bm.block_table("e") == [0]
    assert bm.num_shared_blocks == 1
    bm.check_integrity()
    assert bm.take_copies() == [(1, 2)]


def test_a_free_source_that_is_the_only_block_left_serves_in_place() -> None:
    bm = BlockManager(2, 4)
    start(bm, "a", [1, 2])
    bm.fork("a", "b")
    bm.append("b", [3])
    bm.truncate("b", 2)
    bm.free("a")
    bm.fork("b", "c")
    bm.append("c", [4])  # block 0 holds what c needs, and is free
    assert bm.block_table("c") == [0]
    bm.check_integrity()
    assert bm.take_copies() == [(0, 1)]


# -- running out ---------------------------------------------------------------------------------


def test_allocate_and_append_change_nothing_when_blocks_run_out() -> None:
    bm = BlockManager(4, 2)
    start(bm, "a", [1, 2, 3])
    bm.fork("a", "b")
    before = books(bm)
    assert not bm.can_allocate([1, 2, 9, 9, 9, 9, 9])
    with pytest.raises(OutOfBlocksError, match=r"allocate\(seq_id='c'\) needs 3 .* 2 of 4"):
        bm.allocate("c", [1, 2, 9, 9, 9, 9, 9])
    assert not bm.can_append("b", 4)
    with pytest.raises(OutOfBlocksError, match=r"append\(seq_id='b'\) needs 3 .* 2 of 4"):
        bm.append("b", [4, 5, 6, 7])  # a copy and two blocks past the end
    assert books(bm) == before
    bm.check_integrity()
    assert bm.can_append("b", 3)
    bm.append("b", [4, 5, 6])
    assert bm.num_free_blocks == 0
    assert issubclass(OutOfBlocksError, RuntimeError)


def test_cached_blocks_that_a_prompt_revives_are_not_counted_twice() -> None:
    bm = BlockManager(3, 2)
    start(bm, "a", [1, 2, 3, 4])
    bm.free("a")
    assert counts(bm) == (3, 2)
    prompt = [1, 2, 3, 4, 5, 6, 7]  # two revived and two fresh: one too many
    assert not bm.can_allocate(prompt)
    before = books(bm)
    with pytest.raises(OutOfBlocksError):
        bm.allocate("b", prompt)
    assert books(bm) == before
    assert bm.allocate("b", prompt[:6]) == 4
    assert counts(bm) == (0, 0)


def test_no_block_is_reserved() -> None:
    bm = BlockManager(3, 2)
    bm.allocate("a", range(6))
    assert counts(bm) == (0, 0)
    with pytest.raises(OutOfBlocksError):
        bm.append("a", [6])


def test_two_requests_finish_in_a_pool_that_holds_only_one_of_them_whole() -> None:
    # 34 + 35 tokens are 5 blocks of 16; two requests need 10 and there are 7. At 48 tokens each
    # holds 3 of them: one takes the last block, the other is freed and starts again later with
    # every token it had.
    def decode(seq_id: str, start: int, end: int) -> None:
        for position in range(start, end):
            bm.append(seq_id, [tokens[seq_id][position]])
            assert bm.take_copies() == []
            bm.commit(seq_id)
            bm.check_integrity()

    bm = BlockManager(7, 16)
    tokens = {"a": list(range(69)), "b": list(range(1000, 1069))}
    for seq_id in "ab":
        start(bm, seq_id, tokens[seq_id][:34])
        decode(seq_id, 34, 48)
    decode("a", 48, 49)
    assert not bm.can_append("b")
    with pytest.raises(OutOfBlocksError):
        bm.append("b", [tokens["b"][48]])
    bm.free("b")
    assert counts(bm) == (3, 3)
    decode("a", 49, 69)
    bm.free("a")
    # One of b's blocks, its tail, was evicted for a; the other two are found again.
    assert bm.allocate("b", tokens["b"][:48]) == 32
    bm.commit("b")
    decode("b", 48, 69)
    bm.free("b")
    assert bm.num_free_blocks == 7


# -- the prefix cache ----------------------------------------------------------------------------


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


# -- truncation ----------------------------------------------------------------------------------


def test_a_cached_block_that_is_partly_rewritten_leaves_the_index() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", [1, 2, 3, 4])
    bm.truncate("a", 2)
    assert bm.allocate("hit", [1, 2, 3, 4, 5]) == 4  # not rewritten yet: still good
    bm.free("hit")
    bm.append("a", [8, 9])
    assert bm.block_table("a") == [0]  # nobody else holds it: in place
    assert bm.take_copies() == []
    assert bm.allocate("b", [1, 2, 3, 4, 5]) == 0
    bm.commit("a")
    assert bm.allocate("c", [1, 2, 8, 9, 5]) == 4
    assert bm.allocate("d", [1, 2, 3, 4, 5]) == 0
    bm.check_integrity()


def test_a_cached_block_that_others_hold_is_copied_when_one_rewrites_it() -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", [1, 2, 3, 4])
    bm.truncate("a", 2)
    bm.allocate("b", [1, 2, 3, 4, 5])
    bm.append("a", [9])
    assert bm.take_copies() == [(0, bm.block_table("a")[0])]
    assert bm.block_table("b")[0] == 0
    bm.commit("a")
    bm.commit("b")
    assert bm.allocate("c", [1, 2, 3, 4, 5]) == 4
    bm.check_integrity()


def test_truncation_frees_whole_blocks_and_forgets_uncommitted_tokens() -> None:
    bm = BlockManager(8, 2)
    start(bm, "a", [1, 2, 3])
    bm.append("a", [4, 5, 6])  # a draft; two of its tokens are accepted
    assert bm.num_tokens("a") == 6
    bm.truncate("a", 5)
    assert (bm.num_tokens("a"), bm.num_committed_tokens("a")) == (5, 3)
    bm.commit("a")
    bm.truncate("a", 2)
    assert bm.block_table("a") == [0]
    assert (bm.num_tokens("a"), bm.num_committed_tokens("a")) == (2, 2)
    assert counts(bm) == (7, 1)
    bm.truncate("a", 0)
    assert bm.block_table("a") == []
    assert counts(bm) == (8, 2)
    bm.append("a", [1, 2, 3])
    assert bm.num_committed_tokens("a") == 0
    bm.free("a")
    bm.check_integrity()


# -- names and arguments -------------------------------------------------------------------------


def test_a_second_free_is_an_error_and_a_reused_block_has_no_past() -> None:
    bm = BlockManager(1, 2)
    start(bm, "a", [1, 2])
    bm.free("a")
    with pytest.raises(ValueError, match="seq_id='a' is unknown: never allocated, or already"):
        bm.free("a")
    assert counts(bm) == (1, 1)
    start(bm, "a", [3])
    bm.free("a")
    assert counts(bm) == (1, 0)
    assert bm.allocate("b", [1, 2]) == 0


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("append", ("x", [1])),
        ("commit", ("x",)),
        ("fork", ("x", "y")),
        ("truncate", ("x", 0)),
        ("free", ("x",)),
        ("block_table", ("x",)),
        ("num_tokens", ("x",)),
        ("num_committed_tokens", ("x",)),
        ("can_append", ("x", 1)),
        ("allocate", ("a", [1])),
        ("fork", ("a", "a")),
        ("allocate", ("x", [])),
        ("allocate", ("x", [2**63])),
        ("can_allocate", ([],)),
        ("commit", ("a", 0)),
        ("commit", ("a", 2)),
        ("truncate", ("a", -1)),
        ("truncate", ("a", 2)),
        ("can_append", ("a", -1)),
    ],
)
def test_a_wrong_value_is_named_and_changes_nothing(
    verb: str, arguments: tuple[object, ...]
) -> None:
    bm = BlockManager(4, 2)
    start(bm, "a", [1])
    before = books(bm)
    with pytest.raises(ValueError, match=r"(seq_id|parent_id|child_id|token_ids|num_tokens)="):
        getattr(bm, verb)(*arguments)
    assert books(bm) == before


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("allocate", ("x", ["one"])),
        ("allocate", ("x", "text")),
        ("allocate", ("x", 3)),
        ("append", ("a", [1.5])),
        ("allocate", ([], [1])),
        ("free", ({},)),
        ("fork", ("a", [])),
        ("truncate", ("a", 0.5)),
        ("commit", ("a", "1")),
    ],
)
def test_a_wrong_type_is_named_and_changes_nothing(
    verb: str, arguments: tuple[object, ...]
) -> None:
    bm = BlockManager(4, 2)
    start(bm, "a", [1])
    before = books(bm)
    with pytest.raises(TypeError, match=r"(seq_id|child_id|token_ids|num_tokens)="):
        getattr(bm, verb)(*arguments)
    assert books(bm) == before


@pytest.mark.parametrize(("name", "bad"), [("num_blocks", 0), ("block_size", -1)])
def test_an_impossible_pool_is_refused_by_name(name: str, bad: int) -> None:
    arguments: dict[str, Any] = {"num_blocks": 4, "block_size": 4}
    with pytest.raises(ValueError, match=f"{name}={bad} must be at least 1"):
        BlockManager(**{**arguments, name: bad})
    with pytest.raises(TypeError, match=f"{name}=1.5"):
        BlockManager(**{**arguments, name: 1.5})


def test_any_hashable_names_a_sequence_and_tables_are_fresh_lists() -> None:
    bm = BlockManager(8, 2)
    for seq_id in (0, "0", ("request", 0), None, frozenset({1})):
        bm.allocate(seq_id, (token for token in (1, 2)))
        bm.block_table(seq_id).append(99)
        assert len(bm.block_table(seq_id)) == 1


def test_only_the_standard_library_and_the_runtime_are_imported() -> None:
    allowed = {"__future__", "collections", "dataclasses", "hashlib", "itertools", "operator"}
    allowed |= {"reprlib", "struct", "typing", "tvmpaged"}
    for name in ("block_manager", "prefix_cache", "errors"):
        source = Path(block_manager.__file__).with_name(f"{name}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed


# -- the recount ---------------------------------------------------------------------------------


def _lose_a_reference(bm: BlockManager) -> None:
    bm._ref_counts[0] -= 1


def _leak_a_block(bm: BlockManager) -> None:
    bm._free.popitem()


def _free_a_held_block(bm: BlockManager) -> None:
    bm._free[1] = None


def _miscount_shared_blocks(bm: BlockManager) -> None:
    bm.num_shared_blocks += 1


def _index_other_tokens(bm: BlockManager) -> None:
    bm._sequences["a"].token_ids[0] = 99


def _index_an_uncommitted_block(bm: BlockManager) -> None:
    bm._sequences["b"].num_committed = 3


def _copy_from_a_destination(bm: BlockManager) -> None:
    bm._copies[3] = bm._copies[2]._replace(source=2)
    bm._num_reads[2] += 1


def _forget_a_read(bm: BlockManager) -> None:
    bm._num_reads.clear()


def _lose_an_index_entry(bm: BlockManager) -> None:
    bm._cache._entries.clear()


def _lose_a_prefix(bm: BlockManager) -> None:
    bm._cache._prefixes.clear()


def _hold_twice(bm: BlockManager) -> None:
    bm._sequences["a"].blocks[1] = 0


def _misplace_a_copy(bm: BlockManager) -> None:
    bm._copies[2] = bm._copies[2]._replace(place=0)


@pytest.mark.parametrize(
    "fault",
    [
        _lose_a_reference,
        _leak_a_block,
        _free_a_held_block,
        _miscount_shared_blocks,
        _index_other_tokens,
        _index_an_uncommitted_block,
        _copy_from_a_destination,
        _forget_a_read,
        _lose_an_index_entry,
        _lose_a_prefix,
        _hold_twice,
        _misplace_a_copy,
    ],
)
def test_the_recount_finds_what_is_wrong(fault: Any) -> None:
    bm = BlockManager(8, 4)
    start(bm, "a", range(6))
    bm.fork("a", "b")
    bm.append("b", [7])
    bm.check_integrity()
    fault(bm)
    with pytest.raises(IntegrityError, match=r"block|sequence|cop(y|ies)"):
        bm.check_integrity()
    assert issubclass(IntegrityError, AssertionError)


def test_pending_copies_stay_until_they_are_taken() -> None:
    bm = BlockManager(8, 4)
    bm.allocate("a", [1, 2, 3])
    bm.commit("a")
    bm.fork("a", "b")
    bm.append("b", [4])
    assert bm.pending_copies() == bm.pending_copies() == [(0, 1)]
    assert bm.num_copied_blocks == 0
    assert bm.take_copies() == [(0, 1)]
    assert bm.pending_copies() == bm.take_copies() == []
    bm.check_integrity()
