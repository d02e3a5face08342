"""What a row's probabilities are based on where bfloat16 runs on tiles: it lags, and may be far."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import NAN, Case, assert_close, assert_equals_reference, make_case, run
from kernel_bundles import sizes_of

from tvmpaged import PagedAttention

#: Few rows and many, over HND and over pairs.
SIZES = [
    each
    for each in (*sizes_of("covering"), *sizes_of("native"))
    if each[0] == "bfloat16" and each[1] % 16 == 0
]
Q_LEN, LENGTH = 40, 300


@pytest.fixture(params=SIZES, ids=lambda sizes: "{}-d{}-g{}-b{}-{}".format(*sizes))
def attn(
    request: pytest.FixtureRequest, specialised: Callable[..., PagedAttention]
) -> PagedAttention:
    dtype, head_dim, group_size, block_size, layout = request.param
    name = "native" if layout == "native" else "covering"
    return specialised(group_size, head_dim, block_size, dtype, layout=layout, bundle_name=name)


def keys_of(case: Case, length: int) -> list[tuple[int, int]]:
    """Return the slots of the first sequence."""
    return [case.slot(0, position) for position in range(length)]


@pytest.mark.parametrize("q_len", [1, Q_LEN])
@pytest.mark.parametrize("rise", [0.05, 1.0, -1.0])
def test_logits_that_rise_from_key_to_key(
    attn: PagedAttention, rng: np.random.Generator, q_len: int, rise: float
) -> None:
    """By as much as a base may lag at some steps, and at each; and falling ones.

    In the last dim: in the first, each of the others would round to a part of the large sum.
    """
    case = make_case(rng, attn, [q_len], [LENGTH])
    case.q[..., -1] = attn.head_dim**0.5
    for position, (block, slot) in enumerate(keys_of(case, LENGTH)):
        case.by_slot()[0][block, slot, :, -1] = rise * position
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("q_len", [1, Q_LEN])
@pytest.mark.parametrize("exponent", [21, 40, 126])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_any_size_stay_finite(
    attn: PagedAttention, rng: np.random.Generator, q_len: int, exponent: int, sign: float
) -> None:
    """Up to 3.3e38, of which log2(e) times as much is no float32, beside rows with usual ones."""
    case = replace(make_case(rng, attn, [q_len], [LENGTH]), sm_scale=1.0)
    far = torch.arange(q_len) % 3 == 0
    case.q[:] = case.q / attn.head_dim**0.5
    case.q[..., 0] = 0
    case.q[far] = 0
    case.q[far, :, 0] = sign * 2.0 ** (exponent - exponent // 2)
    for block, slot in keys_of(case, LENGTH):
        case.by_slot()[0][block, slot, :, 0] = 1.9375 * 2.0 ** (exponent // 2 + 1)
    out, lse = run(attn, case)
    expected, expected_lse = case.expected()
    assert_close(out, lse, expected, expected_lse)
    np.testing.assert_allclose(lse[far], sign * 1.9375 * 2.0 ** (exponent + 1), rtol=1e-5)


@pytest.mark.parametrize("poisoned", ["q", "k"])
@pytest.mark.parametrize("q_len", [1, Q_LEN])
@pytest.mark.parametrize("position", [0, 131])
def test_nan_shows_in_every_row_that_sees_it(
    attn: PagedAttention, rng: np.random.Generator, q_len: int, poisoned: str, position: int
) -> None:
    """Wherever in a step it stands: a maximum may lose it, no probability does."""
    case = make_case(rng, attn, [q_len], [LENGTH])
    if poisoned == "q":
        case.q[q_len // 2, 0, 5] = NAN
    else:
        block, slot = case.slot(0, position)
        case.by_slot()[0][block, slot, 0, 5] = NAN
    out, lse = run(attn, case)
    group = attn.num_qo_heads // attn.num_kv_heads
    sees = torch.zeros(q_len, attn.num_qo_heads, dtype=torch.bool)
    if poisoned == "q":
        sees[q_len // 2, 0] = True
    else:
        sees[:, :group] = True
    assert out[sees].isnan().all()
    assert lse[sees].isnan().all()
    assert out[~sees].isfinite().all()
    assert lse[~sees].isfinite().all()
