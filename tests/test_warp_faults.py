"""Faults planted in a tensor-core program on OpenCL: each must show, or its proof is none.

``TVMPAGED_TEST_SPECS=full`` plants them all (`ci/cuda.sh`).
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from cases import assert_equals_reference, make_case
from opencl_tools import Built, gpu_attention

from tvmpaged.kernels.cuda.warp_grid import Warps
from tvmpaged.spec import AttentionSpec

FULL = os.environ.get("TVMPAGED_TEST_SPECS") == "full"
#: Two tiles of 32 rows in prefill, two warps of them along the keys, and three steps on their way.
CHOICES = {
    "isa": "mma",
    "threads": 128,
    "key_warps": 2,
    "row_tile": 32,
    "keys_per_step": 32,
    "stages": 3,
    "q_in": "registers",
}
SPEC = AttentionSpec.make("prefill", "bfloat16", 32, 3, 16)
SHOWS = pytest.raises(AssertionError, match=r"off by|finite|-inf")


def some(*faults: Any) -> tuple[Any, ...]:
    """Return all faults, or the first two where programs are few."""
    return faults if FULL else faults[:2]


def prefill(
    edit: Callable[[str], str], q_lens: Sequence[int] = (17, 2), seq_lens: Sequence[int] = (70, 40)
) -> None:
    """Run a case with a fault in the source."""
    built = Built(SPEC, CHOICES, edit)
    attn = gpu_attention(3, 32, 16, "bfloat16", built={"prefill": built}, generic=True)
    assert_equals_reference(attn, make_case(np.random.default_rng(0), attn, q_lens, seq_lens))


def test_without_a_fault() -> None:
    prefill(lambda source: source)


@pytest.mark.parametrize(
    ("what", "right", "wrong"),
    some(
        ("the last tile of rows is dropped", r"\(row_end \+ 31\)", "row_end"),
        ("a slot past the block's end is read", r"% 16\);", "% 16) + 1;"),
        ("a block before the key's is read", r"/ \(uint\)16\)", "/ (uint)32)"),
        ("keys that a row does not see are used", r"< limits_ptr\[", "< 9 + limits_ptr["),
        ("a warp is left out of the fold", r"; (g\w*) < 2;", r"; \1 < 1;"),
        ("another step's stage is read", r"\(s % 3\)", "((s + 1) % 3)"),
    ),
)
def test_a_planted_fault_shows(what: str, right: str, wrong: str) -> None:
    def plant(source: str) -> str:
        faulty = re.sub(right, wrong, source)
        assert faulty != source, "nothing was planted"
        return faulty

    with SHOWS:
        prefill(plant)


@pytest.mark.parametrize(
    ("name", "wrong"),
    some(
        ("q_place", lambda w, lane: lane // 8 % 2 * 8 + lane % 8 * w.q_pitch),
        ("k_place", lambda w, lane: lane % 16 * w.k_pitch + lane // 16 * 8),
        ("v_place", lambda w, lane: lane // 16 * 8 * w.v_pitch + lane % 8 * w.v_pitch),
        ("row", lambda w, at, value: at.row_warp * 16 + at.lane // 4 * 2 + value),
    ),
)
def test_a_wrong_place_of_a_fragment_shows(
    name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places in shared memory that lanes name to a load, and the rows of their sums."""
    monkeypatch.setattr(Warps, name, wrong)
    with SHOWS:
        prefill(lambda source: source)


BARRIER = "barrier(CLK_LOCAL_MEM_FENCE);"
#: Barriers in the order of the source: before a tile of rows, before and after its q is loaded; of
#: a step, before it, two around its products, four in the fold of its maxima, two around the
#: products with V; at the end four in the fold of sums, and three in that of warps.
NUM_BARRIERS = 3 + (1 + 2 + 4 + 2) + (4 + 3)
#: Those that show, one of each kind first. Those of `OF_LOOPS` do where their loop is written out,
#: for PoCL has barriers of its own at both ends of a loop. The other six do not show. A maximum
#: that is overwritten too early (7, 9) is taken twice, which is the same. After its last step, or
#: before its first, a block has waited already (0, 12, 18). The warp that is waited for in the
#: warps' fold (17) is the first one, and PoCL's threads run in order.
SHOWN = (1, 2, 4, 8, 10, 13, 16, 6, 14, 15)
OF_LOOPS = (3, 5, 11)


def without_barrier(source: str, index: int) -> str:
    parts = source.split(BARRIER)
    assert len(parts) == NUM_BARRIERS + 1
    return BARRIER.join([*parts[:index], parts[index] + parts[index + 1], *parts[index + 2 :]])


@pytest.mark.parametrize("index", SHOWN if FULL else SHOWN[:7])
def test_a_skipped_barrier_shows(index: int) -> None:
    with SHOWS:
        prefill(lambda source: without_barrier(source, index))


def written_out(source: str, name: str, count: int) -> str:
    """Return a program in which the loop over `name` stands `count` times instead."""
    head = re.search(rf"for \(int {name} = 0; {name} < [^;]*; \+\+{name}\) \{{", source)
    assert head is not None
    end, depth = head.end(), 1
    while depth:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    turns = (f"{{ const int {name} = {i};{source[head.end() : end]}" for i in range(count))
    return source[: head.start()] + "".join(turns) + source[end:]


def without_loops(source: str) -> str:
    """Return the program for three steps of two products each, of q and K and of P and V."""
    for name, count in (("s", 3), ("d_1", 2), ("d_2", 2)):
        while f"int {name} = 0; " in source:
            source = written_out(source, name, count)
    return source


@pytest.mark.parametrize("index", [None, *(OF_LOOPS if FULL else OF_LOOPS[:1])])
def test_a_skipped_barrier_of_a_loop_shows_without_the_loop(index: int | None) -> None:
    """And without a fault the program is right with loops written out, too."""

    def edit(source: str) -> str:
        return without_loops(source if index is None else without_barrier(source, index))

    with nullcontext() if index is None else SHOWS:
        prefill(edit, [2], [3 * 32])
