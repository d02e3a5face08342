"""Bits of a sequence follow from the sequence alone: not from its batch, blocks or threads."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import Case, make_case, run

from tvmpaged import PagedAttention
from tvmpaged.runtime.plan import PHASES

Attention = Callable[..., PagedAttention]

#: New tokens and lengths of one step: decode and chunks; one and several kv ranges; a long prompt.
Q_LENS = [1, 1, 5, 64, 1, 80, 2, 0]
SEQ_LENS = [1, 40, 30, 700, 1300, 80, 515, 9]


#: (group_size, head_dim, block_size, dtype) of specialised artifacts: decode by rows and columns.
SPECIALISED = [(3, 64, 16, "float32"), (8, 128, 16, "bfloat16"), (48, 112, 4, "float32")]
NATIVE = [(4, 128, 32, "bfloat16", "native"), (17, 112, 16, "bfloat16", "native")]


@pytest.fixture(params=["float32", "float16", "bfloat16", *SPECIALISED, *NATIVE], ids=str)
def attn(
    request: pytest.FixtureRequest, generic: Attention, specialised: Attention
) -> PagedAttention:
    if isinstance(request.param, str):
        return generic(3, 64, 16, request.param)
    if request.param in NATIVE:
        return specialised(*request.param[:4], layout="native", bundle_name="native")
    return specialised(*request.param)


def rows_of(case: Case, seq: int) -> slice:
    return slice(*case.query_start_loc[seq : seq + 2])


def assert_same_bits(found: tuple, expected: tuple, rows: slice = slice(None)) -> None:
    assert all(torch.equal(one, other[rows]) for one, other in zip(found, expected, strict=True))


def test_alone_and_in_a_batch(attn: PagedAttention, rng: np.random.Generator) -> None:
    case = make_case(rng, attn, Q_LENS, SEQ_LENS)
    together = run(attn, case)
    for seq in range(len(Q_LENS)):
        assert_same_bits(run(attn, case.only(seq)), together, rows_of(case, seq))


def test_alone_and_in_a_batch_of_64(attn: PagedAttention, rng: np.random.Generator) -> None:
    """Where the others stand, and how many there are, decides which worker takes what."""
    lengths = [777, *rng.integers(1, 200, 63).tolist()]
    case = make_case(rng, attn, [1] * 64, lengths)
    together = run(attn, case)
    for seq in (0, 1, 31, 63):
        assert_same_bits(run(attn, case.only(seq)), together, rows_of(case, seq))


def test_in_other_blocks(attn: PagedAttention, rng: np.random.Generator) -> None:
    case = make_case(rng, attn, Q_LENS, SEQ_LENS)
    new_place = torch.from_numpy(rng.permutation(len(case.k_cache)))
    moved = replace(
        case,
        k_cache=torch.empty_like(case.k_cache),
        v_cache=torch.empty_like(case.v_cache),
        block_table=np.where(case.block_table < 0, -1, new_place[case.block_table]),
    )
    moved.k_cache[new_place], moved.v_cache[new_place] = case.k_cache, case.v_cache
    assert_same_bits(run(attn, moved), run(attn, case))


def test_in_another_order(attn: PagedAttention, rng: np.random.Generator) -> None:
    case = make_case(rng, attn, Q_LENS, SEQ_LENS)
    order = rng.permutation(len(Q_LENS))
    rows = [rows_of(case, seq) for seq in order]
    shuffled = replace(
        case,
        q=torch.cat([case.q[each] for each in rows]),
        query_start_loc=np.cumsum([0, *(each.stop - each.start for each in rows)]),
        seq_lens=case.seq_lens[order],
        block_table=case.block_table[order],
    )
    found, expected = run(attn, shuffled), run(attn, case)
    for seq, each in enumerate(rows):
        assert_same_bits([x[rows_of(shuffled, seq)] for x in found], expected, each)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 64])
def test_dealt_to_another_number_of_workers(
    attn: PagedAttention, rng: np.random.Generator, num_workers: int
) -> None:
    case = make_case(rng, attn, Q_LENS, SEQ_LENS)
    expected = run(attn, case)
    attn._num_workers = dict.fromkeys(PHASES, num_workers)
    assert_same_bits(run(attn, case), expected)


def test_run_twice(attn: PagedAttention, rng: np.random.Generator) -> None:
    case = make_case(rng, attn, Q_LENS, SEQ_LENS)
    assert_same_bits(run(attn, case), run(attn, case))


THREADS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from cases import make_case, run
from tvmpaged import PagedAttention
from test_batch_invariance import Q_LENS, SEQ_LENS
for dtype in ("float32", "bfloat16"):
    attn = PagedAttention(6, 2, 64, 16, dtype, bundle=sys.argv[2])
    out, lse = run(attn, make_case(np.random.default_rng(int(sys.argv[3])), attn, Q_LENS, SEQ_LENS))
    sys.stdout.buffer.write(out.float().numpy().tobytes() + lse.numpy().tobytes())
"""


def test_on_another_number_of_threads(base_bundle: Path, rng: np.random.Generator) -> None:
    arguments = [str(Path(__file__).parent), str(base_bundle), str(rng.integers(2**31))]
    found = [
        subprocess.run(
            [sys.executable, "-c", THREADS, *arguments],
            env={**os.environ, "TVMPAGED_NUM_THREADS": threads},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for threads in ("1", "2", "5")
    ]
    assert len(found[0]) > 100_000
    assert found[0] == found[1] == found[2]


def test_instances_may_run_at_the_same_time(generic: Attention, rng: np.random.Generator) -> None:
    """Each from its own thread: calls release the GIL, so shared scratch would show."""
    attns = [generic(3, 64, 16, "float32") for _ in range(4)]
    cases = [make_case(rng, attn, Q_LENS, SEQ_LENS) for attn in attns]
    expected = [run(*each) for each in zip(attns, cases, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(run, attns, cases))
            for one, other in zip(found, expected, strict=True):
                assert_same_bits(one, other)
