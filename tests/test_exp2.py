"""The polynomial for 2**x, compiled, against float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tvmpaged.cpu import cpu_flags, native_target
from tvmpaged.kernels.exp2 import FLUSH_BELOW

Function = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module", params=[1, 16], ids=["scalar", "vector"])
def exp2(request: pytest.FixtureRequest) -> Function:
    """Compile it over single elements, or over vectors."""
    from tvmpaged.kernels.exp2 import exp2

    return compiled(request.param, lambda x: exp2(x))


def compiled(lanes: int, function: Callable[..., Any], *, whole: bool = False) -> Function:
    """Compile a function of elements, or of whole vectors."""
    import tvm
    from tvm.script import tirx as T

    from tvmpaged.build import tvm_target

    @T.prim_func(s_tir=True)
    def main(x_handle: T.handle, y_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, lanes), "float32")
        y = T.match_buffer(y_handle, (n, lanes), "float32")
        for i in range(n):
            if whole:
                with T.sblock("exp2"):
                    vi = T.axis.spatial(n, i)
                    y[vi, T.Ramp(0, 1, lanes)] = function(x[vi, T.Ramp(0, 1, lanes)])
            else:
                for j in T.vectorized(lanes):
                    with T.sblock("exp2"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        y[vi, vj] = function(x[vi, vj])

    built = tvm.compile(tvm.IRModule({"main": main}), target=tvm_target(native_target()))

    def call(x: np.ndarray) -> np.ndarray:
        padded = torch.zeros(-(-len(x) // 16) * 16)
        padded[: len(x)] = torch.from_numpy(x)
        y = torch.empty_like(padded)
        built["main"](padded.view(-1, lanes), y.view(-1, lanes))
        return y.numpy()[: len(x)]

    return call


def test_error_is_about_the_rounding_of_float32(exp2: Function, rng: np.random.Generator) -> None:
    x = np.concatenate(
        [np.linspace(-126, 0, 400_001), -rng.exponential(1, 100_000), np.arange(-126.0, 1.0)]
    ).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(exp2(x) / exact - 1).max() < 2e-7


def test_zero_gives_exactly_one(exp2: Function) -> None:
    tiny = np.float32([0.0, -0.0, -1e-38, -1e-10])
    np.testing.assert_array_equal(exp2(tiny), np.ones(4, np.float32))


def test_far_below_gives_exactly_zero(exp2: Function) -> None:
    x = np.float32([-np.inf, -3.4e38, -1e6, -128, np.nextafter(np.float32(FLUSH_BELOW), -200)])
    np.testing.assert_array_equal(exp2(x), np.zeros(5, np.float32))


def test_between_the_least_normal_number_and_the_flush_nothing_jumps(exp2: Function) -> None:
    y = exp2(np.linspace(FLUSH_BELOW, -126, 1000, dtype=np.float32))
    assert y.min() >= 0
    assert y.max() <= 2.0**-126


def test_nan_stays_nan(exp2: Function) -> None:
    assert np.isnan(exp2(np.float32([np.nan, -np.nan]))).all()


@pytest.mark.parametrize("lanes", [8, 16])
def test_vectors_are_as_exact(lanes: int) -> None:
    """Of 16 lanes by AVX-512's instructions, whose results are denormal where the others are 0."""
    from tvmpaged.kernels.exp2 import exp2_vector

    if lanes == 16 and "avx512dq" not in cpu_flags():
        pytest.skip("no AVX-512: vectors of 16 lanes cannot run here")
    vector = compiled(lanes, lambda x: exp2_vector(x, lanes), whole=True)
    x = np.linspace(-126, 0, 400_001, dtype=np.float32)
    assert np.abs(vector(x) / np.exp2(x.astype(np.float64)) - 1).max() < 2e-7
    at_ends = vector(np.float32([0.0, -0.0, -np.inf, -1e38, np.nan, -140.0]))
    np.testing.assert_array_equal(at_ends[:5], np.float32([1, 1, 0, 0, np.nan]))
    assert 0 <= at_ends[5] < 2.0**-126
