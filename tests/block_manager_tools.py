"""What tests of the block manager do again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmpaged.runtime.block_manager import BlockManager

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


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
