"""Forks share blocks; a block is copied when it is written, and only then."""

from __future__ import annotations

import itertools

import pytest
from block_manager_tools import books, counts, start

from tvmpaged.runtime.block_manager import BlockManager

pytestmark = pytest.mark.runtime


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
