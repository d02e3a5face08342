"""What came of measuring elsewhere, held against itself: each answer's ratios, and all together."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offline_tools import KEYS, SPEC, edit, measure_with_fakes, results, write_export

from tvmpaged import tune_offline
from tvmpaged.roofs import CREDIBLE
from tvmpaged.tuning import doubt, timing
from tvmpaged.tuning.export_manifest import RESULTS_NAME
from tvmpaged.tuning.task import CONFIRMATIONS
from tvmpaged.tuning.timing import Taken
from tvmpaged.tuning.work import Settings
from tvmpaged.tuning.workload import Workload

#: The first of the fakes' finalists, which took 400 us where the default took 500.
BEST = KEYS[6]
#: What the made-up device's kernels read, in bytes, and its roof.
BYTES, ROOF_GB_PER_S = Workload.representative(SPEC, 3).kv_bytes(SPEC), 120.0


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    write_export(folder)
    measure_with_fakes(folder)
    return folder


def take_in(folder: Path) -> tune_offline.Tuned:
    settings = Settings(work_dir=folder.parent / "logs", use_mlflow=False)
    (tuned,) = tune_offline.import_results(folder, settings)
    return tuned


def claim(folder: Path, us: float, phases: Sequence[str], turns: slice = slice(None)) -> None:
    """Let the best candidate have taken so long, its speed-up to match; in some of its answers."""

    def change(data: Any) -> None:
        for phase in phases:
            answers = [
                each
                for each in data["answers"]
                if each["phase"] == phase and BEST in each["keys"] and each["reply"]
            ]
            for answer in answers[turns]:
                first = answer["reply"]["samples"][0]
                sample = answer["reply"]["samples"][answer["keys"].index(BEST)]
                times = [us * each / 500 for each in first["times_us"]]
                sample.update(times_us=times, speedup=500 / us)

    edit(folder / RESULTS_NAME, change)


def test_what_its_search_never_saw_wins_no_finals(measured: Path) -> None:
    claim(measured, 250.0, ["finalists"])
    tuned = take_in(measured)
    assert tuned.record is None
    assert f"in the finals {BEST} took 250 us, 2 times as fast" in tuned.failure
    assert "in its search 1.25 times" in tuned.failure
    assert "--no-resume" in tuned.failure
    assert str(measured) in tuned.failure
    assert not (measured.parent / "logs").exists()


@pytest.mark.parametrize(
    ("us", "phases"), [(300.0, ["finalists"]), (490.0, ["finalists"]), (300.0, ["search"])]
)
def test_finals_may_see_a_little_more_than_the_search_or_less(
    measured: Path, us: float, phases: list[str]
) -> None:
    claim(measured, us, phases)
    assert take_in(measured).record is not None


@pytest.mark.parametrize("turn", range(1 + CONFIRMATIONS))
def test_of_a_leaders_answers_the_fastest_counts(measured: Path, turn: int) -> None:
    """Who leads is asked for again: finals may see what any one of its answers saw."""
    asked = [each["keys"] for each in results(measured)["answers"] if each["phase"] == "search"]
    assert asked.count([KEYS[0], BEST]) == 1 + CONFIRMATIONS
    claim(measured, 250.0, ["finalists"])
    claim(measured, 250.0, ["search"], slice(turn, turn + 1))
    assert take_in(measured).record is not None


@pytest.mark.parametrize(("us", "is_refused"), [(490.0, False), (320.0, True)])
def test_a_busy_moment_of_the_search_refuses_nobody(us: float, is_refused: bool) -> None:
    """As a search of few trials may take all into its finals, those timed beside others too."""
    assert bool(doubt._ahead([KEYS[0], BEST], [500.0, us], {BEST: 0.5})) == is_refused


def test_nothing_is_faster_than_the_roof_of_its_machine(measured: Path) -> None:
    roof_us = BYTES / ROOF_GB_PER_S / 1e3
    claim(measured, roof_us / CREDIBLE * 1.01, ["search", "finalists"])
    assert take_in(measured).record is not None
    claim(measured, roof_us / CREDIBLE * 0.99, ["search", "finalists"])
    tuned = take_in(measured)
    assert f"in the finals {BEST} reached 133.3 GB/s, and this machine's roof" in tuned.failure
    assert "measured at 120 GB/s" in tuned.failure


def test_a_roof_below_the_default_is_none_and_refuses_nobody(measured: Path) -> None:
    def change(data: Any) -> None:
        for answer in data["answers"]:
            if answer["phase"] == "roof":
                answer["reply"]["roof"].update(value=10.0)

    edit(measured / RESULTS_NAME, change)
    assert take_in(measured).record is not None


def test_the_device_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubt, "CREDIBLE", 0.45)
    write_export(tmp_path / "export")
    (found,) = measure_with_fakes(tmp_path / "export").specs
    assert "and this machine's roof was measured at 120 GB/s" in found.failure
    assert found.result is None


# --- the ratios of one answer --------------------------------------------------------------------


def samples(rounds: list[list[Taken]]) -> Any:
    """Return what a worker would send."""
    return json.loads(json.dumps([asdict(each) for each in timing.summary(rounds)]))


def some_rounds(rng: np.random.Generator, busy: float) -> list[list[Taken]]:
    """Return rounds of four contenders on a machine of which others take a share."""
    count, us = int(rng.integers(5, 200)), rng.uniform(100, 300, 4)
    waits = rng.random((count, 4)) < busy
    times = us * rng.lognormal(0, 0.05, (count, 4)) * np.where(waits, rng.uniform(1, 4), 1)
    return [
        [Taken(float(us), not wait, 0.5 * wait) for us, wait in zip(*each, strict=True)]
        for each in zip(times, waits, strict=True)
    ]


@pytest.mark.parametrize("busy", [0.0, 0.02, 0.1, 0.3, 0.8])
def test_what_was_measured_is_always_believed(rng: np.random.Generator, busy: float) -> None:
    for _ in range(200):
        found = samples(some_rounds(rng, busy))
        assert doubt._doubt_times({"samples": found}, 4) == ""


@pytest.mark.parametrize("busy", [0.0, 0.02])
def test_on_a_quiet_machine_a_speedup_is_what_the_times_say(
    rng: np.random.Generator, busy: float
) -> None:
    for _ in range(50):
        rounds = some_rounds(rng, busy)
        if len(rounds) > 20:
            found = samples(rounds)
            found[2]["speedup"] *= 1.001
            assert "is not what its times say" in doubt._doubt_times({"samples": found}, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda each: each[1].update(speedup=2.5), "speedup=2.5 is not"),
        (lambda each: each[1]["times_us"].pop(), "different numbers of times"),
        (lambda each: each[1].update(disturbed=1000, speedup=2.5), ""),
        (lambda each: each[1].update(disturbed=1000, speedup=6.5), "speedup=6.5 is not"),
    ],
)
def test_where_rounds_were_disturbed_a_speedup_has_some_room(
    change: Callable[[Any], Any], said: str
) -> None:
    rounds = [[Taken(200.0 + turn, True, 0.0), Taken(100.0, True, 0.0)] for turn in range(12)]
    found = samples(rounds)
    assert found[1]["speedup"] == statistics.median((200.0 + turn) / 100 for turn in range(12))
    change(found)
    why = doubt._doubt_times({"samples": found}, 2)
    assert (said in why) if said else (why == "")
