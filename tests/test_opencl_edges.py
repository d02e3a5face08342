"""The GPU's programs held to what the CPU's are held to: the same tests, run on OpenCL.

All of them take the programs whose sizes are known at run time, so few are compiled.
"""

from collections.abc import Callable
from typing import Any

import pytest
import test_append_copy
import test_batch_invariance
import test_edges
import test_merge
import test_metamorphic
from opencl_tools import gpu_attention, gpu_kernel

from tvmpaged import PagedAttention

Attention = Callable[..., PagedAttention]

#: Two need other processes or threads, but OpenCL's host side runs in this one. Under the strides
#: of the third no vector is loaded whole: `test_walk_threads` holds that they are refused.
LEFT_OUT = {
    "test_on_another_number_of_threads",
    "test_instances_may_run_at_the_same_time",
    "test_caches_may_have_any_block_stride",
}


@pytest.fixture(scope="session")
def generic() -> Attention:
    def make(*sizes: Any, **more: Any) -> PagedAttention:
        return gpu_attention(*sizes, generic=True, **more)

    return make


@pytest.fixture
def specialised(generic: Attention) -> Attention:
    """Stand in where a test takes both kinds."""
    return generic


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def attn(generic: Attention, dtype: str) -> PagedAttention:
    return generic(3, 64, 4, dtype)


@pytest.fixture(autouse=True)
def _merge_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests of the merge kernel load the GPU's."""
    monkeypatch.setattr(test_merge, "load_kernel", lambda spec, _bundle: gpu_kernel(spec))


for module in (test_edges, test_merge, test_metamorphic, test_append_copy, test_batch_invariance):
    tests = {name: each for name, each in vars(module).items() if name.startswith("test_")}
    globals().update({name: each for name, each in tests.items() if name not in LEFT_OUT})
