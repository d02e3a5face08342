"""Attention by threads, executed on OpenCL: specialised sizes, choices, and planted faults."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_equals_reference, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from opencl_tools import TARGET, Built, gpu_attention

from tvmpaged import PagedAttention, schedules
from tvmpaged.spec import AttentionSpec

#: (dtype, head_dim, group_size, block_size, layout): a vector to each thread; rows that leave
#: threads empty; several vectors to a thread; groups in tiles of unequal height.
SIZES = [
    ("float32", 64, 3, 16, "HND"),
    ("float32", 80, 7, 1, "NHD"),
    ("float32", 256, 1, 256, "HND"),
    ("bfloat16", 128, 4, 16, "HND"),
    ("bfloat16", 96, 17, 7, "NHD"),
]

#: Choices beside the default: one thread a key; a whole warp a key, most of it without a part; one
#: warp a block; many groups of threads; narrow loads; one row at a time; one key a thread.
CHOICES: list[dict[str, Any]] = [
    {"dim_threads": 1, "keys_per_step": 128, "row_tile": 1},
    {"dim_threads": 2, "keys_per_step": 64, "lanes": 2, "row_tile": 2},
    {"threads": 32, "dim_threads": 16, "keys_per_step": 8},
    {"threads": 512, "dim_threads": 4, "keys_per_step": 128, "split_length": 128, "row_tile": 2},
    {"threads": 64, "dim_threads": 8, "keys_per_step": 8, "split_length": 512},
]


def check(attn: PagedAttention, rng: np.random.Generator) -> None:
    """Decode every kind of length, several kv ranges among them, and prefill."""
    block = attn.block_size
    seq_lens = [0, 1, block - 1, block, block + 1, 77, 600]
    assert_equals_reference(attn, make_case(rng, attn, [1] * len(seq_lens), seq_lens))
    assert_equals_reference(attn, make_case(rng, attn, [1, 4, 1, 0, 7], [300, 9, 2, 5, 3]))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_specialised_programs(sizes: tuple[Any, ...], rng: np.random.Generator) -> None:
    dtype, head_dim, group_size, block_size, layout = sizes
    attn = gpu_attention(group_size, head_dim, block_size, dtype, layout=layout, isa="simt")
    check(attn, rng)


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_every_choice_gives_the_same_numbers(
    changes: dict[str, Any], rng: np.random.Generator
) -> None:
    check(gpu_attention(3, 40, 16, **changes), rng)


lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=5)


@settings(max_examples=15)
@given(
    lengths,
    st.integers(1, 20),
    st.sampled_from([8, 24, 64, 200]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
)
def test_any_step_over_any_sizes(
    step: list[tuple[int, int]],
    group_size: int,
    head_dim: int,
    block_size: int,
    num_workers: int,
    causal: bool,
) -> None:
    attn = gpu_attention(group_size, head_dim, block_size, generic=True, num_workers=num_workers)
    q_lens, seq_lens = zip(*step, strict=True)
    rng = np.random.default_rng(len(step))
    assert_equals_reference(attn, make_case(rng, attn, q_lens, seq_lens, causal=causal))


# -- planted faults: each must show, or the checks above prove nothing

DECODE = AttentionSpec.make("decode", "float32", 64, 3, 16)
#: Two tiles of rows: 2 and 1; 16 threads a key.
PLANTED = {"row_tile": 2, "threads": 64, "keys_per_step": 16}
BARRIER = "barrier(CLK_LOCAL_MEM_FENCE);"
#: Barriers in the order of the source: two in each of four stages of the sum along a key's threads;
#: one before, and two in, each row's fold of the groups.
NUM_BARRIERS = 4 * 2 + 1 + 2 * 2
#: One of each kind. Not proven are those after the last stage and the last row: there a loop starts
#: over, and PoCL has barriers of its own.
SKIPPED = (0, 1, 8, 9, 10)


def with_fault(edit: Callable[[str], str]) -> PagedAttention:
    def planted(source: str) -> str:
        changed = edit(source)
        assert changed != source, "nothing was planted"
        return changed

    return gpu_attention(3, 64, 16, built={"decode": Built(DECODE, PLANTED, planted)})


def decode(attn: PagedAttention) -> None:
    case = make_case(np.random.default_rng(0), attn, [1, 1, 1], [13, 100, 300])
    assert_equals_reference(attn, case)


def test_without_a_fault() -> None:
    built = Built(DECODE, PLANTED)
    decode(gpu_attention(3, 64, 16, built={"decode": built}))


@pytest.mark.parametrize("index", SKIPPED)
def test_a_skipped_barrier_shows(index: int) -> None:
    def skip(source: str) -> str:
        parts = source.split(BARRIER)
        assert len(parts) == NUM_BARRIERS + 1
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
        # PoCL also puts barriers around a loop whose end is the same for all threads; now none is.
        return re.sub(
            r"; (\w+) < 4; ", r"; \1 < 4 + (int)(get_local_id(0) >> 20); ", BARRIER.join(parts)
        )

    with pytest.raises(AssertionError, match=r"off by|finite|-inf"):
        decode(with_fault(skip))


@pytest.mark.parametrize(
    ("what", "right", "wrong"),
    [
        ("the last tile of a group is dropped", r"\(row_end \+ 1\)", "row_end"),
        ("a slot past the block's end is read", r"% 16\);", "% 16) + 1;"),
        ("the block after the key's is read", r"/ (\(uint\)16|16u?)\)", r"/ \1 + 1)"),
        ("keys past the end are used", r"< limit_ptr\[", "< 9 + limit_ptr["),
        ("one group of threads is left out of the fold", r"g_1 < 4", "g_1 < 3"),
        (
            "a row's maximum is forgotten",
            r"row_max_ptr\[0\] = top_ptr",
            "row_max_ptr[0] = 0 * top_ptr",
        ),
    ],
)
def test_a_planted_fault_shows(what: str, right: str, wrong: str) -> None:
    attn = with_fault(lambda source: re.sub(right, wrong, source))
    with pytest.raises(AssertionError, match=r"off by|finite|-inf"):
        decode(attn)


# -- what the host wrapper refuses


def test_vectors_that_could_not_be_loaded_whole_are_refused(rng: np.random.Generator) -> None:
    attn = gpu_attention(3, 64, 4, generic=True)
    k_cache, v_cache = attn.new_cache(4)
    whole = torch.stack([k_cache, v_cache], dim=1).unbind(1)
    odd = torch.zeros(4, k_cache[0].numel() + 1)[:, :-1].unflatten(1, k_cache.shape[1:])
    rows = torch.ones(2, attn.num_kv_heads, 64)
    slots = np.array([5, 0])
    plan, q = attn.plan([0, 1], [1], [[1]]), torch.ones(1, attn.num_qo_heads, 64)
    attn.append_kv(rows, rows, *whole, slots)
    assert (attn.run(plan, q, *whole) == 1).logical_or(whole[1][1, 0, 0, 0] == 0).all()
    for call in (
        lambda: attn.append_kv(rows, rows, odd, odd, slots),
        lambda: attn.run(plan, q, odd, odd),
        lambda: attn.copy_blocks(odd, odd, [(0, 1)]),
    ):
        with pytest.raises(RuntimeError, match="block stride of a cache must be a multiple"):
            call()
    assert not odd.any()


def test_the_wrapper_checks_what_a_device_would_get() -> None:
    spec = AttentionSpec.make("copy_blocks", "float32")
    copy = Built(spec)
    with pytest.raises(ValueError, match="block_copies"):
        copy(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(1, 3, dtype=torch.int32))


# -- choices and rules


def test_default_choices_fit_every_spec() -> None:
    for kernel in ("decode", "prefill"):
        for dtype in ("float32", "bfloat16"):
            for head_dim in (*range(8, 257, 8), 512, 0):
                for group_size in (*range(1, 81), 256) if head_dim else (0,):
                    spec = AttentionSpec.make(kernel, dtype, head_dim, group_size, 16)
                    choices = schedules.default_choices(spec, TARGET)
                    assert schedules.reject(spec, TARGET, choices) is None, spec
