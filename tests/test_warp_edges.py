"""The programs for tensor cores held to what the CPU's are held to: the same tests, on OpenCL.

Decode and prefill, both with the instructions of a warp written out. Block and group size are
arguments here, so that few programs are compiled; `test_walk_warps` takes specialised ones.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import test_batch_invariance
import test_edges
import test_metamorphic
from opencl_tools import warp_attention

from tvmpaged import PagedAttention

Attention = Callable[..., PagedAttention]

if os.environ.get("TVMPAGED_TEST_SPECS") != "full":
    pytest.skip("takes PoCL minutes; ci/cuda.sh runs it", allow_module_level=True)

LEFT_OUT = {
    # OpenCL's host side runs in this process and thread only.
    "test_on_another_number_of_threads",
    "test_instances_may_run_at_the_same_time",
    # Other dtypes, and strides under which no vector is loaded whole.
    "test_float32_queries_over_narrow_caches",
    "test_numpy_arrays_give_numpy_arrays",
    "test_a_constant_added_to_every_logit_moves_lse_alone",
    "test_caches_may_have_any_block_stride",
    # Head sizes are constants of these programs: `test_walk_warps` has them.
    "test_any_head_dim_is_exact_from_the_first_to_the_last_token",
}


@pytest.fixture(scope="session")
def generic() -> Attention:
    """Return what makes a `PagedAttention` of bfloat16, whichever dtype a test asks for."""

    def make(group: int, head_dim: int, block_size: int, *_: str, **more: Any) -> PagedAttention:
        return warp_attention(group, head_dim, block_size, at_run_time=True, **more)

    return make


@pytest.fixture
def specialised(generic: Attention) -> Attention:
    """Stand in where a test takes both kinds."""
    return generic


@pytest.fixture
def dtype() -> str:
    return "bfloat16"


@pytest.fixture
def attn(generic: Attention) -> PagedAttention:
    return generic(3, 64, 4)


for module in (test_edges, test_metamorphic, test_batch_invariance):
    tests = {name: each for name, each in vars(module).items() if name.startswith("test_")}
    globals().update({name: each for name, each in tests.items() if name not in LEFT_OUT})
