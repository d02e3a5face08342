"""Print what several runs of the harness say: ratios to a peer, shares of the roof, who is behind.

    python benchmarks/peers_table.py benchmarks/results/peers_*.jsonl

Each file is one run. A case's ratio is the median of its runs' ratios, each of which was taken in
interleaved rounds; its interval is the least and the greatest. Groups are geometric means.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tvmpaged.spec import DTYPE_BYTES

CASE = re.compile(
    r"(?P<kind>\w+)-h(?P<heads>\d+)\.(?P<kv_heads>\d+)\.(?P<dim>\d+)-bs(?P<block>\d+)-(?P<dtype>\w+)"
    r"-b(?P<batch>\d+)-ctx(?P<context>\d+)-q(?P<q_len>\d+)"
)
KINDS = ("decode", "prefill", "chunked")
BASE = "vllm"
#: Contestant -> the layout of its cache.
OURS = {"tvmpaged": "HND", "tvmpaged-native": "native"}
#: K and V above this many bytes are read from memory; what the roof does in less than this many
#: microseconds is a smallest call.
LARGE_BYTES, SMALLEST_US = 40e6, 20.0
#: Above this ratio in every run a case is behind.
BEHIND = 1.05


@dataclass(frozen=True)
class Row:
    """A case under one layout, over all runs.

    Parameters
    ----------
    case, layout : str
        Which.
    ratios : tuple of float
        Our time by the peer's, one of each run.
    share, base_share : float
        Of the roof, ours and the peer's.
    roof_us : float
        What the roof would take, in the first run.
    """

    case: str
    layout: str
    ratios: tuple[float, ...]
    share: float
    base_share: float
    roof_us: float

    @property
    def ratio(self) -> float:
        """Median over runs."""
        return statistics.median(self.ratios)

    @property
    def parts(self) -> dict[str, str]:
        """What the case's name says."""
        found = CASE.fullmatch(self.case)
        assert found is not None, self.case
        return found.groupdict()

    @property
    def is_engines(self) -> bool:
        """Whether the engine would hold its cache in this layout."""
        return self.layout == "native" or self.parts["dtype"] == "float32"

    @property
    def bound(self) -> str:
        """What a call of this size is bound by."""
        parts = self.parts
        if parts["kind"] != "decode":
            return "GEMM"
        sizes = [int(parts[name]) for name in ("kv_heads", "dim", "context", "batch")]
        if 2 * DTYPE_BYTES[parts["dtype"]] * math.prod(sizes) > LARGE_BYTES:
            return "memory"
        return "smallest" if self.roof_us < SMALLEST_US else "cache"


def read(files: Iterable[Path]) -> list[Row]:
    """Return the cases that were timed beside the peer in every run."""
    runs = []
    for file in files:
        times: dict[tuple[str, str], dict[str, float]] = {}
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            if "ms" in entry:
                times[entry["case"], entry["peer"]] = entry
        runs.append(times)
    rows = []
    for case, peer in runs[0]:
        keys = [(case, peer), (case, BASE)]
        if peer in OURS and all(key in times for times in runs for key in keys):
            mine, base = ([times[key] for times in runs] for key in keys)
            rows.append(
                Row(
                    case,
                    OURS[peer],
                    tuple(a["ms"] / b["ms"] for a, b in zip(mine, base, strict=True)),
                    statistics.geometric_mean(each["frac"] for each in mine),
                    statistics.geometric_mean(each["frac"] for each in base),
                    1e3 * mine[0]["ms"] * mine[0]["frac"],
                )
            )
    return rows


def table(title: str, rows: Iterable[Row], names: tuple[str, ...]) -> None:
    """Print a table, a line for each group of equal names."""
    groups = defaultdict(list)
    for row in rows:
        parts = row.parts | {"layout": row.layout, "bound": row.bound}
        parts["heads"] = f"{parts['heads']}/{parts['kv_heads']} x {parts['dim']}"
        groups[tuple(parts[name] for name in names)].append(row)
    columns = (*names, "cases", f"time over {BASE}'s (worst)", "of the roof (least)", BASE)
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for key, group in sorted(groups.items(), key=lambda each: (KINDS.index(each[0][0]), each[0])):
        ratios, shares = [each.ratio for each in group], [each.share for each in group]
        cells = (
            str(len(group)),
            f"{statistics.geometric_mean(ratios):.2f} ({max(ratios):.2f})",
            f"{statistics.geometric_mean(shares):.0%} ({min(shares):.0%})",
            f"{statistics.geometric_mean(each.base_share for each in group):.0%}",
        )
        print(f"| {' | '.join((*key, *cells))} |")


def main() -> None:
    """Read the runs and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("runs", nargs="+", type=Path)
    rows = read(parser.parse_args().runs)
    engines = [each for each in rows if each.is_engines]
    table("By layout", rows, ("kind", "dtype", "block", "layout"))
    table("All, in the engine's layout", engines, ("kind",))
    table("HND", [each for each in rows if each.layout == "HND"], ("kind",))
    table("By what bounds it", rows, ("kind", "bound", "dtype", "heads", "block", "layout"))
    print(f"\nBehind by more than {BEHIND} in every run, in the engine's layout:")
    for each in engines:
        if min(each.ratios) > BEHIND:
            print(f"- {each.case}: {min(each.ratios):.2f} to {max(each.ratios):.2f}")


if __name__ == "__main__":
    main()
