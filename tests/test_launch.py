"""What a plain call leaves to the kernels they hold; what a launch keeps, it looks at again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, assert_close, make_case, stored

from tvmpaged import PagedAttention

pytestmark = pytest.mark.runtime

Attention = Callable[..., PagedAttention]
Call = tuple[PagedAttention, Case, dict[str, Any]]


@pytest.fixture(params=["generic HND", "generic NHD", "specialised", "native"])
def attn(generic: Attention, specialised: Attention, request: pytest.FixtureRequest) -> Any:
    return {
        "generic HND": lambda: generic(3, 64, 16, "float32"),
        "generic NHD": lambda: generic(3, 64, 16, "float32", layout="NHD"),
        "specialised": lambda: specialised(3, 64, 16, "float32"),
        "native": lambda: specialised(3, 64, 16, "bfloat16", layout="native", bundle_name="native"),
    }[request.param]()


@pytest.fixture
def call(attn: PagedAttention, rng: np.random.Generator) -> Call:
    """Return a call that is plain: one sequence that is split and merged, one that is not."""
    case = make_case(rng, attn, [1, 2], [1200, 7])
    k_cache, v_cache = (each.clone() for each in stored(attn, case))
    arguments = {"q": case.q.clone(), "k_cache": k_cache, "v_cache": v_cache}
    return attn, case, {"plan": attn.plan(*case.step), **arguments, "out": torch.empty_like(case.q)}


def plain(attn: PagedAttention, arguments: dict[str, Any]) -> torch.Tensor | None:
    """Return what comes of a call without the checks by name; None where it needs them."""
    plan = arguments["plan"]
    tensors = [arguments[name] for name in ("q", "k_cache", "v_cache", "out")]
    return attn._launch._attend_plain(plan, *tensors, plan.lse, attn.head_dim**-0.5)


def other_shapes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return plain tensors of which one axis is one longer or shorter, or two are swapped."""
    shape, found = list(tensor.shape), []
    for axis in range(len(shape)):
        for more in (-1, 1):
            changed = [*shape[:axis], shape[axis] + more, *shape[axis + 1 :]]
            found.append(tensor.new_zeros(changed))
    for axis in range(len(shape) - 1):
        swapped = tensor.transpose(axis, axis + 1).contiguous()
        if swapped.shape != tensor.shape:
            found.append(swapped)
    return [*found, tensor[None].clone(), tensor[0].clone(), tensor.flatten()]


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_every_other_shape_takes_a_closer_look(call: Call, name: str) -> None:
    """Wherever it is seen, in the kernel or before: nothing is computed from it."""
    attn, _, arguments = call
    assert plain(attn, arguments) is arguments["out"]
    for odd in other_shapes(arguments[name]):
        if name == "k_cache" and odd.shape[1:] == arguments[name].shape[1:]:
            continue  # the number of blocks is v_cache's to disagree with
        assert plain(attn, arguments | {name: odd}) is None, tuple(odd.shape)


def test_blocks_of_another_shape_are_seen_though_k_and_v_agree(call: Call) -> None:
    """The generic kernels take blocks of any: none knows how many kv heads the plan names."""
    attn, _, arguments = call
    k_cache = arguments["k_cache"]
    for odd in other_shapes(k_cache):
        if odd.shape[1:] != k_cache.shape[1:]:
            given = arguments | {"k_cache": odd, "v_cache": odd.clone()}
            assert plain(attn, given) is None, tuple(odd.shape)
            with pytest.raises(ValueError, match="k_cache has shape"):
                attn.run(**given)
    assert plain(attn, arguments) is arguments["out"]


def test_a_longer_q_is_cut_before_any_kernel_refuses_it(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a padded batch; an exception in each layer would take longer than its kernel."""
    attn, _, arguments = call
    right = attn.run(**arguments).clone()
    launched, start = [], attn._launch._start
    monkeypatch.setattr(
        attn._launch, "_start", lambda *given: (launched.append(given), start(*given))
    )
    q = torch.cat([arguments["q"], arguments["q"]])
    assert torch.equal(attn.run(**(arguments | {"q": q, "out": None}))[: len(right)], right)
    assert len(launched) == 1


def test_blocks_past_a_cache_are_seen_after_a_larger_one_and_before(call: Call) -> None:
    attn, _, arguments = call
    k, v = arguments["k_cache"], arguments["v_cache"]
    last = arguments["plan"].max_block_id
    pairs = [(k, v), (k[: last + 1], v[: last + 1]), (k[:last], v[:last])]
    for mine in (pairs, pairs[::-1], pairs):
        for pair in mine:
            given = arguments | dict(zip(("k_cache", "v_cache"), pair, strict=True))
            if len(pair[0]) > last:
                attn.run(**given)
                continue
            with pytest.raises(ValueError, match=f"block {last}, but k_cache has {last} blocks"):
                attn.run(**given)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
def test_a_tensor_that_ran_and_was_changed_in_place_is_looked_at_again(
    call: Call, name: str
) -> None:
    """The same object at the same address: of its memory, sign and strides nothing is kept."""
    attn, _, arguments = call
    attn.run(**arguments)
    tensor = arguments[name]
    kept, odd = tensor.clone(), tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape)
    for data in (torch._neg_view(tensor), odd, tensor[:1].expand(tensor.shape), kept[:, :1]):
        tensor.data = data
        assert plain(attn, arguments) is None
        tensor.data = kept
    attn.run(**arguments)
    shorter = kept.nbytes - kept.itemsize
    address = tensor.data_ptr()
    for nbytes in (shorter, 0):
        tensor.untyped_storage().resize_(nbytes)
        with pytest.raises(ValueError, match=f"{name} has shape .* its memory was given back"):
            attn.run(**arguments)
    for _ in range(20):  # as long as it takes to get the old address again
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(shorter)
        assert plain(attn, arguments) is None
        if tensor.data_ptr() == address:
            break


def test_a_cache_set_to_other_memory_is_read_there(call: Call) -> None:
    attn, case, arguments = call
    k_cache = arguments["k_cache"]
    right = attn.run(**arguments).clone()
    other = torch.zeros_like(k_cache)
    kept = k_cache.clone()
    k_cache.set_(other.untyped_storage(), 0, k_cache.shape, k_cache.stride())
    assert not torch.equal(attn.run(**arguments), right)
    k_cache.set_(kept)
    assert torch.equal(attn.run(**arguments), right)
    assert_close(right, arguments["plan"].lse, *case.expected(), slack=case.slack())


def test_a_cache_that_stands_where_another_stood_is_its_own(call: Call) -> None:
    attn, _, arguments = call
    right = attn.run(**arguments).clone()
    shape, dtype = arguments["k_cache"].shape, attn.kv_dtype
    for _ in range(20):
        given = arguments | {"k_cache": torch.ones(shape, dtype=dtype)}
        attn.run(**given)
        short = torch.empty(0, dtype=dtype).set_(torch.zeros(shape, dtype=dtype)[:-1])
        del given
        assert plain(attn, arguments | {"k_cache": short}) is None
    assert torch.equal(attn.run(**arguments), right)


def test_what_is_bound_is_the_plans_own_memory(call: Call) -> None:
    """Whatever step was planned into it before, of the same shapes or others."""
    attn, case, arguments = call
    plan = arguments["plan"]
    right = attn.run(**arguments).clone()
    small = attn.plan([0, 1], [9], case.block_table[:1], into=plan)
    again = attn.plan(*case.step, into=small)
    later = attn.plan(*case.step, into=again)
    for each in (small, again, later):
        bound = {phase: rest for phase, *rest in each.calls}
        assert list(bound) == list(each.work)
        for phase, rest in bound.items():
            held = (each.block_table, *each.work[phase], each.partial_out, each.partial_lse)
            assert [torch.from_dlpack(x).data_ptr() for x in rest] == [x.data_ptr() for x in held]
            assert [torch.from_dlpack(x).shape for x in rest] == [x.shape for x in held]
        assert torch.from_dlpack(each.lse_argument).shape == each.lse.shape
        assert (each.merge is None) == (each.merge_items is None)
    assert torch.equal(attn.run(**(arguments | {"plan": later})), right)


def test_lse_is_a_new_tensor_for_whoever_asks(call: Call) -> None:
    attn, case, arguments = call
    _, first = attn.run(**arguments, return_lse=True)
    kept = first.clone()
    zero = arguments | {"k_cache": torch.zeros_like(arguments["k_cache"])}
    _, second = attn.run(**zero, return_lse=True)
    attn.run(**zero)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
    assert torch.equal(arguments["plan"].lse, second)
    assert_close(attn.run(**arguments), first, *case.expected(), slack=case.slack())


def test_out_may_be_q(call: Call) -> None:
    attn, _, arguments = call
    right = attn.run(**arguments).clone()
    q = arguments["q"]
    assert attn.run(**(arguments | {"out": q})) is q
    assert torch.equal(q, right)
