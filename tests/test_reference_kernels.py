"""The slow stand-ins, which run only on request, against the reference and the compiled kernels."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_equals_reference, make_case, random_rows

from tvmpaged import PagedAttention

pytestmark = pytest.mark.runtime


@pytest.fixture
def no_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tvmpaged.bundle.search"], "search", lambda _bundle=None: [])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")],
)
def test_stand_ins_equal_the_reference(
    no_bundles: None, rng: np.random.Generator, dtype: str, kv_dtype: str, layout: str
) -> None:
    attn = PagedAttention(6, 2, 64, 4, dtype, kv_dtype, layout, allow_reference=True)
    kernels = attn.describe()["kernels"]
    assert {each["kind"] for each in kernels.values()} == {"reference"}
    assert {each["sha256"] for each in kernels.values()} == {None}
    case = make_case(rng, attn, [1, 5, 0, 3, 1], [30, 9, 4, 2, 0])
    assert_equals_reference(attn, case)


def test_stand_ins_move_what_the_kernels_move(
    no_bundles: None, base_bundle: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = PagedAttention(6, 2, 64, 4, "bfloat16", allow_reference=True)
    monkeypatch.undo()
    fast = PagedAttention(6, 2, 64, 4, "bfloat16", bundle=base_bundle)
    assert fast.describe()["kind"] == "generic"
    k, v = (random_rows(rng, (4, 2, 64), torch.bfloat16) for _ in range(2))
    found = []
    for attn in (slow, fast):
        caches = attn.new_cache(5)
        attn.append_kv(k, v, *caches, [3, -1, 19, 8])
        attn.copy_blocks(*caches, [(0, 3), (4, 1)])
        found.append(caches)
    assert all(map(torch.equal, *found))


def test_they_never_run_unasked(no_bundles: None) -> None:
    with pytest.raises(FileNotFoundError, match="no bundle was found"):
        PagedAttention(6, 2, 64, 4, "float32")
    assert "no artifact" in PagedAttention.supports(6, 2, 64, 4, "float32")[0]
    assert not PagedAttention.supports(6, 2, 64, 4, "float32", allow_reference=True)


def test_an_artifact_is_preferred(base_bundle: Path) -> None:
    attn = PagedAttention(6, 2, 64, 4, "float32", bundle=base_bundle, allow_reference=True)
    assert attn.describe()["kind"] == "generic"
