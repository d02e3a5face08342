"""The merge kernel itself: the partials of a row, folded left to right."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import NAN, assert_close, random_rows

from tvmpaged import reference
from tvmpaged.runtime.kernel_set import load_kernel
from tvmpaged.spec import DTYPES, AttentionSpec

pytestmark = pytest.mark.runtime

HEADS, DIM = 3, 72


def merge(
    bundle: Path,
    partials: torch.Tensor,
    lses: torch.Tensor,
    items: list[list[int]],
    dtype: str = "float32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold rows of partials; items are (row of out, first partial, count, stride)."""
    rows = 1 + max(item[0] for item in items)
    out = torch.full((rows, HEADS, DIM), NAN, dtype=getattr(torch, dtype))
    lse = torch.full((rows, HEADS), NAN)
    kernel = load_kernel(AttentionSpec.make("merge", dtype), str(bundle))
    kernel.call(partials, lses, torch.tensor(items, dtype=torch.int32), out, lse)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_partials_equal_the_reference(
    base_bundle: Path, rng: np.random.Generator, dtype: str
) -> None:
    """Two rows whose partials alternate, one of a single partial; some saw nothing."""
    partials = random_rows(rng, (11, HEADS, DIM), torch.float32)
    lses = random_rows(rng, (11, HEADS), torch.float32) * 5
    lses[2], lses[5], lses[10, 1] = -torch.inf, -torch.inf, -torch.inf
    partials[2] = NAN
    items = [[1, 0, 5, 2], [0, 1, 5, 2], [2, 10, 1, 1]]
    expected = np.zeros((3, HEADS, DIM)), np.full((3, HEADS), -np.inf)
    for row, first, count, stride in items:
        for part in range(first, first + count * stride, stride):
            expected[0][row], expected[1][row] = reference.merge_states(
                expected[0][row], expected[1][row], partials[part], lses[part]
            )
    assert_close(*merge(base_bundle, partials, lses, items, dtype), *expected)


def test_partials_are_folded_left_to_right(base_bundle: Path) -> None:
    """A large part first, then a thousand that each vanish beside it: their sum would not."""
    count = 1001
    partials, lses = torch.ones(count, HEADS, DIM), torch.full((count, HEADS), -18.0)
    lses[0] = 0.0
    _, lse = merge(base_bundle, partials, lses, [[0, 0, count, 1]])
    assert not lse.any()
    _, lse = merge(base_bundle, partials.flip(0), lses.flip(0), [[0, 0, count, 1]])
    assert (lse > 1e-5).all()


def test_no_partial_that_saw_anything(base_bundle: Path) -> None:
    partials, lses = torch.full((4, HEADS, DIM), NAN), torch.full((4, HEADS), -torch.inf)
    out, lse = merge(base_bundle, partials, lses, [[0, 0, 4, 1]])
    assert not out.any()
    assert lse.isneginf().all()


def test_nan_in_a_part_that_counts_shows(base_bundle: Path) -> None:
    partials, lses = torch.ones(4, HEADS, DIM), torch.zeros(4, HEADS)
    partials[2, 1, 5] = NAN
    lses[3, 2] = NAN
    out, lse = merge(base_bundle, partials, lses, [[0, 0, 4, 1]])
    assert out[0, 1, 5].isnan()
    assert out[0, 2].isnan().all()
    assert lse[0].isnan().tolist() == [False, False, True]
    assert out[0, 0].isfinite().all()
