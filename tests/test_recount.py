"""The block manager counts its books again and finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from block_manager_tools import start

from tvmpaged.runtime.block_manager import BlockManager
from tvmpaged.runtime.errors import IntegrityError

pytestmark = pytest.mark.runtime


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
