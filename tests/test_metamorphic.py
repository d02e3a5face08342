"""Relations between two runs that must hold whatever the numbers are."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import TOLERANCE, Case, assert_close, make_case, random_rows, relative_error, run

from tvmpaged import BlockManager, PagedAttention, reference
from tvmpaged.spec import DTYPES

pytestmark = pytest.mark.runtime

Attention = Callable[..., PagedAttention]
Q_LENS, SEQ_LENS = [1, 5, 0, 1, 9, 3], [13, 30, 4, 600, 9, 2]


@pytest.fixture(params=DTYPES)
def attn(request: pytest.FixtureRequest, generic: Attention) -> PagedAttention:
    return generic(3, 64, 4, request.param)


def tolerance(attn: PagedAttention) -> float:
    return TOLERANCE[str(attn.dtype).removeprefix("torch.")]


@pytest.mark.parametrize("causal", [True, False])
def test_what_stands_in_unused_slots_does_not_matter(
    attn: PagedAttention, rng: np.random.Generator, causal: bool
) -> None:
    case = make_case(rng, attn, Q_LENS, SEQ_LENS, unused=0.0, causal=causal)
    out, lse = run(attn, case)
    used = torch.zeros(case.by_slot()[0].shape[:2], dtype=torch.bool)
    for seq, length in enumerate(SEQ_LENS):
        for position in range(length):
            used[case.slot(seq, position)] = True
    for unused in (torch.nan, torch.inf, -torch.inf):
        for cache in case.by_slot():
            cache[~used] = unused
        again, lse_again = run(attn, case)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)


def test_what_stood_in_out_does_not_matter(attn: PagedAttention, rng: np.random.Generator) -> None:
    case = make_case(rng, attn, Q_LENS, SEQ_LENS)
    out, lse = run(attn, case)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    for before in (0.0, torch.inf, 1e4):
        assert torch.equal(run(attn, case, out=torch.full_like(case.q, before))[0], out)


def test_a_zero_query_gives_the_mean_of_the_visible_values(
    attn: PagedAttention, rng: np.random.Generator
) -> None:
    case = make_case(rng, attn, [1, 3], [40, 9])
    case = replace(case, q=torch.zeros_like(case.q))
    out, lse = run(attn, case)
    v = [
        reference.gather_kv(case.v_cache, case.block_table[seq], length)
        for seq, length in enumerate((40, 9))
    ]
    for row, values in enumerate((v[0], v[1][:7], v[1][:8], v[1])):
        mean = np.repeat(values.mean(axis=0), 3, axis=0)  # once per head of the group
        assert relative_error(out[row], mean) < tolerance(attn)
        assert lse[row].tolist() == pytest.approx([np.log(len(values))] * 6, rel=1e-6)


def test_a_constant_added_to_every_logit_moves_lse_alone(
    generic: Attention, rng: np.random.Generator
) -> None:
    """Through one dimension of q and k that is the same for all."""
    attn = generic(3, 64, 4, "float32")
    case = make_case(rng, attn, [1, 4], [40, 9])
    case.q[..., 7] = 8.0  # times sm_scale: 1 for each unit of k
    found = []
    for constant in (0.0, 5.0, -40.0):
        for seq, length in enumerate((40, 9)):
            for position in range(length):
                block, offset = case.slot(seq, position)
                case.by_slot()[0][block, offset, :, 7] = constant
        found.append(run(attn, case))
    for (out, lse), constant in zip(found[1:], (5.0, -40.0), strict=True):
        assert relative_error(out, reference.as_array(found[0][0])) < 1e-5
        assert (lse - found[0][1] - constant).abs().max() < 1e-4


def chunks_of(case: Case, cuts: list[int]) -> list[Case]:
    """Return the steps that bring one sequence's tokens in pieces."""
    bounds = [0, *cuts, len(case.q)]
    before = int(case.seq_lens[0]) - len(case.q)
    return [
        replace(
            case,
            q=case.q[begin:end],
            query_start_loc=np.array([0, end - begin]),
            seq_lens=np.array([before + end]),
        )
        for begin, end in pairwise(bounds)
    ]


@pytest.mark.parametrize("cached", [0, 3, 600])
def test_tokens_may_come_at_once_one_by_one_or_in_chunks(
    attn: PagedAttention, rng: np.random.Generator, cached: int
) -> None:
    """Chunks at every boundary. K and V of later tokens stand in the cache already: not seen."""
    case = make_case(rng, attn, [12], [cached + 12])
    expected = case.expected()
    ways = [[], list(range(1, 12)), *([cut] for cut in range(1, 12))]
    for cuts in ways:
        pieces = [run(attn, chunk) for chunk in chunks_of(case, cuts)]
        assert_close(*(torch.cat(each) for each in zip(*pieces, strict=True)), *expected)


def test_doubling_the_values_doubles_the_output(
    generic: Attention, rng: np.random.Generator
) -> None:
    """In bits: a factor of two moves exponents alone."""
    attn = generic(3, 64, 4, "float32")
    case = make_case(rng, attn, Q_LENS, SEQ_LENS)
    doubled = replace(case, v_cache=case.v_cache * 2)
    assert torch.equal(run(attn, doubled)[0], run(attn, case)[0] * 2)


def test_layouts_agree_in_bits(generic: Attention, rng: np.random.Generator) -> None:
    hnd, nhd = (generic(3, 64, 4, "bfloat16", layout=layout) for layout in ("HND", "NHD"))
    case = make_case(rng, hnd, Q_LENS, SEQ_LENS)
    swapped = [cache.transpose(1, 2).contiguous() for cache in (case.k_cache, case.v_cache)]
    other = replace(case, k_cache=swapped[0], v_cache=swapped[1], layout="NHD")
    for one, two in zip(run(hnd, case), run(nhd, other), strict=True):
        assert torch.equal(one, two)


def test_a_childs_new_tokens_leave_the_parents_cache_alone(
    attn: PagedAttention, rng: np.random.Generator
) -> None:
    """Fork in the middle of a block, append to both; the copy comes before the writes."""
    manager, caches = BlockManager(8, 4), attn.new_cache(8)

    def write(names: list[str], begins: list[int], ends: list[int]) -> None:
        attn.copy_blocks(*caches, manager.take_copies())
        tables = [manager.block_table(name) for name in names]
        width = max(map(len, tables))
        tables = [[*table, *[-1] * (width - len(table))] for table in tables]
        counts = np.subtract(ends, begins)
        plan = attn.plan(np.cumsum([0, *counts]), ends, tables)
        rows = random_rows(rng, (int(counts.sum()), 2, 64), attn.dtype)
        attn.append_kv(rows, -rows, *caches, plan.slot_mapping)
        for name in names:
            manager.commit(name)

    def read(name: str, length: int) -> list[torch.Tensor]:
        table = manager.block_table(name)
        slots = [table[i // 4] * 4 + i % 4 for i in range(length)]
        return list(attn.read_kv(*caches, slots))

    manager.allocate("parent", list(range(6)))
    write(["parent"], [0], [6])
    before = read("parent", 6)
    manager.fork("parent", "child")
    manager.append("child", [100, 101, 102])
    manager.append("parent", [200])
    write(["child", "parent"], [6, 6], [9, 7])
    for name in ("parent", "child"):
        assert all(map(torch.equal, read(name, 6), before)), name
    assert not torch.equal(read("parent", 7)[0][6], read("child", 7)[0][6])
    manager.check_integrity()
