"""A spec's search in a page that a person reads: ``summary.md`` beside the record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmpaged.files import replace_file
from tvmpaged.records import Latency, Record
from tvmpaged.tuning.trial import Trial

SUMMARY_NAME = "summary.md"


def write_summary(folder: Path, record: Record, trials: Sequence[Trial]) -> Path:
    """Write the page and return its path."""
    path = folder / SUMMARY_NAME
    replace_file(path, summary(record, trials).encode())
    return path


def summary(record: Record, trials: Sequence[Trial]) -> str:
    """Return the page."""
    new, old = record.latency_us, record.default_latency_us
    rate = (
        f"{record.gb_per_s:.1f} GB/s of K and V"
        if record.gb_per_s is not None
        else f"{record.gflop_per_s:.1f} GFLOP/s"
    )
    roof = _roof(record)
    facts = ", ".join(f"{name} {value}" for name, value in (record.gpu or {}).items())
    unit = "threads" if record.target.kind == "cpu" else "multiprocessors"
    winner = "the untuned default" if record.is_default else "a candidate"
    lines = [
        f"# {record.spec}",
        "",
        f"Target {record.target}, record {record.record_id}, {record.created_at}.",
        f"Measured on {record.device} with {record.num_threads} {unit}.",
        *([facts] if facts else []),
        "",
        f"The winner is {winner}: {record.speedup:.2f} times as fast as the default, {rate}.",
        *(["", roof] if roof else []),
        "",
        "| | median us | p10 | p90 | calls | disturbed |",
        "|---|---|---|---|---|---|",
        *(_row("winner", new), _row("default", old)),
        "",
        "| option | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in record.choices.items()),
        "",
        f"{record.trials} candidates were tried; failed: {_failures(record)}.",
        "",
        "| option | what its values cost: the best time with each by the best of all |",
        "|---|---|",
        *(f"| {name} | {_worth(values)} |" for name, values in option_costs(trials).items()),
        "",
        "| trial | best so far, us |",
        "|---|---|",
        *(f"| {index} | {best:.1f} |" for index, best in steps(trials)),
        "",
    ]
    return "\n".join(lines)


def _row(name: str, latency: Latency) -> str:
    times = " | ".join(f"{us:.1f}" for us in (latency.median, latency.p10, latency.p90))
    return f"| {name} | {times} | {latency.repeats} | {latency.disturbed} |"


def _roof(record: Record) -> str:
    if record.roof_fraction is None:
        return ""
    measured = (
        f"reads {record.roof_gb_per_s:.1f} GB/s"
        if record.roof_gb_per_s is not None
        else f"multiplies at {record.roof_gflop_per_s:.1f} GFLOP/s"
    )
    return (
        f"That is {record.roof_fraction:.0%} of the measured roof: timed in turns with it, this "
        f"machine {measured} with as many threads."
    )


def _failures(record: Record) -> str:
    return ", ".join(f"{count} {name}" for name, count in record.failures.items()) or "none"


def option_costs(trials: Sequence[Trial]) -> dict[str, dict[Any, float]]:
    """Return what each value of each option costs, as far as the trials tell.

    The cost of a value is the best time with it by the best time of all: 1.0 for the winner's own.
    An option whose values all cost nothing is worth nothing.
    """
    timed = [each for each in trials if each.latency_us is not None]
    if not timed:
        return {}
    best = min(each.median_us for each in timed)
    costs: dict[str, dict[Any, float]] = {name: {} for name in timed[0].choices}
    for each in sorted(timed, key=lambda trial: trial.median_us):
        for name, value in each.choices.items():
            costs.setdefault(name, {}).setdefault(value, each.median_us / best)
    return costs


def _worth(costs: dict[Any, float]) -> str:
    return ", ".join(f"{value}: {cost:.2f}" for value, cost in costs.items())


def steps(trials: Sequence[Trial]) -> list[tuple[int, float]]:
    """Return where the best time fell: (trial, counted from 1; its median in microseconds)."""
    best, found = float("inf"), []
    for index, each in enumerate(trials, start=1):
        if each.median_us < best:
            best = each.median_us
            found.append((index, best))
    return found
