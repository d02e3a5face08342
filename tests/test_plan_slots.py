"""A plan's own slots are checked once; a slot mapping that was written to is checked again."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tvmpaged import PagedAttention

pytestmark = pytest.mark.runtime


@pytest.fixture
def attn(generic: Callable[..., PagedAttention]) -> PagedAttention:
    return generic(1, 64, 4, "float32")


def _plan(attn: PagedAttention, blocks: list[int]) -> object:
    length = 4 * len(blocks)
    return attn.plan(np.array([0, length]), np.array([length]), np.array([blocks]))


def test_a_plan_whose_blocks_the_cache_lacks_is_refused_for_every_cache(
    attn: PagedAttention,
) -> None:
    plan = _plan(attn, [0, 5])
    rows = torch.ones(8, 2, 64)
    attn.append_kv(rows, rows, *attn.new_cache(6), plan.slot_mapping)
    with pytest.raises(ValueError, match="slot 20"):
        attn.append_kv(rows, rows, *attn.new_cache(5), plan.slot_mapping)


@pytest.mark.parametrize("by", ["torch", "numpy"])
def test_a_slot_mapping_that_was_written_to_is_checked_again(attn: PagedAttention, by: str) -> None:
    plan = _plan(attn, [0])
    rows = torch.ones(4, 2, 64)
    (plan.slot_mapping if by == "torch" else plan.slot_mapping.numpy())[2] = 10**12
    with pytest.raises(ValueError, match="slot_mapping names slot 1000000000000"):
        attn.append_kv(rows, rows, *attn.new_cache(1), plan.slot_mapping)


def test_what_is_written_to_a_slot_mapping_counts(attn: PagedAttention) -> None:
    plan = _plan(attn, [0])
    plan.slot_mapping.numpy()[1] = -1
    k_cache, v_cache = attn.new_cache(1)
    attn.append_kv(torch.ones(4, 2, 64), torch.ones(4, 2, 64), k_cache, v_cache, plan.slot_mapping)
    assert k_cache[0, 0, :, 0].tolist() == [1, 0, 1, 1]


def test_a_plan_may_be_made_in_inference_mode(attn: PagedAttention) -> None:
    k_cache, v_cache = attn.new_cache(1)
    rows, q = torch.ones(4, 2, 64), torch.ones(4, 2, 64)
    with torch.inference_mode():
        plan = _plan(attn, [0])
    for inside in (True, False):
        with torch.inference_mode(inside):
            attn.append_kv(rows, rows, k_cache, v_cache, plan.slot_mapping)
            assert torch.equal(attn.run(plan, q, k_cache, v_cache), rows)


def test_an_older_plans_slots_are_still_taken(attn: PagedAttention) -> None:
    old = _plan(attn, [1])
    _plan(attn, [0])
    k_cache, v_cache = attn.new_cache(2)
    attn.append_kv(torch.ones(4, 2, 64), torch.ones(4, 2, 64), k_cache, v_cache, old.slot_mapping)
    assert float(k_cache[1].min()) == 1
    assert float(k_cache[0].abs().max()) == 0
