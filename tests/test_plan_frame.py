"""``plan(max_seq_len=)``: what is launched stays the same, as a captured CUDA graph wants it.

A graph keeps each launch's function and arguments and does them again. So do these tests: they keep
the arguments of one step's calls, plan other steps into its memory, and make the old calls again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, assert_close, make_case, random_rows, run, stored
from torch.utils._python_dispatch import TorchDispatchMode

from tvmpaged import PagedAttention
from tvmpaged.runtime.attention import Plan
from tvmpaged.worklist import MAX_SPLIT_Q_LEN

pytestmark = pytest.mark.runtime

Attention = Callable[..., PagedAttention]
Launch = tuple[Callable[..., Any], tuple[Any, ...]]

LONGEST = 2100
#: Decode of long, short, absent and one-block sequences.
STEPS = ([2049, 17, 0, 4], [3, 2100, 1, 0], [0, 0, 0, 0], [513, 512, 1300, 2100])


@pytest.fixture(params=["float32", "bfloat16"])
def attn(generic: Attention, request: pytest.FixtureRequest) -> PagedAttention:
    return generic(3, 64, 4, request.param)


@contextmanager
def captured(attn: PagedAttention) -> Iterator[list[Launch]]:
    """Keep the launches of a block."""
    launches: list[Launch] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*arguments: Any) -> None:
            launches.append((call, arguments))
            call(*arguments)

        return launch

    launch = attn._launch
    calls = launch._calls
    launch._calls = {name: watched(call) for name, call in calls.items()}
    try:
        yield launches
    finally:
        launch._calls = calls


def identity(launches: list[Launch]) -> list[Any]:
    """Return what a graph bakes in: addresses, shapes, strides and numbers."""
    given = [
        torch.from_dlpack(x) if hasattr(x, "__dlpack__") else x
        for _, arguments in launches
        for x in arguments
    ]
    return [
        (x.data_ptr(), tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x
        for x in given
    ]


def cases_of(
    rng: np.random.Generator, attn: PagedAttention, q_lens: list[int], steps: tuple[list[int], ...]
) -> list[Case]:
    """Return steps over one pair of caches, of the size of the largest."""
    found = [make_case(rng, attn, q_lens, lengths) for lengths in steps]
    most = max(len(each.k_cache) for each in found)

    def padded(cache: torch.Tensor) -> torch.Tensor:
        rest = cache.new_full((most - len(cache), *cache.shape[1:]), torch.nan)
        return torch.cat([cache, rest])

    return [
        replace(each, k_cache=padded(each.k_cache), v_cache=padded(each.v_cache)) for each in found
    ]


def test_a_captured_step_serves_the_others(attn: PagedAttention, rng: np.random.Generator) -> None:
    cases = cases_of(rng, attn, [1] * 4, STEPS)
    q, out = cases[0].q.clone(), torch.empty_like(cases[0].q)
    k_cache, v_cache = (each.clone() for each in stored(attn, cases[0]))
    # Copies, because what is not aligned is staged each time.
    k, v = (random_rows(rng, (4, attn.num_kv_heads, 64), attn.dtype).clone() for _ in range(2))
    plan = attn.plan(*cases[0].step, max_seq_len=LONGEST)

    def step(plan: Plan) -> None:
        attn.append_kv(k, v, k_cache, v_cache, plan.slot_mapping)
        attn.run(plan, q, k_cache, v_cache, out=out)

    with captured(attn) as first:
        step(plan)
    assert len(first) == 3  # append_kv, decode, merge
    for case in cases:
        for mine, theirs in zip((k_cache, v_cache), stored(attn, case), strict=True):
            mine.copy_(theirs)
        q.copy_(case.q)
        plan = attn.plan(*case.step, into=plan)
        out.fill_(torch.nan)
        for call, arguments in first:
            call(*arguments)
        replayed = out.clone()
        with captured(attn) as again:
            step(plan)
        assert identity(again) == identity(first)
        assert torch.equal(out, replayed)
        # The new token's K and V are part of what it sees.
        expected = replace(case, k_cache=k_cache, v_cache=v_cache)
        assert_close(replayed, plan.lse, *expected.expected(), slack=expected.slack())


class Operations(TorchDispatchMode):
    """Keeps the names of torch's operations that are not views of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A CPU's slots may be written to without torch, so they are compared; a GPU's are not.
        if not func.is_view and func.name() != "aten::equal":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_step_neither_allocates_nor_waits(attn: PagedAttention, rng: np.random.Generator) -> None:
    """Whatever did would be one of torch's operations: an empty tensor, a copy, a number read."""
    case = make_case(rng, attn, [1] * 4, STEPS[0])
    k, v = (random_rows(rng, (4, attn.num_kv_heads, 64), attn.dtype).clone() for _ in range(2))
    q, out, caches = case.q.clone(), torch.empty_like(case.q), stored(attn, case)
    plan = attn.plan(*case.step, max_seq_len=LONGEST)
    for arguments in ((q, out), (q.transpose(0, 1).contiguous().transpose(0, 1), out)):
        with Operations() as seen:
            attn.append_kv(k, v, *caches, plan.slot_mapping)
            attn.run(plan, arguments[0], *caches, out=arguments[1])
        assert seen.names == []
    with Operations() as seen:
        attn.run(plan, q, *caches)
    assert seen.names == ["aten::empty_like"]


def test_bits_are_those_of_a_plain_plan(attn: PagedAttention, rng: np.random.Generator) -> None:
    q_lens = [1, 3, MAX_SPLIT_Q_LEN, MAX_SPLIT_Q_LEN + 1, 1, 0]
    case = make_case(rng, attn, q_lens, [1, 40, 600, 700, 2049, 7])
    expected, expected_lse = run(attn, case)
    plan = attn.plan(*case.step, max_seq_len=LONGEST)
    out, lse = attn.run(plan, case.q, *stored(attn, case), case.sm_scale, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_a_step_that_does_not_fit_leaves_the_plan(
    attn: PagedAttention, rng: np.random.Generator
) -> None:
    case = make_case(rng, attn, [1, 1], [9, 40])
    plan = attn.plan(*case.step, max_seq_len=40)
    for q_lens, lengths, said in (
        ([1, 1], [9, 41], "seq_lens has 41, which is over max_seq_len=40"),
        ([1, 2], [9, 40], r"gives \[1, 2\] new tokens per sequence; under max_seq_len they stay"),
        ([1], [9], "new tokens per sequence"),
    ):
        other = make_case(rng, attn, q_lens, lengths)
        with pytest.raises(ValueError, match=said):
            attn.plan(*other.step, into=plan)
        with pytest.raises(ValueError, match="over max_seq_len=8"):
            attn.plan(*other.step, max_seq_len=8)
    with pytest.raises(ValueError, match="max_seq_len=40: into= keeps what its first plan had"):
        attn.plan(*case.step, into=plan, max_seq_len=40)
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"max_seq_len={bad} must be at least 1"):
            attn.plan(*case.step, max_seq_len=bad)
    with pytest.raises(TypeError, match="max_seq_len='long' must be an int"):
        attn.plan(*case.step, max_seq_len="long")
    assert plan.is_current
    assert attn.run(plan, case.q, *stored(attn, case)).isfinite().all()


def test_whole_plans_may_follow_without_a_frame(
    attn: PagedAttention, rng: np.random.Generator
) -> None:
    large, small = (make_case(rng, attn, [1, 1], [length, 4]) for length in (2049, 9))
    plan = attn.plan(*large.step)
    again = attn.plan(*small.step, into=plan)
    assert not plan.is_current
    assert again.merge_items is None
    out = attn.run(again, small.q, *stored(attn, small))
    assert_close(out, again.lse, *small.expected(), slack=small.slack())
