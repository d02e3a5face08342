"""Where elements of K and V lie in a cache."""

from itertools import product

import numpy as np
import pytest
import torch

from tvmpaged.layout import (
    LINE,
    PAIRS,
    SIDE,
    fits_pairs,
    from_hnd,
    inner_shape,
    layout_of,
    pair_place,
    read_rows,
    to_hnd,
)
from tvmpaged.spec import AttentionSpec

pytestmark = pytest.mark.runtime

#: (block_size, head_dim): least; stretches of 16 and of 32 keys; heads of no whole tile.
SIZES = list(product((16, 32, 48, 256), (16, 64, 80, 112)))


@pytest.mark.parametrize(("block_size", "head_dim"), SIZES)
@pytest.mark.parametrize("which", ["k", "v"])
def test_every_element_has_a_place_of_its_own(which: str, block_size: int, head_dim: int) -> None:
    slot, dim = np.arange(block_size)[:, None], np.arange(head_dim)
    line, place = pair_place(which, slot, dim, block_size, head_dim)
    _, lines, length = inner_shape(PAIRS, 1, block_size, head_dim)
    assert length == LINE
    assert place.min() == 0
    assert place.max() == LINE - 1
    taken = np.sort((line * LINE + place).ravel())
    assert np.array_equal(taken, np.arange(lines * LINE))


def test_sixteen_lines_are_the_right_operand_of_a_product() -> None:
    """TDPBF16PS: line p holds, element by element, rows 2p and 2p + 1 of a matrix ``[32, 16]``."""
    block_size, head_dim = 32, 64
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 1000, (1, 1, block_size, head_dim))
    k = from_hnd(rows, "k", PAIRS)[0, 0]
    v = from_hnd(rows, "v", PAIRS)[0, 0]
    matrix = rows[0, 0]

    def operand(lines: np.ndarray) -> np.ndarray:
        return lines.reshape(SIDE, SIDE, 2).transpose(0, 2, 1).reshape(LINE, SIDE)

    # Keys 16..31, dims 32..63 of K; keys 0..31, dims 16..31 of V.
    first = SIDE * head_dim // LINE + 32 // 2
    assert (operand(k[first : first + SIDE]) == matrix[16:32, 32:64].T).all()
    assert (operand(v[SIDE : 2 * SIDE]) == matrix[:, 16:32]).all()


@pytest.mark.parametrize("layout", ["HND", "NHD", PAIRS])
@pytest.mark.parametrize("which", ["k", "v"])
def test_there_and_back(which: str, layout: str) -> None:
    """And rows are those of HND, for torch and for NumPy."""
    cache = torch.randn(3, 2, 48, 80, generator=torch.Generator().manual_seed(0))
    stored = from_hnd(cache, which, layout)
    assert stored.shape[1:] == inner_shape(layout, 2, 48, 80)
    assert torch.equal(to_hnd(stored, which, layout, 48), cache)
    block, slot = torch.tensor([2, 0, 2, 1]), torch.tensor([0, 47, 0, 16])
    rows = read_rows(stored, which, layout, 48, block, slot)
    assert torch.equal(rows, cache[block, :, slot])
    array = from_hnd(cache.numpy(), which, layout)
    assert (array == stored.numpy()).all()
    assert (to_hnd(array, which, layout, 48) == cache.numpy()).all()


def test_a_copy_is_made_where_the_order_changes() -> None:
    cache = torch.zeros(1, 1, 16, 16)
    from_hnd(cache, "k", PAIRS).fill_(1)
    assert not cache.any()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "fits"),
    [
        ("bfloat16", 64, 16, True),
        ("bfloat16", 80, 48, True),
        ("bfloat16", 64, 7, False),
        ("bfloat16", 72, 16, False),
        ("float32", 64, 16, False),
        ("bfloat16", 0, 0, False),
    ],
)
def test_which_caches_can_be_pairs(dtype: str, head_dim: int, block_size: int, fits: bool) -> None:
    spec = AttentionSpec.make("decode", dtype, head_dim, 4, block_size, layout="native")
    assert fits_pairs(spec) == fits


def test_only_native_specs_leave_the_layout_to_the_choices() -> None:
    native = AttentionSpec.make("decode", "bfloat16", 64, 4, 16, layout="native")
    fixed = AttentionSpec.make("decode", "bfloat16", 64, 4, 16, layout="NHD")
    assert layout_of(native, {"layout": PAIRS}) == PAIRS
    assert layout_of(native, {}) == "HND"
    assert layout_of(fixed, {}) == "NHD"
