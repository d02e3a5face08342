"""Inputs at which paged-attention kernels are known to go wrong, and what is right for each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import NAN, assert_close, assert_equals_reference, make_case, random_rows, run

from tvmpaged import PagedAttention, merge_states
from tvmpaged.spec import DTYPES

Attention = Callable[..., PagedAttention]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 17, 48, 71])
def test_every_head_of_a_group_is_written(
    generic: Attention, rng: np.random.Generator, group_size: int, dtype: str
) -> None:
    """Groups that no tile of rows divides; out is poisoned, so a head left out shows."""
    attn = generic(group_size, 64, 16, dtype)
    assert_equals_reference(attn, make_case(rng, attn, [1, 3, 1, 2], [40, 17, 1, 9]))


def test_28_heads_over_4(generic: Attention, rng: np.random.Generator, dtype: str) -> None:
    attn = generic(7, 128, 16, dtype, num_kv_heads=4)
    assert attn.num_qo_heads == 28
    assert_equals_reference(attn, make_case(rng, attn, [1, 5], [33, 20]))


@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 80, 96, 112, 128, 192, 256, 512])
def test_any_head_dim_is_exact_from_the_first_to_the_last_token(
    generic: Attention, rng: np.random.Generator, head_dim: int, dtype: str
) -> None:
    """Also with several new tokens over cached context."""
    attn = generic(2, head_dim, 16, dtype)
    case = make_case(rng, attn, [50, 5, 1, 1], [50, 45, 1, 50])
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 48, 255, 256])
def test_any_block_size(
    generic: Attention, rng: np.random.Generator, block_size: int, layout: str
) -> None:
    attn = generic(3, 64, block_size, "float32", layout=layout)
    case = make_case(rng, attn, [1, 4, 1, 1, 3], [block_size, block_size + 2, 600, 1, 3])
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_float32_queries_over_narrow_caches(
    generic: Attention, rng: np.random.Generator, kv_dtype: str, layout: str
) -> None:
    """Only the stored K and V are rounded: the error is that of float32."""
    attn = generic(3, 64, 16, "float32", kv_dtype=kv_dtype, layout=layout)
    assert_equals_reference(attn, make_case(rng, attn, [1, 6, 1], [100, 33, 5], scale=4.0))


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("unused", [NAN, float("inf"), float("-inf")])
def test_unused_slots_never_reach_the_output(
    generic: Attention, rng: np.random.Generator, unused: float, q_len: int, dtype: str
) -> None:
    """Blocks of 4, length 13: three slots of the last block are unused. 0 x NaN would be NaN."""
    attn = generic(3, 64, 4, dtype)
    assert_equals_reference(attn, make_case(rng, attn, [q_len], [13], unused=unused))


@pytest.mark.parametrize("q_len", [1, 3])
def test_a_length_that_fills_its_last_block(
    generic: Attention, rng: np.random.Generator, q_len: int, dtype: str
) -> None:
    attn = generic(1, 64, 4, dtype)
    assert_equals_reference(attn, make_case(rng, attn, [q_len], [8]))


@pytest.mark.parametrize("q_len", [1, 2, 70])
def test_logits_below_minus_fifty_thousand(
    generic: Attention, rng: np.random.Generator, q_len: int, dtype: str
) -> None:
    """Finite, so not to be taken for masked.

    A float32 near 60,000 is rounded to 2**-24 of that; the products of the 63 dimensions after the
    first are added there, one by one.
    """
    attn = generic(3, 64, 16, dtype)
    case = make_case(rng, attn, [q_len], [q_len + 20])
    case.q[..., 0] = 128.0
    for position in range(q_len + 20):
        block, offset = case.slot(0, position)
        case.by_slot()[0][block, offset, :, 0] = -3750.0  # times 128 / 8: -60,000
    expected, expected_lse = case.expected()
    assert expected_lse.max() < -50_000
    assert_close(*run(attn, case), expected, expected_lse, slack=60_000 * 2**-24 * 64**0.5)


@pytest.mark.parametrize("q_len", [1, 6])
def test_large_logits_cost_no_more_than_the_dtypes_rounding(
    generic: Attention, rng: np.random.Generator, q_len: int, dtype: str
) -> None:
    """A scale folded into 16-bit q would round every logit."""
    attn = generic(3, 64, 16, dtype)
    case = make_case(rng, attn, [q_len] * 8, [60] * 8, scale=20.0)
    assert_equals_reference(attn, case)
    scaled = replace(case, q=case.q / 20, sm_scale=20 / 8)
    assert_equals_reference(attn, scaled)


@pytest.mark.parametrize("sm_scale", [0.0, 1e-3, -0.5, 3.0])
def test_sm_scale_is_free(generic: Attention, rng: np.random.Generator, sm_scale: float) -> None:
    attn = generic(3, 64, 16, "float32")
    case = replace(make_case(rng, attn, [1, 4], [30, 9]), sm_scale=sm_scale)
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("causal", [True, False])
def test_more_new_tokens_than_visible_keys(
    generic: Attention, rng: np.random.Generator, causal: bool, dtype: str
) -> None:
    """The early rows see nothing: out 0, lse -inf."""
    attn = generic(3, 64, 4, dtype)
    case = make_case(rng, attn, [9, 1, 70, 2], [3, 0, 5, 0], causal=causal)
    _, lse = case.expected()
    assert np.isneginf(lse).any()
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("q_lens", [[1, 1, 1], [2, 3, 4], [1, 0, 3]])
def test_an_empty_sequence_in_a_mixed_batch_then_a_merge(
    generic: Attention,
    base_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    q_lens: list[int],
) -> None:
    """The part that saw nothing has no weight."""
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(base_bundle))
    attn = generic(3, 64, 4, "float32")
    empty = make_case(rng, attn, q_lens, [7, 0, 5])
    assert_equals_reference(attn, empty)
    other = make_case(rng, attn, q_lens, [7, 6, 5])
    a, b = run(attn, empty), run(attn, other)
    out, lse = merge_states(*a, *b)
    rows = slice(*empty.query_start_loc[1:3])
    assert torch.equal(out[rows], b[0][rows])
    assert torch.equal(lse[rows], b[1][rows])


@pytest.mark.parametrize("length", [1500, 513, 512])
def test_a_sequence_of_several_kv_ranges(
    generic: Attention, rng: np.random.Generator, length: int, dtype: str
) -> None:
    """Decode, a short chunk (split too), and one too long to be split."""
    attn = generic(2, 64, 16, dtype)
    case = make_case(rng, attn, [1, 8, 80, 1], [length, length + 600, length, 3])
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("poisoned", ["q", "k", "v"])
@pytest.mark.parametrize("length", [9, 1300])
@pytest.mark.parametrize("q_len", [1, 4])
def test_nan_that_a_row_sees_shows_in_that_row(
    generic: Attention,
    rng: np.random.Generator,
    poisoned: str,
    length: int,
    q_len: int,
    dtype: str,
) -> None:
    """And in no other sequence: a broken activation must not be hidden as 0, nor spread.

    In one kv range and in several, whose merge must not take NaN for a part that saw nothing.
    """
    attn = generic(3, 64, 4, dtype)
    case = make_case(rng, attn, [q_len] * 3, [length] * 3)
    if poisoned == "q":
        case.q[q_len : 2 * q_len, 2, 5] = NAN
    else:
        block, offset = case.slot(1, length - q_len - 2)
        case.by_slot()["kv".index(poisoned)][block, offset, 0, 5] = NAN
    out, lse = run(attn, case)
    mine = slice(q_len, 2 * q_len)
    # The kv head of query heads 0..2; one element of v is one of out, and none of lse.
    heads = slice(2, 3) if poisoned == "q" else slice(0, 3)
    assert (out[mine, heads, 5] if poisoned == "v" else out[mine, heads]).isnan().all()
    assert (lse[mine, heads].isfinite() if poisoned == "v" else lse[mine, heads].isnan()).all()
    assert torch.cat([out[:q_len], out[2 * q_len :]]).isfinite().all()
    assert out[mine, 3:].isfinite().all()


def test_rows_past_the_plan_leave_out_untouched(
    generic: Attention, rng: np.random.Generator
) -> None:
    """Engines pad q to a fixed number of rows."""
    attn = generic(3, 64, 4, "float32")
    case = make_case(rng, attn, [1, 2], [5, 9])
    expected, _ = run(attn, case)
    q = torch.cat([case.q, torch.full((4, 6, 64), NAN, dtype=case.q.dtype)])
    out = torch.full_like(q, 7.0)
    assert attn.run(attn.plan(*case.step), q, case.k_cache, case.v_cache, out=out) is out
    assert torch.equal(out[:3], expected)
    assert (out[3:] == 7).all()
    fresh = attn.run(attn.plan(*case.step), q, case.k_cache, case.v_cache)
    assert torch.equal(fresh[:3], expected)
    assert not fresh[3:].any()


def test_a_step_without_tokens_touches_nothing(
    generic: Attention, rng: np.random.Generator
) -> None:
    attn = generic(3, 64, 4, "float32")
    case = make_case(rng, attn, [0, 0], [5, 0])
    q, out = (torch.full((2, 6, 64), x, dtype=case.q.dtype) for x in (0.0, 7.0))
    attn.run(attn.plan(*case.step), q, case.k_cache, case.v_cache, out=out)
    assert (out == 7).all()
    out, lse = attn.run(attn.plan(*case.step), q[:0], case.k_cache, case.v_cache, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 6, 64), (0, 6))


def test_q_and_out_may_be_views(generic: Attention, rng: np.random.Generator, dtype: str) -> None:
    """Of a fused projection, with odd strides; q also unaligned or broadcast."""
    attn = generic(3, 64, 4, dtype)
    case = make_case(rng, attn, [1, 4, 2], [5, 9, 30])
    expected, _ = run(attn, case)
    fused = torch.full((7, 18, 64 + 3), NAN, dtype=attn.dtype)
    fused[:, 6:12, 1:65] = case.q
    unaligned = replace(case, q=fused[:, 6:12, 1:65])
    for out in (
        torch.full((7, 18, 64), NAN, dtype=attn.dtype)[:, 6:12],
        torch.full((7, 6, 67), NAN, dtype=attn.dtype)[..., :64],
        torch.full((6, 7, 64), NAN, dtype=attn.dtype).transpose(0, 1),
        torch.full((14, 6, 64), NAN, dtype=attn.dtype)[::2],
    ):
        assert run(attn, unaligned, out=out)[0] is out
        assert torch.equal(out, expected)
        out.fill_(NAN)
        run(attn, replace(case, q=out.copy_(case.q).clone()), out=out.fill_(NAN))
        assert torch.equal(out, expected)
    same = replace(case, q=case.q[:1, :1].expand(7, 6, 64))
    assert torch.equal(run(attn, same, out=None)[0], run(attn, replace(same, q=same.q.clone()))[0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numpy_arrays_give_numpy_arrays(
    generic: Attention, rng: np.random.Generator, dtype: str
) -> None:
    """Unaligned ones, as NumPy's are."""
    attn = generic(3, 64, 4, dtype)
    case = make_case(rng, attn, [1, 4], [5, 9])
    expected, expected_lse = run(attn, case)
    out, lse = run(attn, replace(case, q=case.q.numpy().copy()), out=None)
    assert isinstance(out, np.ndarray)
    assert isinstance(lse, np.ndarray)
    assert (out == expected.numpy()).all()
    assert (lse == expected_lse.numpy()).all()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


FAR = 131_071  # with 8 heads x 16 x 128, element 2**31 lies in the block after the next


@pytest.mark.parametrize("kind", ["generic", "generic NHD", "specialised"])
def test_a_pool_of_more_than_two_to_the_31_elements(
    generic: Attention, specialised: Attention, rng: np.random.Generator, kind: str
) -> None:
    """The same result on both sides of the edge, from pages that were never touched otherwise."""
    make = specialised if kind == "specialised" else generic
    layout = "NHD" if "NHD" in kind else "HND"
    attn = make(8, 128, 16, "bfloat16", num_kv_heads=8, layout=layout)
    before = resident_bytes()
    near, far = attn.new_cache(8), attn.new_cache(2 * FAR + 8)
    assert far[0].numel() > 2**32
    tables = [1, 2, 3], [FAR, FAR + 1, FAR + 2], [2 * FAR + 3, 2 * FAR + 4, 2 * FAR + 5]
    k, v = (random_rows(rng, (40, 8, 128), attn.dtype) for _ in range(2))
    q = random_rows(rng, (7, 64, 128), attn.dtype)
    found = []
    for caches, table in zip((near, far, far), tables, strict=True):
        plan = attn.plan([0, 40], [40], [table])
        attn.append_kv(k, v, *caches, plan.slot_mapping)
        steps = ([0, 1], [0, 6])
        outs = [attn.run(attn.plan(s, [40], [table]), q[: s[1]], *caches) for s in steps]
        found.append([*outs, *attn.read_kv(*caches, plan.slot_mapping)])
    attn.copy_blocks(*far, list(zip(tables[1], [5, 6, 7], strict=True)))
    found.append([attn.run(attn.plan([0, 1], [40], [[5, 6, 7]]), q[:1], *far)])
    for each in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(each, found[0], strict=False))
    assert not far[0][FAR - 1].any()
    assert resident_bytes() - before < 256 * 2**20, "a cache costs nothing until it is touched"
    with pytest.raises(ValueError, match="block_table names block"):
        attn.run(attn.plan([0, 1], [1], [[2 * FAR + 8]]), q[:1], *far)


def test_q_and_out_over_more_than_two_to_the_31_elements(
    generic: Attention, rng: np.random.Generator
) -> None:
    """A token stride of 2**29 elements: the fifth token starts at 2**31."""
    attn = generic(3, 64, 4, "float16")
    case = make_case(rng, attn, [1, 5], [5, 9])
    expected, _ = run(attn, case)
    big, _ = attn.new_cache(6 * 2**29 // (2 * 4 * 64))
    spread = big.as_strided((6, 6, 64), (2**29, 64, 1))
    spread.copy_(case.q)
    assert torch.equal(run(attn, replace(case, q=spread))[0], expected)
    run(attn, case, out=spread.fill_(NAN))
    assert torch.equal(spread, expected)
    k = spread[:, :2].copy_(random_rows(rng, (6, 2, 64), torch.float16))
    attn.append_kv(k, k, case.k_cache, case.v_cache, np.arange(6))
    assert torch.equal(attn.read_kv(case.k_cache, case.v_cache, np.arange(6))[0], k)


def test_merging_two_kv_ranges_gives_the_whole(
    generic: Attention,
    base_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    dtype: str,
) -> None:
    """One base of the logarithm everywhere: run each range by itself, merge by lse."""
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(base_bundle))
    attn = generic(3, 64, 4, dtype)
    whole = make_case(rng, attn, [3], [24], causal=False)
    parts = [
        run(attn, replace(whole, seq_lens=np.array([12]), block_table=whole.block_table[:, cut]))
        for cut in (slice(0, 3), slice(3, 6))
    ]
    out, lse = merge_states(*parts[0], *parts[1])
    assert_close(out, lse, *whole.expected(), slack=3e-3 if dtype == "bfloat16" else 4e-4)
