"""The polynomial for the logarithm, compiled, against float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tvmpaged.cpu import native_target

Function = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def log() -> Function:
    """Compile it over vectors."""
    import tvm
    from tvm.script import tirx as T

    from tvmpaged.build import tvm_target
    from tvmpaged.kernels.cpu.log import log

    @T.prim_func(s_tir=True)
    def main(x_handle: T.handle, y_handle: T.handle) -> None:
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, 8), "float32")
        y = T.match_buffer(y_handle, (n, 8), "float32")
        for i in range(n):
            for j in T.vectorized(8):
                with T.sblock("log"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    y[vi, vj] = log(x[vi, vj])

    built = tvm.compile(tvm.IRModule({"main": main}), target=tvm_target(native_target()))

    def call(x: np.ndarray) -> np.ndarray:
        given = torch.ones(-(-len(x) // 8) * 8)
        given[: len(x)] = torch.from_numpy(x)
        y = torch.empty_like(given)
        built["main"](given.view(-1, 8), y.view(-1, 8))
        return y.numpy()[: len(x)]

    return call


def test_error_is_about_the_rounding_of_float32(log: Function, rng: np.random.Generator) -> None:
    x = np.float32(np.concatenate([np.linspace(1, 4, 300_001), 2 ** rng.uniform(-126, 127, 10**5)]))
    exact = np.log(x.astype(np.float64))
    assert (np.abs(log(x) - exact) / np.maximum(1.0, np.abs(exact))).max() < 2.5e-7


def test_one_gives_exactly_zero_and_nan_stays(log: Function) -> None:
    assert log(np.float32([1.0]))[0] == 0.0
    assert np.isnan(log(np.float32([np.nan, -np.nan]))).all()
