"""The work list: everything is covered once, whatever the lengths; and how plans treat memory."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import starts_of
from hypothesis import given
from hypothesis import strategies as st

from tvmpaged import PagedAttention
from tvmpaged.planning.items import ITEM_OVERHEAD_KEYS, Shape, _outline, balance, make_items
from tvmpaged.planning.step import Step, check_step
from tvmpaged.runtime.plan import Plan
from tvmpaged.worklist import MAX_SPLIT_Q_LEN, Item, Merge

pytestmark = pytest.mark.runtime

Attention = Callable[..., PagedAttention]


@dataclass(frozen=True)
class Work:
    """A step and the work list that was made of it."""

    step: Step
    shape: Shape
    causal: bool
    num_kv_heads: int
    group_size: int

    def make(self, first_partial: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
        everything = np.arange(len(self.step.seq_lens))
        return make_items(
            self.step,
            everything,
            self.shape,
            self.num_kv_heads,
            self.group_size,
            self.causal,
            first_partial,
        )

    def visible(self, seq: int, token: int) -> int:
        """Return how many keys a token sees, straight from the promise."""
        length, q_len = int(self.step.seq_lens[seq]), int(self.step.q_lens[seq])
        return max(0, length - q_len + token + 1) if self.causal else length


def step_of(q_lens: list[int], seq_lens: list[int], block_size: int = 4) -> Step:
    needed = [-(-length // block_size) for length in seq_lens]
    table = np.full((len(seq_lens), max(needed, default=0)), -1, np.int32)
    blocks = iter(range(sum(needed)))
    for seq, count in enumerate(needed):
        table[seq, :count] = [next(blocks) for _ in range(count)]
    return check_step(
        starts_of(q_lens),
        np.array(seq_lens, np.int64),
        table.reshape(len(seq_lens), -1),
        block_size,
    )


sequences = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), min_size=1, max_size=6)
works = st.builds(
    lambda seqs, shape, causal, kv_heads, group: Work(
        step_of([q for q, _ in seqs], [length for _, length in seqs]),
        shape,
        causal,
        kv_heads,
        group,
    ),
    sequences,
    st.builds(Shape, st.integers(1, 9), st.sampled_from([0, 1, 8, 16, 32, 1000])),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 5),
)


def keys_of(item: np.ndarray, row: int, group_size: int) -> tuple[int, int]:
    """Return the half-open range of keys that a kernel walks for a row: see `worklist`."""
    limit = min(item[Item.KV_END], item[Item.VISIBLE] + row // group_size)
    return int(item[Item.KV_BEGIN]), max(int(item[Item.KV_BEGIN]), int(limit))


@given(works)
def test_the_heads_of_a_kv_range_follow_each_other(work: Work) -> None:
    """As they lie in a block: what is read ahead of one is the next."""
    items, _, _ = work.make()
    columns = (Item.SEQ, Item.KV_BEGIN, Item.KV_HEAD, Item.ROW_BEGIN)
    order = [tuple(item[column] for column in columns) for item in items]
    assert order == sorted(order)


@given(works)
def test_every_row_and_head_meets_every_visible_key_once(work: Work) -> None:
    items, _, _ = work.make()
    shape = (work.num_kv_heads, 70 * work.group_size, 90)
    met = [np.zeros(shape, np.int8) for _ in work.step.seq_lens]
    for item in items:
        for row in range(item[Item.ROW_BEGIN], item[Item.ROW_END]):
            begin, end = keys_of(item, row, work.group_size)
            met[item[Item.SEQ]][item[Item.KV_HEAD], row, begin:end] += 1
    for seq, q_len in enumerate(work.step.q_lens):
        expected = np.zeros(shape[1:], np.int8)
        for row in range(q_len * work.group_size):
            expected[row, : work.visible(seq, row // work.group_size)] = 1
        assert (met[seq] == expected).all()


@given(works)
def test_every_row_is_written_once_directly_or_once_per_range(work: Work) -> None:
    items, merges, next_partial = work.make(first_partial=5)
    written: Counter[tuple[str, int, int]] = Counter()
    for item in items:
        for row in range(item[Item.ROW_BEGIN], item[Item.ROW_END]):
            token = row // work.group_size
            head = int(item[Item.KV_HEAD]) * work.group_size + row % work.group_size
            direct = item[Item.PARTIAL] < 0
            to = item[Item.Q_START] if direct else item[Item.PARTIAL]
            written["out" if direct else "partial", int(to) + token, head] += 1
    assert set(written.values()) <= {1}

    heads = range(work.num_kv_heads * work.group_size)
    merged = {int(merge[Merge.OUT_ROW]) for merge in merges}
    direct = set(range(work.step.num_tokens)) - merged
    assert {(to, head) for where, to, head in written if where == "out"} == {
        (row, head) for row in direct for head in heads
    }
    partials = [
        int(merge[Merge.PARTIAL] + i * merge[Merge.STRIDE])
        for merge in merges
        for i in range(merge[Merge.COUNT])
    ]
    assert sorted(partials) == list(range(5, next_partial)), "each partial row has one reader"
    assert {(to, head) for where, to, head in written if where == "partial"} == {
        (row, head) for row in partials for head in heads
    }


@given(works)
def test_merges_go_left_to_right_over_ranges_at_multiples_of_the_split(work: Work) -> None:
    items, merges, _ = work.make()
    split = work.shape.split_length
    begin_of = {}
    for item in items:
        if item[Item.PARTIAL] >= 0:
            for row in range(item[Item.ROW_BEGIN], item[Item.ROW_END]):
                token = row // work.group_size
                begin_of[int(item[Item.PARTIAL]) + token] = int(item[Item.KV_BEGIN])
            assert item[Item.KV_BEGIN] % split == 0
            assert item[Item.KV_END] - item[Item.KV_BEGIN] <= split
    for merge in merges:
        ranges = [
            begin_of[int(merge[Merge.PARTIAL] + i * merge[Merge.STRIDE])]
            for i in range(merge[Merge.COUNT])
        ]
        assert ranges == [i * split for i in range(len(ranges))]


@given(works, st.integers(0, 5))
def test_a_sequences_items_do_not_depend_on_the_others(work: Work, pick: int) -> None:
    """But for where its rows and partials stand."""
    seq = pick % len(work.step.seq_lens)
    q_len, length = int(work.step.q_lens[seq]), int(work.step.seq_lens[seq])
    alone = Work(
        step_of([q_len], [length]), work.shape, work.causal, work.num_kv_heads, work.group_size
    )
    items, _, _ = work.make()
    mine, single = items[items[:, Item.SEQ] == seq], alone.make()[0]
    same = [Item.KV_HEAD, Item.ROW_BEGIN, Item.ROW_END, Item.KV_BEGIN, Item.KV_END, Item.VISIBLE]
    assert mine[:, same].tolist() == single[:, same].tolist()
    assert ((mine[:, Item.PARTIAL] < 0) == (single[:, Item.PARTIAL] < 0)).all()


@given(works)
def test_a_step_later_only_what_changed_is_made_anew(work: Work) -> None:
    """An outline that was kept gives what a fresh one does."""
    work.make()
    q_lens, seq_lens = work.step.q_lens.tolist(), work.step.seq_lens.tolist()
    later = replace(work, step=step_of(q_lens, [length + 1 for length in seq_lens]))
    found = later.make()
    _outline.cache_clear()
    for one, other in zip(found, later.make(), strict=True):
        assert np.array_equal(one, other)


def test_decoding_keeps_its_outline_until_a_sequence_needs_another_range() -> None:
    _outline.cache_clear()
    for length in range(60, 68):
        Work(step_of([1, 1], [length, 30]), Shape(4, 64), True, 2, 4).make()
    assert _outline.cache_info().misses == 2


def test_long_prompts_are_never_split_and_short_ones_are() -> None:
    for q_len, ranges in ((MAX_SPLIT_Q_LEN, 4), (MAX_SPLIT_Q_LEN + 1, 1)):
        work = Work(step_of([q_len], [400]), Shape(10**6, 100), True, 1, 1)
        assert len(work.make()[0]) == ranges


@given(works, st.integers(1, 9))
def test_no_worker_has_more_than_its_share_and_one_item(work: Work, num_workers: int) -> None:
    items, _, _ = work.make()
    dealt = balance(items, num_workers)
    assert len(dealt.offsets) == num_workers + 1
    assert dealt.offsets[0] == 0
    assert dealt.offsets[-1] == len(items)
    assert (np.diff(dealt.offsets) >= 0).all()
    assert dealt.is_empty == (len(items) == 0)
    keys = items[:, Item.KV_END] - items[:, Item.KV_BEGIN] + ITEM_OVERHEAD_KEYS
    cost = keys * (items[:, Item.ROW_END] - items[:, Item.ROW_BEGIN])
    loads = [
        cost[begin:end].sum() for begin, end in zip(dealt.offsets, dealt.offsets[1:], strict=False)
    ]
    assert max(loads) <= cost.sum() / num_workers + cost.max(initial=0)


def test_an_even_batch_is_dealt_evenly() -> None:
    work = Work(step_of([1] * 12, [64] * 12), Shape(4, 0), True, 2, 4)
    assert np.diff(balance(work.make()[0], 4).offsets).tolist() == [6, 6, 6, 6]


@given(sequences, st.integers(1, 9))
def test_new_tokens_go_to_the_last_positions(seqs: list[tuple[int, int]], block: int) -> None:
    step = step_of([q for q, _ in seqs], [length for _, length in seqs], block)
    expected = []
    for seq, (q_len, length) in enumerate(seqs):
        for position in range(length - q_len, length):
            table = step.block_table[seq]
            slot = table[position // block] * block + position % block if position >= 0 else -1
            expected.append(int(slot))
    assert step.slot_mapping.tolist() == expected
    assert step.max_slot == max([-1, *expected])


# How `PagedAttention.plan` treats what it is given.


@pytest.fixture
def attn(generic: Attention) -> PagedAttention:
    return generic(3, 64, 4, "float32")


STEP = ([0, 1, 3, 3], [5, 6, 0], [[7, 2], [0, 9], [-1, -1]])


def test_a_plan_says_what_it_needs_of_the_cache(attn: PagedAttention) -> None:
    plan = attn.plan(*STEP)
    assert plan.num_tokens == 3
    assert plan.slot_mapping.tolist() == [8, 36, 37]
    assert (plan.max_block_id, plan.max_slot) == (9, 37)


def test_one_block_size_filled_to_its_last_slot_needs_no_other_block(attn: PagedAttention) -> None:
    plan = attn.plan([0, 1], [8], [[3, 1]])
    assert plan.slot_mapping.tolist() == [7]
    with pytest.raises(ValueError, match=r"seq_lens\[0\]=9 needs 3 blocks of 4"):
        attn.plan([0, 1], [9], [[3, 1]])


def test_plans_copy_their_inputs(attn: PagedAttention) -> None:
    inputs = [np.array(each, np.int32) for each in STEP]
    plan, same = attn.plan(*inputs), attn.plan(*STEP)
    for each in inputs:
        each[:] = 1
    assert plan.slot_mapping.tolist() == same.slot_mapping.tolist()
    assert plan.block_table.tolist() == same.block_table.tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_index_arrays_are_int32_or_int64_and_rows_of_the_table_may_be_strided(
    attn: PagedAttention, dtype: type
) -> None:
    table = np.full((3, 10), 99, dtype)
    table[:, 2:4] = STEP[2]
    plan = attn.plan(np.array(STEP[0], dtype), np.array(STEP[1], dtype), table[:, 2:4])
    assert plan.slot_mapping.tolist() == [8, 36, 37]


def test_a_step_without_sequences_or_tokens_is_legal(attn: PagedAttention) -> None:
    for plan in (attn.plan([0], [], np.zeros((0, 0), np.int32)), attn.plan([0, 0], [0], [[-1]])):
        assert plan.num_tokens == 0
        assert not plan.work


def tensors_of(plan: Plan) -> list[torch.Tensor]:
    """Return all tensors in a plan's memory; of its work, those of decode."""
    scratch = [plan.partial_out, plan.partial_lse, plan.lse]
    return [plan.slots, plan.block_table, *plan.work["decode"], *scratch]


def test_into_reuses_the_memory_of_a_plan(attn: PagedAttention) -> None:
    largest = attn.plan(*STEP)
    smaller = attn.plan([0, 1], [2], [[4, -1]], into=largest)
    for each, other in zip(tensors_of(largest), tensors_of(smaller), strict=True):
        assert each.data_ptr() == other.data_ptr()
    assert smaller.slot_mapping.tolist() == [17]
    again = attn.plan(*STEP, into=smaller)
    assert again.slot_mapping.tolist() == [8, 36, 37]


def test_into_has_a_fixed_capacity(attn: PagedAttention) -> None:
    with pytest.raises(ValueError, match="into: its buffer"):
        attn.plan(*STEP, into=attn.plan([0, 1], [2], [[4]]))


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (([0, 1, 2], [2, 2], [[4], [5]]), ([0, 1, 2], [1, 600], [[3] * 150, [*range(150)]])),
        (([0, 1, 3], [700, 9], [[*range(175)], [9] * 175]), ([0, 20], [700], [[*range(175)]])),
        (([0, 1], [1], [[4]]), ([0, 1], [1], [[4, -1]])),
    ],
    ids=["first buffer", "prefill only", "table"],
)
def test_a_step_that_does_not_fit_leaves_the_plan_as_it_was(
    attn: PagedAttention, small: tuple[Any, ...], large: tuple[Any, ...]
) -> None:
    plan = attn.plan(*small)
    before = [tensor.clone() for tensor in tensors_of(plan)]
    with pytest.raises(ValueError, match="into: its buffer"):
        attn.plan(*large, into=plan)
    for tensor, was in zip(tensors_of(plan), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), was.view(torch.uint8))
    assert plan.is_current


def test_a_plan_whose_memory_was_taken_over_does_not_run(attn: PagedAttention) -> None:
    """Its table and items are another step's: a kernel would read past their ends."""
    base = attn.plan(*STEP)
    first = attn.plan([0, 1], [2], [[4, -1]], into=base)
    second = attn.plan([0, 1], [2], [[4, -1]], into=base)
    q, caches = torch.zeros(1, attn.num_qo_heads, attn.head_dim), attn.new_cache(10)
    attn.run(second, q, *caches)
    for stale in (base, first):
        assert not stale.is_current
        with pytest.raises(ValueError, match="plan's memory was given to a later one"):
            attn.run(stale, q.expand(3, -1, -1), *caches)


def test_a_plan_whose_memory_was_half_taken_over_is_over(
    attn: PagedAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = attn.plan(*STEP)
    monkeypatch.setattr("tvmpaged.runtime.plan.Plan", None)  # fails after the memory was written
    with pytest.raises(TypeError):
        attn.plan([0, 1], [2], [[4, -1]], into=plan)
    assert not plan.is_current


def test_memory_is_used_again_when_its_plan_is_gone(attn: PagedAttention) -> None:
    """Not before: each of the plans that are alive reads its own step."""
    plans = [attn.plan([0, 1], [2], [[block]]) for block in range(3)]
    assert len({plan.slots.data_ptr() for plan in plans}) == 3
    assert [plan.slots.tolist() for plan in plans] == [[1], [5], [9]]
    mapping, address = plans[-1].slot_mapping, plans.pop().slots.data_ptr()
    again = attn.plan([0, 1], [3], [[7]])
    assert again.slots.data_ptr() == address
    assert again.slots.tolist() == again.slot_mapping.tolist() == [30]
    assert mapping.tolist() == [9], "a slot mapping is its holder's for good"
    del again
    larger = attn.plan([0, 2], [6], [[3, 4]])
    assert larger.slots.tolist() == [16, 17]
    assert all(plan.is_current for plan in plans)


def test_memory_that_was_given_away_goes_to_nobody_else(attn: PagedAttention) -> None:
    base = attn.plan(*STEP)
    attn.plan([0, 1], [2], [[4, -1]], into=base)
    other = attn.plan([0, 1], [2], [[4, -1]])
    attn.plan([0, 1], [2], [[5, -1]], into=base)
    assert other.is_current
    assert other.slots.tolist() == [17]


def test_steps_of_one_batch_share_tensors_but_not_content(
    attn: PagedAttention, generic: Attention
) -> None:
    """From step to step only lengths and slots change, until a sequence takes another block."""
    table = [[7, 2, 8], [0, 9, 1]]
    for length in range(3, 10):
        plan = attn.plan([0, 1, 2], [length, length + 1], table)
        slots = [
            row[at // 4] * 4 + at % 4 for row, at in zip(table, (length - 1, length), strict=True)
        ]
        assert plan.slots.tolist() == slots
        fresh = generic(3, 64, 4, "float32").plan([0, 1, 2], [length, length + 1], table)
        for one, other in zip(tensors_of(plan)[:4], tensors_of(fresh)[:4], strict=True):
            assert torch.equal(one, other)
        del plan
