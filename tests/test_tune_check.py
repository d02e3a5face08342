"""Correct before fast: the check lets right kernels through and no wrong one, at every edge."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tvmpaged import reference, schedules
from tvmpaged.cpu import native_target
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning import check, limits, measure_worker
from tvmpaged.tuning.case import Case
from tvmpaged.tuning.workload import Workload

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = native_target()


def honest(spec: AttentionSpec) -> Any:
    """Return a kernel that is right; it writes out and lse itself and leaves nothing to merge."""

    def attention(
        q: Any, k: Any, v: Any, table: Any, items: Any, offsets: Any, out: Any, lse: Any, *rest: Any
    ) -> None:
        case, _, _ = check._case(spec, 512)
        step = case.steps[0]
        result = reference.paged_attention(
            q, k, v, step.query_start_loc, step.seq_lens, table, return_lse=True
        )
        for target, value in zip((out, lse), result, strict=True):
            target.copy_(torch.from_numpy(value))

    return attention


def faults(spec: AttentionSpec) -> dict[str, Any]:
    right = honest(spec)

    def spoil(change: Any) -> Any:
        def attention(*args: Any) -> None:
            right(*args)
            change(args[6], args[7])

        return attention

    def shift(out: Any, lse: Any) -> None:
        out.mul_(1 + 4 * limits.TOLERANCE[spec.out_dtype])

    def leave_a_head(out: Any, lse: Any) -> None:
        out[-1, -1] = torch.nan

    def swap_heads(out: Any, lse: Any) -> None:
        out.copy_(out.flip(1))

    def forget_a_key(out: Any, lse: Any) -> None:
        out[-1].mul_(0.9)

    def base_two(out: Any, lse: Any) -> None:
        lse.div_(np.log(2))

    def empty_row(out: Any, lse: Any) -> None:
        lse[lse == -torch.inf] = -5e4

    def nan_lse(out: Any, lse: Any) -> None:
        lse[-1, -1] = torch.nan

    return {
        f.__name__: spoil(f)
        for f in (shift, leave_a_head, swap_heads, forget_a_key, base_two, empty_row, nan_lse)
    }


def ask(spec: AttentionSpec, attention: Any) -> str:
    choices = schedules.default_choices(spec, TARGET) | {"split_length": 512}
    checks = check.check(spec, attention, lambda *args: None, choices, 2)
    assert {each.what: each.limit for each in checks} == limits.limits(spec, choices)
    return check.wrong(checks)


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_numbers_pass_and_wrong_ones_do_not(kernel: str, dtype: str) -> None:
    spec = AttentionSpec.make(kernel, dtype, 64, 3, 16)
    assert ask(spec, honest(spec)) == ""
    for name, attention in faults(spec).items():
        assert ask(spec, attention), name


def test_the_checked_step_has_the_edges() -> None:
    for kernel in ("decode", "prefill"):
        spec = AttentionSpec.make(kernel, "float32", 64, 3, 16)
        workload = limits.check_workload(spec, 512)
        lengths = set(workload.seq_lens)
        assert {0, 1, 15, 16, 17} <= lengths
        assert max(lengths) > 512
        assert workload.seq_lens[1] <= workload.q_lens[1]
        case = Case.make(spec, workload, seed=1, poison=True)
        owned = np.unique(case.steps[0].block_table)
        assert len(owned) < len(case.k_cache)
        for cache in (case.k_cache, case.v_cache):
            missing = cache.isnan().any(dim=-1).all(dim=1)
            assert int((~missing).sum()) == sum(workload.seq_lens)
            assert bool(missing.any())


def test_block_tables_are_valid_and_every_set_is_used_in_turn() -> None:
    spec = AttentionSpec.make("decode", "float32", 64, 3, 16)
    case = Case.make(spec, Workload(2, (1, 1), (40, 33)), num_steps=3, seed=0)
    blocks = [np.unique(step.block_table) for step in case.steps]
    assert all(each.max() < len(case.k_cache) for each in blocks)
    used = [
        {int(b) for s, n in enumerate((3, 3)) for b in step.block_table[s, :n]}
        for step in case.steps
    ]
    assert len(set.union(*used)) == 18
    seen: list[int] = []
    choices = schedules.default_choices(spec, TARGET)

    def attention(q: Any, k: Any, v: Any, table: Any, *rest: Any) -> None:
        seen.append(int(table[0, 0]))

    # What one contender has read would be in the caches of the next: they share the turns.
    contenders = [case.bind(attention, lambda *a: None, choices, 2) for _ in range(2)]
    for call in contenders * 3:
        call()
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3
    for tensor in (case.q, case.k_cache, case.v_cache, case.out, case.lse):
        assert tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("rotation_bytes", [1, 1 << 22])
def test_as_many_bytes_are_read_before_the_same_again_as_were_asked_for(
    rotation_bytes: int,
) -> None:
    workload = Workload(2, (1, 1), (40, 1100))
    case = measure_worker._case(SPEC, json.dumps(workload.as_dict()), 0, rotation_bytes)
    assert len(case.steps) >= 2
    assert len(case.steps) * workload.kv_bytes(SPEC) >= rotation_bytes


def test_a_kernel_that_touches_unused_slots_is_wrong() -> None:
    right = honest(SPEC)

    def greedy(q: Any, k: Any, *rest: Any) -> None:
        right(q, k, *rest)
        rest[4].add_(0.0 * k.sum())

    assert "NaN" in ask(SPEC, greedy)


@pytest.mark.parametrize("which", [6, 7], ids=["out", "lse"])
def test_a_kernel_that_leaves_what_the_last_one_wrote_is_wrong(which: int) -> None:
    right = honest(SPEC)

    def lazy(*args: Any) -> None:
        untouched = [torch.clone(each) for each in (args[which],)]
        right(*args)
        args[which].copy_(untouched[0])

    assert ask(SPEC, right) == ""
    assert ask(SPEC, lazy)
