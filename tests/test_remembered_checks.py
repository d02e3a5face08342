"""Plain tensors, and those like others that passed, are taken without the long checks."""

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
    # A view of a fused projection: the kernel takes its strides, but it is no plain tensor.
    fused = torch.zeros(len(case.q), 2 * attn.num_qo_heads, 64)
    q, k, v = fused[:, : attn.num_qo_heads], case.k_cache, case.v_cache
    q.copy_(case.q)
    plan = attn.plan(case.query_start_loc, case.seq_lens, case.block_table)
    out = attn.run(plan, q, k, v)
    place = torch.device("cpu")
    known = tensors._description(q, place, attn.num_qo_heads, 64, torch.float32, True)
    assert known in tensors._PASSED
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
        longer = torch.zeros(len(q) + extra, 2 * q.shape[1], 64)[:, : q.shape[1]]
        attn.run(plan, longer, k, v)
    assert len(tensors._PASSED) <= 3


def test_plain_tensors_are_taken_as_they_are(
    called: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    attn, plan, q, k, v, out = called
    monkeypatch.setattr(attn._launch, "_attend_checked", None)
    found = torch.empty(q.shape)
    assert attn.run(plan, q.contiguous(), k, v, out=found) is found
    assert torch.equal(found, out)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_what_a_kernel_would_take_on_trust_is_not_plain(called: tuple, name: str) -> None:
    """Each of these is contiguous, or has the right shape, and reads wrong or ends the process."""
    attn, plan, q, k, v, _ = called
    arguments = {"q": q.contiguous(), "k_cache": k, "v_cache": v, "out": torch.empty(q.shape)}
    plain = arguments[name]
    assert tensors.is_plain(plain, plain.nbytes)
    memory = torch.zeros(plain.numel() + 1)
    short = torch.zeros(plain.shape)
    short.untyped_storage().resize_(plain.nbytes - 4)
    late = torch.zeros(plain.numel() + 16)[16:].view(plain.shape)
    assert tensors.is_plain(late, plain.nbytes)
    late.untyped_storage().resize_(plain.nbytes)  # as long as it is, but not to its last element
    for odd in (
        memory[1:].view(plain.shape),
        torch._neg_view(plain),
        plain[:1, :1].expand(plain.shape),
        plain.to_sparse(),
        plain.numpy(),
        torch.nn.Parameter(plain),
        short,
        late,
    ):
        assert not tensors.is_plain(odd, plain.nbytes)
    with pytest.raises(ValueError, match=rf"{name} has shape .* its memory was given back"):
        attn.run(plan, **(arguments | {name: short}))
    with pytest.raises(TypeError, match=rf"{name} has dtype torch.float64"):
        attn.run(plan, **(arguments | {name: plain.double()}))
    with pytest.raises(ValueError, match=rf"{name} has shape"):
        attn.run(plan, **(arguments | {name: plain[:, :1].contiguous()}))
