"""Tensors like those that passed before are taken without the long checks, and no others."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import make_case

from tvmpaged import PagedAttention
from tvmpaged.runtime import tensors


@pytest.fixture
def called(generic: Callable[..., PagedAttention], rng: np.random.Generator) -> tuple:
    attn = generic(3, 64, 16, "float32")
    case = make_case(rng, attn, [1, 2], [20, 7])
    q, k, v = case.q.clone(), case.k_cache, case.v_cache
    plan = attn.plan(case.query_start_loc, case.seq_lens, case.block_table)
    out = attn.run(plan, q, k, v)
    assert tensors._description(q, attn.num_qo_heads, 64, torch.float32, True) in tensors._PASSED
    return attn, plan, q, k, v, out


def test_memory_given_back_is_seen_in_a_tensor_that_passed(called: tuple) -> None:
    attn, plan, q, k, v, _ = called
    q.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"q has shape .* its memory was given back"):
        attn.run(plan, q, k, v)


def test_an_unaligned_tensor_of_the_same_shape_is_copied(called: tuple) -> None:
    attn, plan, q, k, v, out = called
    moved = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    assert torch.equal(attn.run(plan, moved, k, v), out)


def test_a_cache_whose_blocks_overlap_is_refused_though_its_shape_passed(called: tuple) -> None:
    attn, plan, q, k, v, _ = called
    with pytest.raises(ValueError, match="block stride 0"):
        attn.run(plan, q, k[:1].expand(k.shape), v)


def test_what_is_remembered_is_bounded(called: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_MOST_PASSED", 3)
    attn, plan, q, k, v, _ = called
    for extra in range(8):
        attn.run(plan, torch.cat([q, q.new_zeros(extra, *q.shape[1:])]), k, v)
    assert len(tensors._PASSED) <= 3
