"""Attention with tensor cores, its instructions written out and executed on OpenCL.

What this proves: that the program computes attention if each instruction of a warp does what PTX
says: places in shared memory, fragments, masks, sums, rows, barriers of the block. What it does
not: that instructions do so, that a copy has arrived when it is waited for (here it is done when it
is started), in which order a tensor core adds, and time. float16 is not executed (PoCL 3.0 has no
half); its program is bfloat16's under another name, which is tested. `test_warp_faults` plants
faults in it.

A program takes 2 to 7 seconds, most of it in TVM, so only some are tried by default;
``TVMPAGED_TEST_SPECS=full`` takes them all (`ci/cuda.sh`).
"""

import ast
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from cases import assert_equals_reference, make_case
from opencl_tools import TARGET, warp_attention

from tvmpaged import PagedAttention, build, schedules
from tvmpaged.kernels.cuda.warp_grid import left_holder, right_holder, sum_place
from tvmpaged.schedules import cuda_choices
from tvmpaged.sm import LIMITS, STATIC_SHARED_BYTES
from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates

Choices = dict[str, Any]
FULL = os.environ.get("TVMPAGED_TEST_SPECS") == "full"

#: (head_dim, group_size, block_size, layout): a power of two and none, large and least; rows
#: that leave copying threads without a part (80); blocks smaller than a step, and larger.
SIZES = [
    (64, 3, 16, "HND"),
    (80, 7, 1, "NHD"),
    (128, 4, 16, "NHD"),
    (256, 8, 256, "HND"),
    (16, 5, 3, "HND"),
]

#: Choices of prefill beside the default: q in registers; one step at a time; three; warps along the
#: keys; one warp; threads that share a row of K otherwise.
PREFILL: list[Choices] = [
    {"q_in": "registers", "row_tile": 64, "keys_per_step": 32},
    {"stages": 1, "keys_per_step": 32},
    {"stages": 3, "keys_per_step": 16, "dim_threads": 8, "row_tile": 64},
    {"key_warps": 2, "row_tile": 64, "q_in": "registers"},
    {"threads": 32, "row_tile": 16, "keys_per_step": 16, "dim_threads": 2, "split_length": 128},
]
#: Of decode: q read at each step; one warp; more keys at once.
OF_DECODE: list[Choices] = [
    {"q_in": "shared"},
    {"threads": 32, "key_warps": 1, "keys_per_step": 16, "stages": 3},
    {"threads": 256, "key_warps": 8, "keys_per_step": 128, "stages": 1},
]


def check(attn: PagedAttention, rng: np.random.Generator) -> None:
    """Decode and prefill in one step: kv ranges, tiles of rows, rows and steps that see nothing."""
    many = 150 // (attn.num_qo_heads // attn.num_kv_heads)
    q_lens = [1, 1, 1, many, 5, 0, 2]
    seq_lens = [1, attn.block_size, 300, many + 90, 40, 3, 1]
    assert_equals_reference(attn, make_case(rng, attn, q_lens, seq_lens))


@pytest.mark.parametrize("sizes", SIZES if FULL else SIZES[1:4:2], ids=str)
def test_specialised_programs(sizes: tuple[Any, ...], rng: np.random.Generator) -> None:
    head_dim, group_size, block_size, layout = sizes
    attn = warp_attention(group_size, head_dim, block_size, layout=layout)
    check(attn, rng)


@pytest.mark.parametrize("changes", PREFILL if FULL else PREFILL[2:4], ids=str)
def test_every_choice_of_prefill_gives_the_same_numbers(
    changes: Choices, rng: np.random.Generator
) -> None:
    check(warp_attention(3, 48, 16, prefill=changes), rng)


@pytest.mark.parametrize("changes", OF_DECODE if FULL else OF_DECODE[2:], ids=str)
def test_every_choice_of_decode_gives_the_same_numbers(
    changes: Choices, rng: np.random.Generator
) -> None:
    check(warp_attention(17, 48, 16, decode=changes), rng)


# -- fragments, beside TVM's own descriptions of its tensor intrinsics


def tvms_own(name: str) -> Callable[..., Any]:
    """Return a function of TVM's tensor intrinsics, whose import would parse them all (20 s)."""
    file = Path(tvm.__file__).parent / "s_tir/tensor_intrin/cuda.py"
    (node,) = (
        each
        for each in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(each, ast.FunctionDef) and each.name == name
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), str(file), "exec"), names)
    return names[name]  # type: ignore[no-any-return]


def test_fragments_are_those_of_tvms_own_descriptions() -> None:
    """Of 16 x 16: a left factor, and two sums side by side."""
    layout = tvms_own("shared_16x16_to_ldmatrix_32x8_layout")
    for i, j in product(range(16), range(16)):
        lane, element = layout(i, j)
        register, half = divmod(element, 2)
        assert left_holder(i, j) == (lane, register, half)
        side, register = divmod(element, 4)
        assert sum_place(lane, register) == (i, j - side * 8)


def test_a_right_factor_is_a_left_ones_upper_half_transposed() -> None:
    for k, column in product(range(16), range(8)):
        lane, register, half = left_holder(column, k)
        assert right_holder(k, column) == (lane, register // 2, half)


def test_float16_is_the_same_program_under_other_names() -> None:
    """With instructions: what differs is the type of buffers, products and roundings."""

    def program(dtype: str, kernel: str) -> str:
        spec = AttentionSpec.make(kernel, dtype, 64, 3, 16)
        return build.build_module(spec, TARGET, cuda_choices.mma_choices(spec)).script()

    for kernel in ATTENTION_KERNELS:
        half, brain = program("float16", kernel), program("bfloat16", kernel)
        assert '"f16"' in half
        assert (
            re.sub(r"\bf16\b", "bf16", half.replace("float16", "bfloat16")).replace(
                "f16x2", "bf16x2"
            )
            == brain
        )


# -- choices and rules


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_memory_above_the_limit_is_asked_for(head_dim: int) -> None:
    """TVM's runtime raises the limit when what is asked for at launch comes to as much alone."""
    spec = AttentionSpec.make("decode", "bfloat16", head_dim, 4, 16)
    choices = cuda_choices.mma_choices(spec)
    program = build.build_module(spec, TARGET, choices).script()
    (tile,) = re.findall(r'alloc_buffer\(\((\d+),\), "uint16", scope="shared.dyn"\)', program)
    (folded,) = re.findall(r'alloc_buffer\(\((\d+),\), scope="shared"\)', program)
    asked_for, static = 2 * int(tile), 4 * int(folded)
    assert asked_for + static == schedules.cuda_rules.shared_bytes(spec, choices)
    assert asked_for + static <= STATIC_SHARED_BYTES or asked_for >= STATIC_SHARED_BYTES


@pytest.mark.parametrize("arch", [f"sm_{major}{minor}" for major, minor in LIMITS])
def test_lists_with_tensor_cores_fit_every_head_and_group(arch: str) -> None:
    target = TargetKey("cuda", arch, "a-gpu")
    dims, groups = range(16, 257, 16), (*range(1, 18), 48, 71, 256)
    for kernel, dtype, dim, group in product(
        ATTENTION_KERNELS, ("float16", "bfloat16"), dims, groups
    ):
        spec = AttentionSpec.make(kernel, dtype, dim, group, 16)
        assert schedules.reject(spec, target, cuda_choices.mma_choices(spec)) is None, spec
        assert schedules.reject(spec, target, schedules.default_choices(spec, target)) is None, spec


@pytest.mark.parametrize(
    ("dtype", "head_dim", "isa"),
    [
        ("bfloat16", 128, "mma"),
        ("float16", 80, "mma"),
        ("float32", 128, "simt"),
        ("bfloat16", 72, "simt"),
        ("bfloat16", 512, "simt"),
        ("bfloat16", 0, "simt"),
    ],
)
def test_prefill_takes_tensor_cores_where_it_can(dtype: str, head_dim: int, isa: str) -> None:
    spec = AttentionSpec.make(
        "prefill", dtype, head_dim, 4 if head_dim else 0, 16 if head_dim else 0
    )
    assert schedules.default_choices(spec, TARGET)["isa"] == isa
    assert ("mma" in schedules.space(spec, TARGET)["isa"]) == (isa == "mma")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lanes": 4}, "lanes=4 are not the 8 of one copy"),
        ({"key_warps": 3}, "key_warps=3 does not divide the 4 warps"),
        ({"row_tile": 96}, "row_tile=96 is no multiple of 16 rows of each of 4 warps"),
        ({"key_warps": 2, "row_tile": 64, "keys_per_step": 32, "dim_threads": 8}, None),
        ({"key_warps": 4, "row_tile": 64, "keys_per_step": 32}, "no multiple of 16 keys of each"),
        ({"stages": 4}, "stages=4 is none of 1, 2 and 3"),
        ({"q_in": "memory"}, "q_in='memory' is neither"),
        ({"keys_per_step": 256, "row_tile": 64}, "a block needs 295936 bytes of shared memory"),
        ({"q_in": "registers", "keys_per_step": 128}, "a thread needs 328 registers or more"),
        (
            {"isa": "simt", "row_tile": 4, "stages": 1},
            "q_in='shared' means nothing under isa='simt'",
        ),
    ],
)
def test_choices_that_cannot_be_built_are_refused(changes: Choices, reason: str | None) -> None:
    spec = AttentionSpec.make("prefill", "bfloat16", 128, 4, 16)
    found = schedules.reject(spec, TARGET, cuda_choices.mma_choices(spec) | changes)
    assert found is None if reason is None else reason in str(found)


def test_a_decode_does_not_leave_16_rows_empty() -> None:
    spec = AttentionSpec.make("decode", "bfloat16", 128, 4, 16)
    choices = cuda_choices.mma_choices(spec) | {"row_tile": 32}
    assert "leaves 16 rows or more of the group's 4 empty" in str(
        schedules.reject(spec, TARGET, choices)
    )


@pytest.mark.parametrize("kernel", ATTENTION_KERNELS)
def test_a_search_starts_from_both_forms(kernel: str) -> None:
    spec = AttentionSpec.make(kernel, "bfloat16", 128, 4, 16)
    reject = partial(schedules.reject, spec, TARGET)
    candidates = Candidates(
        schedules.space(spec, TARGET), reject, schedules.default_choices(spec, TARGET)
    )
    found = [each["isa"] for each in candidates.anchors]
    assert min(found.count("simt"), found.count("mma")) > 10
