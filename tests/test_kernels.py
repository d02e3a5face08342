"""The kernels against the reference: the specialised ones over sizes of which every pair meets.

``TVMPAGED_TEST_SPECS=full`` takes the whole product instead (`ci/full.sh`).
"""

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cases import assert_equals_reference, make_case
from kernel_bundles import LAYOUTS, Sizes, sizes_of

from tvmpaged import PagedAttention
from tvmpaged.spec import ATTENTION_KERNELS, DTYPES

SET = os.environ.get("TVMPAGED_TEST_SPECS", "covering")
Attention = Callable[..., PagedAttention]


def _name(sizes: Sizes) -> str:
    return "{}-d{}-g{}-b{}-{}".format(*sizes)


@pytest.fixture(params=[*sizes_of(SET), *sizes_of("native")], ids=_name)
def attn(request: pytest.FixtureRequest, specialised: Attention) -> PagedAttention:
    dtype, head_dim, group_size, block_size, layout = request.param
    name = "native" if layout == "native" else SET
    return specialised(group_size, head_dim, block_size, dtype, layout=layout, bundle_name=name)


def lengths(attn: PagedAttention, rng: np.random.Generator) -> list[int]:
    """Return each kind of length once; the last is more than one kv range where that is cheap."""
    block = attn.block_size
    ragged = rng.integers(2 * block, 2 * block + 100, 2).tolist()
    return [0, 1, block - 1, block, block + 1, *ragged, int(rng.integers(513, 640))]


def test_decode(attn: PagedAttention, rng: np.random.Generator) -> None:
    seq_lens = lengths(attn, rng)
    assert_equals_reference(attn, make_case(rng, attn, [1] * len(seq_lens), seq_lens))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(attn: PagedAttention, rng: np.random.Generator, causal: bool) -> None:
    """All of a prompt, a part over cached context, none, and more tokens than keys."""
    block = attn.block_size
    seq_lens = [2, block, block + 1, 2 * block + 30, 9, 3, 0]
    q_lens = [2, min(block, 40), 3, 5, 0, 7, 2]
    order = rng.permutation(len(q_lens))
    case = make_case(rng, attn, np.array(q_lens)[order], np.array(seq_lens)[order], causal=causal)
    assert_equals_reference(attn, case)


def test_large_logits(attn: PagedAttention, rng: np.random.Generator) -> None:
    """Decode and prefill in one step, with logits of up to about a hundred."""
    block = attn.block_size
    case = make_case(rng, attn, [1, 4, 1, 2], [block, block + 9, 2 * block + 1, 2], scale=20.0)
    assert_equals_reference(attn, case)


def test_both_kernels_ran(attn: PagedAttention) -> None:
    kernels = attn.describe()["kernels"]
    assert [kernels[name]["kind"] for name in ATTENTION_KERNELS] == ["default"] * 2


@pytest.mark.parametrize("index", range(24))
def test_generic_kernels_on_random_sizes(
    generic: Attention, rng: np.random.Generator, index: int
) -> None:
    attn = generic(
        int(rng.choice([*range(1, 18), 48, 71])),
        int(rng.choice([*range(8, 257, 8), 512])),
        int(rng.integers(1, 257)),
        DTYPES[index % 3],
        num_kv_heads=int(rng.integers(1, 4)),
        layout=LAYOUTS[index % 2],
    )
    seq_lens = rng.integers(0, 80, 6).tolist()
    q_lens = np.minimum(rng.integers(0, 12, 6), rng.choice([1, 12], 6)).tolist()
    case = make_case(rng, attn, q_lens, seq_lens, causal=bool(rng.integers(4)))
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("sm_scale", [0.0, -0.5, 3.0])
def test_sm_scale_is_free(
    specialised: Attention, rng: np.random.Generator, sm_scale: float
) -> None:
    """On the default of bfloat16 too, where tiles take the scale's sign into q."""
    attn = specialised(8, 128, 16, "bfloat16", layout="HND", bundle_name=SET)
    case = make_case(rng, attn, [1, 5, 40], [33, 5, 70])
    assert_equals_reference(attn, replace(case, sm_scale=sm_scale))
