"""What the shape of a step costs: ragged lengths, block sizes, the block table, and the plan.

    python benchmarks/shapes.py --bundle BUNDLE --out benchmarks/results/shapes.json

Each row times two steps of the same work in turns, the whole of `PagedAttention.run`: a batch of
lengths 1 to 8,192 beside a uniform one of as many tokens, small blocks beside large, a shuffled
block table beside one that counts up. The last row is `PagedAttention.plan` beside the decode step
of 30 layers that it serves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from tvmpaged import PagedAttention
from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.tuning.clock import CpuClock
from tvmpaged.tuning.timing import measure

SECONDS = 3.0
NUM_LAYERS = 30
#: (num_qo_heads, num_kv_heads, head_dim)
HEADS = ((9, 3, 64), (32, 8, 128))
BATCH, CONTEXT = 32, 2048
SMALL_BATCH = 4

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Two steps of the same work.

    Parameters
    ----------
    what, case : str
        What is compared, and on which heads and dtype.
    ratio : float
        The first one's time by the second's, median over rounds.
    us : tuple of float
        Median times.
    rounds, disturbed : int
        Rounds that count, and calls that were set aside.
    """

    what: str
    case: str
    ratio: float
    us: tuple[float, float]
    rounds: int
    disturbed: int


@dataclass(frozen=True)
class Step:
    """One decode step on caches of its own."""

    attention: PagedAttention
    seq_lens: np.ndarray
    block_table: np.ndarray

    @classmethod
    def make(
        cls,
        heads: tuple[int, int, int],
        dtype: str,
        block_size: int,
        seq_lens: Sequence[int],
        *,
        shuffled: bool = True,
    ) -> Step:
        """Lay the sequences' blocks out in random order, or counting up."""
        num_qo_heads, num_kv_heads, head_dim = heads
        attention = PagedAttention(num_qo_heads, num_kv_heads, head_dim, block_size, dtype=dtype)
        counts = [-(-length // block_size) for length in seq_lens]
        order = np.arange(sum(counts))
        if shuffled:
            np.random.default_rng(0).shuffle(order)
        table = np.full((len(counts), max(counts)), -1, np.int32)
        for row, ids in zip(table, np.split(order, np.cumsum(counts)[:-1]), strict=True):
            row[: len(ids)] = ids
        return cls(attention, np.array(seq_lens, np.int32), table)

    def plan(self) -> object:
        """Plan it."""
        query_start_loc = np.arange(len(self.seq_lens) + 1, dtype=np.int32)
        return self.attention.plan(query_start_loc, self.seq_lens, self.block_table)

    def call(self) -> Call:
        """Return one layer's attention."""
        attention, plan = self.attention, self.plan()
        k_cache, v_cache = attention.new_cache(int(self.block_table.max()) + 1)
        k_cache.normal_()
        v_cache.normal_()
        q = torch.randn(len(self.seq_lens), attention.num_qo_heads, attention.head_dim)
        q = q.to(attention.dtype)
        out = torch.empty_like(q)
        return lambda: attention.run(plan, q, k_cache, v_cache, out=out)


def compare(what: str, case: str, first: Call, second: Call) -> Row:
    """Time two calls in turns."""
    samples = measure([first, second], CpuClock, min_seconds=SECONDS, max_seconds=3 * SECONDS)
    row = Row(
        what=what,
        case=case,
        ratio=samples[1].speedup,
        us=(statistics.median(samples[0].times_us), statistics.median(samples[1].times_us)),
        rounds=len(samples[0].times_us),
        disturbed=sum(each.disturbed for each in samples),
    )
    print(f"{row.ratio:5.2f}  {what:45} {case:24} {row.us[0]:9.0f} us", flush=True)
    return row


def ragged_lengths(total: int) -> list[int]:
    """Return `BATCH` lengths from 1 to 8,192 that add up to `total`, most of them short."""
    lengths = np.geomspace(1, 8192, BATCH)
    lengths = 1 + (lengths - 1) * (total - BATCH) / (lengths - 1).sum()
    found = [min(8192, round(each)) for each in lengths]
    found[-2] += total - sum(found)
    return found


def rows_of(heads: tuple[int, int, int], dtype: str) -> list[Row]:
    """Compare all shapes on one kind of heads."""
    case = f"{heads[0]}/{heads[1]} x {heads[2]} {dtype}"

    def step(block_size: int, lengths: Sequence[int], **options: bool) -> Step:
        return Step.make(heads, dtype, block_size, lengths, **options)

    total = 4 * 8192
    found = [
        compare(
            "ragged over uniform, as many tokens",
            case,
            step(16, ragged_lengths(total)).call(),
            step(16, [total // BATCH] * BATCH).call(),
        )
    ]
    lengths = [CONTEXT] * SMALL_BATCH
    for small, large in ((1, 16), (16, 32), (7, 32)):
        found.append(
            compare(
                f"block_size {small} over {large}",
                case,
                step(small, lengths).call(),
                step(large, lengths).call(),
            )
        )
    found.append(
        compare(
            "shuffled block table over one that counts up",
            case,
            step(16, lengths).call(),
            step(16, lengths, shuffled=False).call(),
        )
    )
    whole = step(16, [CONTEXT] * BATCH)
    one_layer = whole.call()
    found.append(
        compare(
            f"plan over a step of {NUM_LAYERS} layers, batch {BATCH}",
            case,
            whole.plan,
            lambda: [one_layer() for _ in range(NUM_LAYERS)],
        )
    )
    return found


def main() -> None:
    """Run all rows and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bundle", help="where the artifacts are; default: the search path")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/shapes.json"))
    arguments = parser.parse_args()
    if arguments.bundle:
        os.environ["TVMPAGED_BUNDLE"] = arguments.bundle
    torch.set_grad_enabled(False)
    rows = [
        row for heads in HEADS for dtype in ("float32", "bfloat16") for row in rows_of(heads, dtype)
    ]
    report = {
        "device": cpu_model(),
        "num_threads": num_threads(),
        "created_at": datetime.now(UTC).replace(microsecond=0).isoformat(),
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
