"""The block manager's promises, one by one; test_block_manager_machine.py mixes them at random."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from block_manager_tools import books, counts, start

from tvmpaged.runtime import block_manager
from tvmpaged.runtime.block_manager import BlockManager
from tvmpaged.runtime.errors import OutOfBlocksError

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.runtime


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
