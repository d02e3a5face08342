"""Compare the model's search with random search on one real spec: same machine, same budget.

    python benchmarks/search_against_random.py --spec SPEC --trials 128 --seeds 10

Each seed searches once under the cost model and once at random, the untuned default first in both.
A candidate that two searches meet is timed once; random search takes its candidates from one pool
of ``--pool`` random legal lists, in an order of its own. Both end as `tvmpaged tune` does, the
finalists timed again in turns with the default; then the two winners are, with each other.
Writes ``<out>.json`` and a picture of the curves, ``<out>.png``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from tvmpaged import schedules
from tvmpaged.cpu import cpu_model, native_target, num_threads
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.finalists import decide
from tvmpaged.tuning.machine import Machine, latencies, open_machine
from tvmpaged.tuning.model_session import ModelSession
from tvmpaged.tuning.session import Session
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.starts import default_start
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, choices_key
from tvmpaged.tuning.workload import DEFAULT_NUM_KV_HEADS, Workload

#: Seconds for which two winners are compared.
COMPARE_SECONDS = 4.0
#: Winners this close count as equal: it is what one kernel timed against itself differs by.
TIE = 0.01
RESULTS = Path(__file__).parent / "results"


class Clock:
    """Adds up what calls of a function take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.monotonic()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.monotonic() - begin

        return timed


def curve(session: Session) -> list[float]:
    """Return the best time after each trial, in units of the untuned default's."""
    unit = session.trials[choices_key(session.default)].median_us
    times = [each.median_us / unit for each in session.trials.values()]
    return [float(each) for each in np.minimum.accumulate(times)]


def draw_pool(task: Task, count: int) -> list[Choices]:
    """Return random legal lists, all different, without the default."""
    spec, target = task.spec, task.target
    candidates = Candidates(
        schedules.space(spec, target),
        lambda each: schedules.reject(spec, target, each),
        task.default,
    )
    random = np.random.default_rng(0)
    drawn: dict[str, Choices] = {}
    while len(drawn) < count:
        each = candidates.draw(random)
        if each != task.default:
            drawn.setdefault(choices_key(each), each)
    return list(drawn.values())


def compare(task: Task, ours: Choices, other: Choices) -> float:
    """Return how many times as fast as `other` is `ours`, timed in turns."""
    missing = [each for each in (ours, other) if not task.artifact(each).exists()]
    task.machine.compile(task.spec, task.target, missing)
    answer = task.machine.measure(
        task.spec,
        task.workload,
        task.merge,
        [other, ours],
        rotation_bytes=task.rotation_bytes,
        seed=task.seed,
        min_seconds=COMPARE_SECONDS,
        max_seconds=2 * COMPARE_SECONDS,
    )
    latencies(answer)
    return float(answer.reply["samples"][-1]["speedup"])


def run_seed(
    make_task: Callable[[], Task], seed: int, trials: int, pool: list[Choices]
) -> dict[str, Any]:
    """Search once under the model and once at random."""
    session = ModelSession(
        task=make_task(),
        seed=seed,
        num_trials=trials,
        deadline=float("inf"),
        starts=[make_task().default],
    )
    session.search()
    task = make_task()
    order = np.random.default_rng(seed).permutation(len(pool))[: trials - 1]
    blind = Session(
        task=task,
        num_trials=trials,
        deadline=float("inf"),
        starts=[task.default, *(pool[index] for index in order)],
    )
    blind.search()
    best, other = (
        decide(each.task, each.default, list(each.trials.values())) for each in (session, blind)
    )
    return {
        "seed": seed,
        "model": curve(session),
        "random": curve(blind),
        "speedup": compare(task, best.choices, other.choices),
        "model_choices": best.choices,
        "random_choices": other.choices,
        "failures": session.failures() | blind.failures(),
    }


def reached(values: list[float], level: float) -> int | None:
    """Return after how many trials a curve is at a level, or None."""
    return next((i for i, value in enumerate(values, 1) if value <= level * (1 + TIE)), None)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the seeds show together."""
    trials = len(rows[0]["model"])

    def mean_trials(search: str, level: Callable[[dict[str, Any]], float]) -> float:
        # What is not reached counts as all trials, which flatters.
        return statistics.mean(reached(row[search], level(row)) or trials for row in rows)

    def best_of_random(row: dict[str, Any]) -> float:
        return float(row["random"][-1])

    def best_of_both(row: dict[str, Any]) -> float:
        return float(min(row["model"][-1], row["random"][-1]))

    return {
        "no_worse": sum(row["speedup"] >= 1 - TIE for row in rows),
        "seeds": len(rows),
        "speedup_median": statistics.median(row["speedup"] for row in rows),
        "speedup_min": min(row["speedup"] for row in rows),
        "speedup_max": max(row["speedup"] for row in rows),
        "trials_to_best_of_random": {
            search: mean_trials(search, best_of_random) for search in ("model", "random")
        },
        "trials_to_best_of_both": {
            search: mean_trials(search, best_of_both) for search in ("model", "random")
        },
        "reached_best_of_both": {
            search: sum(reached(row[search], best_of_both(row)) is not None for row in rows)
            for search in ("model", "random")
        },
    }


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw all curves, and their medians."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, color in (("random", "#b5651d"), ("model", "#1f5fa8")):
        curves = np.array([row[name] for row in rows])
        steps = np.arange(1, curves.shape[1] + 1)
        axes.plot(steps, curves.T, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(steps, np.median(curves, axis=0), color=color, linewidth=2, label=name)
    axes.set(xscale="log", xlabel="trials", ylabel="best time / untuned default's", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run all seeds; results are written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--spec", default="prefill-q.bfloat16-kv.bfloat16-o.bfloat16-d64-v64-b16-g3-HND-n1"
    )
    parser.add_argument("--trials", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--pool", type=int, default=512)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/search_against_random")
    )
    arguments = parser.parse_args()
    spec, target = AttentionSpec.parse(arguments.spec), native_target()
    workload = Workload.representative(spec, DEFAULT_NUM_KV_HEADS)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    clock, rows = Clock(), []
    with open_machine() as machine:
        machine.start()
        machine.compile = clock.wrap(machine.compile)  # type: ignore[method-assign]
        machine.measure = clock.wrap(machine.measure)  # type: ignore[method-assign]
        make_task = _task_maker(machine, spec, workload)
        pool = draw_pool(make_task(), max(arguments.pool, arguments.trials))
        begin, clock.seconds = time.monotonic(), 0.0
        for seed in range(arguments.seeds):
            rows.append(run_seed(make_task, seed, arguments.trials, pool))
            wall = time.monotonic() - begin
            report = {
                "spec": str(spec),
                "target": str(target),
                "device": cpu_model(),
                "num_threads": num_threads(),
                "created_at": datetime.now(UTC).replace(microsecond=0).isoformat(),
                "workload": workload.as_dict(),
                "wall_s": wall,
                "share_compiling_and_measuring": clock.seconds / wall,
                "summary": summarize(rows),
                "rows": rows,
            }
            arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
            draw(
                rows,
                f"{arguments.trials} trials, {len(rows)} seeds",
                arguments.out.with_suffix(".png"),
            )
            print(seed, f"{wall:.0f} s", json.dumps(report["summary"]), flush=True)
        print(f"compiling and measuring: {100 * clock.seconds / wall:.0f}% of {wall:.0f} s")


def _task_maker(machine: Machine, spec: AttentionSpec, workload: Workload) -> Callable[[], Task]:
    target, answers = native_target(), {}
    merge_spec = AttentionSpec.make("merge", spec.out_dtype)
    merge_choices = schedules.default_choices(merge_spec, target)
    machine.compile(merge_spec, target, [merge_choices])

    def make_task() -> Task:
        return Task(
            machine=machine,
            spec=spec,
            target=target,
            workload=workload,
            merge=machine.path(merge_spec, choices_key(merge_choices)),
            default=default_start(spec, target),
            rotation_bytes=Setting.here(workload).rotation_bytes,
            seed=0,
            answers=answers,
        )

    return make_task


if __name__ == "__main__":
    main()
