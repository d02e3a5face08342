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

from tvmpaged import PagedAttention, build, schedules
from tvmpaged.kernels.cuda.stage_vectors import Stages
from tvmpaged.spec import AttentionSpec

#: (dtype, head_dim, group_size, block_size, layout): a vector to each thread; rows that leave
#: threads empty; several vectors to a thread; groups in tiles of unequal height.
SIZES = [
    ("float32", 64, 3, 16, "HND"),
    ("float32", 80, 7, 1, "NHD"),
    ("float32", 256, 1, 256, "HND"),
    ("float32", 72, 16, 3, "NHD"),
    ("bfloat16", 128, 4, 16, "HND"),
    ("bfloat16", 96, 17, 7, "NHD"),
]

#: Choices beside the default: one thread a key; a whole warp a key, most of it without a part; one
#: warp a block; many groups of threads; narrow loads; one row at a time; one key a thread; copies
#: of 16, 8 and 4 bytes, 2 to 4 steps ahead, or none.
CHOICES: list[dict[str, Any]] = [
    {"dim_threads": 1, "keys_per_step": 128, "row_tile": 1, "stages": 1},
    {"threads": 64, "dim_threads": 2, "keys_per_step": 32, "lanes": 2, "row_tile": 2, "stages": 2},
    {"threads": 64, "dim_threads": 16, "keys_per_step": 4, "lanes": 1, "stages": 3},
    {"threads": 32, "dim_threads": 16, "keys_per_step": 8, "stages": 4},
    {
        "threads": 512,
        "dim_threads": 4,
        "keys_per_step": 128,
        "split_length": 128,
        "row_tile": 2,
        "stages": 1,
    },
    {"threads": 64, "dim_threads": 8, "keys_per_step": 8, "split_length": 512, "stages": 2},
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


def with_fault(edit: Callable[[str], str], stages: int = 3) -> PagedAttention:
    def planted(source: str) -> str:
        changed = edit(source)
        assert changed != source, "nothing was planted"
        return changed

    built = Built(DECODE, PLANTED | {"stages": stages}, planted)
    return gpu_attention(3, 64, 16, built={"decode": built})


def decode(attn: PagedAttention) -> None:
    case = make_case(np.random.default_rng(0), attn, [1, 1, 1], [13, 100, 300])
    assert_equals_reference(attn, case)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_without_a_fault(stages: int) -> None:
    built = Built(DECODE, PLANTED | {"stages": stages})
    decode(gpu_attention(3, 64, 16, built={"decode": built}))


def test_what_lay_in_shared_memory_does_not_matter() -> None:
    def spoil(source: str) -> str:
        """Fill the stages with NaN before anything else is done."""
        each = r"for (int i = 0; i < \2; ++i) { tile_ptr[i] = NAN; }"
        return re.sub(
            r"(__local float tile_ptr\[(\d+)\];)((?:\s*__local [^;]*;)*)",
            rf"\1\3 {each} {BARRIER}",
            source,
        )

    decode(with_fault(spoil))


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


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
    ("what", "right", "wrong"),
    [
        ("the last tile of a group is dropped", r"\(row_end \+ 1\)", "row_end"),
        ("a slot past the block's end is read", r"% (\(uint\))?16\)", r"% \g<1>16 + 1)"),
        ("the block after the key's is read", r"/ (\(uint\)16|16u?)\)", r"/ \1 + 1)"),
        ("keys past the end are used", r"< (\(?)limit_ptr\[", r"< \g<1>9 + limit_ptr["),
        ("one group of threads is left out of the fold", r"g_1 < 4", "g_1 < 3"),
        (
            "a row's maximum is forgotten",
            r"row_max_ptr\[0\] = top_ptr",
            "row_max_ptr[0] = 0 * top_ptr",
        ),
    ],
)
def test_a_planted_fault_shows(what: str, right: str, wrong: str, stages: int) -> None:
    attn = with_fault(lambda source: re.sub(right, wrong, source), stages)
    with pytest.raises(AssertionError, match=r"off by|finite|-inf"):
        decode(attn)


@pytest.mark.parametrize(
    ("what", "right", "wrong"),
    [
        (
            "another step's stage is read",
            r"(vload4\(0, tile_ptr \+ \(+)s % 3\)",
            r"\1(s + 1) % 3)",
        ),
        (
            "a copy goes where a step is still to be read",
            r"(, 0, tile_ptr \+ \(+)s % 3\)",
            r"\1(s + 1) % 3)",
        ),
        ("the last step is dropped", r"\+ 3\); \+\+s", "+ 2); ++s"),
        ("a step is taken before it is copied", r"3 <= s\b", "2 <= s"),
        ("V is read where K lies", r"(vload4\(0, tile_ptr \+ .*) \+ 1024\)\)", r"\1))"),
    ],
)
def test_a_fault_in_the_stages_shows(what: str, right: str, wrong: str) -> None:
    attn = with_fault(lambda source: re.sub(right, wrong, source))
    with pytest.raises(AssertionError, match=r"off by|finite|-inf"):
        decode(attn)


def test_two_vectors_in_one_place_show(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Stages.place
    monkeypatch.setattr(Stages, "place", lambda s, dim, v, key, x: place(s, dim, v, key // 2, x))
    with pytest.raises(AssertionError, match=r"off by|finite|-inf"):
        decode(gpu_attention(3, 64, 16, built={"decode": Built(DECODE, PLANTED)}))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_step_is_waited_for_until_its_copies_are_there(stages: int) -> None:
    """What cannot be executed: copies written out are done at once, so none is ever waited for.

    Step `s` is group `s`. When it is taken, `s + stages` groups are closed: all of them but the
    latest ``stages - 1`` must be there.
    """
    spec = AttentionSpec.make("decode", "bfloat16", 128, 4, 16)
    choices = schedules.default_choices(spec, TARGET) | {"stages": stages, "keys_per_step": 8}
    program = build.build_module(spec, TARGET, choices).script()
    found = re.findall(r'T\.ptx\.cp\(.*"(cg|wait_group|commit_group)"', program)
    if stages == 1:
        assert not found
        return
    assert found == ["wait_group", "cg", "cg", "commit_group"]  # of K and of V
    assert f'T.ptx.cp({stages - 1}, "async", "wait_group", "")' in program
    taken = program.index(f"if vs >= {stages}:")
    indent = [len(line) - len(line.lstrip()) for line in program.splitlines() if "_group" in line]
    assert taken < program.index("wait_group") < program.index("commit_group")
    assert indent[0] == indent[1] + 4  # a group is closed at each step, taken or not


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


@pytest.mark.parametrize(
    ("dtype", "changes", "reason"),
    [
        ("float32", {"stages": 0}, "stages=0 is none of 1 to 4"),
        ("float32", {"stages": 5}, "stages=5 is none of 1 to 4"),
        ("float32", {"stages": 4}, None),
        ("float32", {"lanes": 1, "stages": 2}, None),
        ("bfloat16", {"lanes": 1, "stages": 2}, "lanes=1 of bfloat16: no copy has 2 bytes"),
        ("bfloat16", {"lanes": 1, "stages": 1}, None),
        ("float32", {"keys_per_step": 64, "stages": 2}, "a block needs 67712 bytes of shared mem"),
        ("float32", {"keys_per_step": 64, "stages": 1}, None),
    ],
)
def test_stages_that_cannot_be_built_are_refused(
    dtype: str, changes: dict[str, Any], reason: str | None
) -> None:
    spec = AttentionSpec.make("decode", dtype, 64, 1, 16)
    found = schedules.reject(spec, TARGET, schedules.default_choices(spec, TARGET) | changes)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_search_may_take_any_number_of_stages(dtype: str) -> None:
    spec = AttentionSpec.make("decode", dtype, 64, 3, 16)
    assert set(schedules.space(spec, TARGET)["stages"]) == {1, 2, 3, 4}
