"""The reference itself, on cases one can do in one's head."""

import math

import numpy as np
import pytest
import torch

from tvmpaged import reference
from tvmpaged.reference import append_kv, copy_blocks, merge_states, paged_attention

pytestmark = pytest.mark.runtime

Array = np.ndarray


def one_head(values: list[float], keys: list[float] | None = None) -> tuple[Array, Array]:
    """Return caches of one block, one head, head_dim 1."""
    shape = (1, 1, len(values), 1)
    return np.array(keys or [0.0] * len(values)).reshape(shape), np.array(values).reshape(shape)


def attend(q: list[float], caches: tuple[Array, Array], seq_len: int, **more: object) -> tuple:
    """Return out and lse of one sequence whose new tokens are q."""
    rows = np.array(q).reshape(-1, 1, 1)
    out, lse = paged_attention(
        rows, *caches, [0, len(q)], [seq_len], [[0]], return_lse=True, **more
    )
    return out[:, 0, 0].tolist(), lse[:, 0].tolist()


def test_one_key_gives_its_value() -> None:
    assert attend([2.0], one_head([7.0], keys=[3.0]), 1) == ([7.0], [6.0])


def test_weights_are_the_softmax_of_the_logits() -> None:
    """Logits 0 and ln 3: weights 1/4 and 3/4, and the sum of the exponentials is 4."""
    out, lse = attend([1.0], one_head([0.0, 8.0], keys=[0.0, math.log(3)]), 2)
    assert out == pytest.approx([6.0])
    assert lse == pytest.approx([math.log(4)])


def test_sm_scale_multiplies_the_logits() -> None:
    out, lse = attend([1.0], one_head([0.0, 8.0], keys=[0.0, 2 * math.log(3)]), 2, sm_scale=0.5)
    assert out == pytest.approx([6.0])
    assert lse == pytest.approx([math.log(4)])


def test_default_scale_is_one_over_the_root_of_head_dim() -> None:
    cache = np.full((1, 1, 1, 4), 3.0)
    q = np.full((1, 1, 4), 5.0)  # q.k = 60, divided by 2
    _, lse = paged_attention(q, cache, cache, [0, 1], [1], [[0]], return_lse=True)
    assert lse.tolist() == [[30.0]]


def test_a_zero_query_averages_what_it_sees() -> None:
    assert attend([0.0], one_head([1.0, 2.0, 6.0, 99.0]), 3) == (
        [3.0],
        [pytest.approx(math.log(3))],
    )


def test_causal_rows_see_themselves_and_what_came_before() -> None:
    out, _ = attend([0.0, 0.0], one_head([1.0, 3.0, 8.0]), 3)
    assert out == pytest.approx([2.0, 4.0])  # (1 + 3) / 2, then (1 + 3 + 8) / 3


def test_without_the_causal_mask_all_rows_see_all() -> None:
    out, _ = attend([0.0, 0.0], one_head([1.0, 3.0, 8.0]), 3, causal=False)
    assert out == pytest.approx([4.0, 4.0])


def test_a_row_before_the_first_key_sees_nothing() -> None:
    out, lse = attend([0.0, 0.0, 0.0], one_head([1.0, 3.0]), 2)
    assert out == [0.0, 1.0, 2.0]
    assert lse[0] == -math.inf


def test_logits_far_below_zero_are_no_special_case() -> None:
    out, lse = attend([1.0], one_head([2.0, 4.0], keys=[-60_000.0, -60_000.0]), 2)
    assert out == [3.0]
    assert lse == pytest.approx([-60_000 + math.log(2)])


def test_heads_of_a_group_share_their_kv_head() -> None:
    k = np.zeros((1, 2, 1, 1))
    v = np.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    out = paged_attention(np.zeros((1, 6, 1)), k, v, [0, 1], [1], [[0]])
    assert out.ravel().tolist() == [10, 10, 10, 20, 20, 20]


def test_the_block_table_gives_the_order_and_unused_slots_are_not_read() -> None:
    """Blocks of 2, positions 0..2 in block 2 and slot 0 of block 0."""
    v = np.array([[3.0, np.nan], [np.nan, np.nan], [1.0, 2.0]]).reshape(3, 1, 2, 1)
    k = np.where(np.isnan(v), np.nan, 0.0)
    seen = [
        paged_attention(np.zeros((1, 1, 1)), k, v, [0, 1], [n], [[2, 0, -1]]).item()
        for n in (1, 2, 3)
    ]
    assert seen == [1.0, 1.5, 2.0]


def test_each_sequence_has_its_own_rows_table_and_length() -> None:
    k, v = np.zeros((2, 1, 1, 1)), np.array([5.0, 7.0]).reshape(2, 1, 1, 1)
    out = paged_attention(np.zeros((3, 1, 1)), k, v, [0, 1, 1, 3], [1, 0, 1], [[1], [-1], [0]])
    assert out.ravel().tolist() == [7.0, 0.0, 5.0]  # row 1 is before the third sequence's key


def test_layouts_hold_the_same_numbers(rng: np.random.Generator) -> None:
    q = rng.standard_normal((2, 4, 8))
    k, v = rng.standard_normal((2, 3, 2, 5, 8))
    step = ([0, 2], [9], [[2, 0]])
    swapped = k.swapaxes(1, 2), v.swapaxes(1, 2)
    hnd = paged_attention(q, k, v, *step)
    assert (hnd == paged_attention(q, *swapped, *step, kv_layout="NHD")).all()


def test_bfloat16_tensors_are_widened_exactly() -> None:
    assert reference.as_array(torch.tensor([1.0078125], dtype=torch.bfloat16)) == [1.0078125]


def test_merging_weighs_the_parts_by_their_sums() -> None:
    """Three keys with value 2 and one with value 6: the mean of all four is 3."""
    out, lse = merge_states([[[2.0]]], [[math.log(3)]], [[[6.0]]], [[0.0]])
    assert out.item() == pytest.approx(3.0)
    assert lse.item() == pytest.approx(math.log(4))


def test_merging_ignores_a_part_that_saw_nothing() -> None:
    out, lse = merge_states([[[math.nan]]], [[-math.inf]], [[[6.0]]], [[1.5]])
    assert (out.item(), lse.item()) == (6.0, 1.5)
    out, lse = merge_states([[[1.0]]], [[-math.inf]], [[[1.0]]], [[-math.inf]])
    assert (out.item(), lse.item()) == (0.0, -math.inf)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_append_writes_slots_and_skips_minus_one(layout: str) -> None:
    """Slot 3 of blocks of 2 is block 1, offset 1."""
    k_cache, v_cache = np.zeros((2, 1, 2, 1)), np.zeros((2, 1, 2, 1))
    if layout == "NHD":
        k_cache, v_cache = k_cache.swapaxes(1, 2), v_cache.swapaxes(1, 2)
    k = np.array([5.0, 6.0, 7.0]).reshape(3, 1, 1)
    append_kv(k, 10 * k, k_cache, v_cache, [3, -1, 0], layout)
    assert k_cache.ravel().tolist() == [7, 0, 0, 5]
    assert v_cache.ravel().tolist() == [70, 0, 0, 50]


def test_copies_move_whole_blocks() -> None:
    k = np.arange(6.0).reshape(3, 1, 2, 1)
    v = -k
    copy_blocks(k, v, [(2, 0)])
    assert k.ravel().tolist() == [4, 5, 2, 3, 4, 5]
    assert v.ravel().tolist() == [-4, -5, -2, -3, -4, -5]
