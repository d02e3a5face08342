"""One candidate's time: comparable with all others, and taken again where it leads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tune_tools import SPEC, TARGET, FakeMachine, known_us, work

from tvmpaged import records, schedules
from tvmpaged.errors import UserError
from tvmpaged.records import Latency
from tvmpaged.tuning import measure_worker, task, timing
from tvmpaged.tuning.log import read_searches
from tvmpaged.tuning.machine import Machine
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.workload import Workload

DEFAULT = schedules.default_choices(SPEC, TARGET)


class DriftingMachine(FakeMachine):
    """Becomes slower from call to call, as a machine does that others use."""

    calls = 0

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        answer = super().measure(spec, workload, merge, candidates, **options)
        drift = 1.0 + 0.1 * self.calls
        self.calls += 1
        for each in answer.reply["samples"]:
            each["times_us"] = [us * drift for us in each["times_us"]]
        return answer


def test_times_of_different_moments_compare(tmp_path: Path) -> None:
    work(DriftingMachine(tmp_path), tmp_path, trials=16).run()
    log = records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl"
    (found,) = read_searches(log)
    for each in found.trials.values():
        assert each.median_us == pytest.approx(known_us(each.choices), rel=1e-3)


class LuckyMachine(FakeMachine):
    """Sees every third candidate at half its time, the first time it is asked."""

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        before = len(self.measured)
        answer = super().measure(spec, workload, merge, candidates, **options)
        if before and before < len(self.measured) and before % 3 == 0:
            sample = answer.reply["samples"][-1]
            sample["times_us"] = [us / 2 for us in sample["times_us"]]
            sample["speedup"] *= 2
        return answer


def test_a_leader_by_luck_is_found_out_at_once(tmp_path: Path) -> None:
    machine = LuckyMachine(tmp_path)
    work(machine, tmp_path, trials=16).run()
    log = records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl"
    (found,) = read_searches(log)
    lucky = [found.trials[key] for key in machine.measured[3:16:3]]
    assert len(lucky) == 5
    for each in lucky:
        assert each.median_us == pytest.approx(known_us(each.choices), rel=1e-3)


class AskedMachine(FakeMachine):
    """Keeps what it is asked to time, and the speed-up below which a candidate may be let go."""

    def __init__(self, folder: Path, fate: Any = lambda _choices: None) -> None:
        super().__init__(folder, fate)
        self.asked: list[tuple[Choices, float]] = []

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        self.asked.append((candidates[-1], options["leading_speedup"]))
        return super().measure(spec, workload, merge, candidates, **options)

    def run(self, *candidates: Choices) -> list[Trial]:
        machine, workload = cast("Machine", self), Workload(1, (1,), (1,))
        mine = Task(machine, SPEC, TARGET, workload, Path("merge.so"), DEFAULT, 1, 0)
        for each in candidates:
            self.path(SPEC, choices_key(each)).touch()
        return [mine.run(choices_key(each), each) for each in candidates]


SLOWER = DEFAULT | {"prefetch_level": 1}
FASTER = DEFAULT | {"prefetch_keys": 64}
HOPELESS = DEFAULT | {"prefetch_level": 1, "prefetch_keys": 0, "row_tile": 1}


def test_who_leads_is_timed_thrice_and_the_others_once_against_the_best(tmp_path: Path) -> None:
    machine = AskedMachine(tmp_path)
    machine.run(DEFAULT, FASTER, SLOWER)
    lead = known_us(DEFAULT) / known_us(FASTER)
    assert lead > 1.01
    assert [each for each, _ in machine.asked] == [DEFAULT, FASTER, FASTER, FASTER, SLOWER]
    least = [speedup for _, speedup in machine.asked]
    assert least == [0.0, 1.0, 1.0, 1.0, pytest.approx(lead, rel=1e-3)]


def test_of_a_leaders_times_the_middle_one_counts() -> None:
    trials = [Trial(DEFAULT, Latency.of([us])) for us in (10.0, 30.0, 20.0)]
    assert task._middle(trials) is trials[2]


def test_how_long_to_time_and_what_must_be_beaten_reach_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, float] = {}

    def ask(_machine: Any, *asked: Any) -> Answer:
        return Answer(measure_worker.measure_candidates(asked[3]))

    def measure(_calls: Any, _clock: Any, **options: float) -> list[timing.Samples]:
        told.update(options)
        return []

    monkeypatch.setattr(Machine, "_ask", ask)
    monkeypatch.setattr(measure_worker, "_load", lambda _path, _symbol: None)
    monkeypatch.setattr(measure_worker, "measure", measure)
    limits = {"min_seconds": 0.25, "max_seconds": 0.75, "leading_speedup": 1.5}
    machine, workload = Machine([], [], tmp_path, 1), Workload(1, (1,), (1,))
    machine.measure(SPEC, workload, tmp_path, [], rotation_bytes=1, seed=0, **limits)  # type: ignore[arg-type]
    assert told == limits


def test_a_leader_that_fails_when_timed_again_does_not_lead(tmp_path: Path) -> None:
    def fate(choices: Choices) -> Answer | None:
        times = [each for each, _ in machine.asked].count(FASTER)
        return Answer({}, "crash", "SIGSEGV") if choices == FASTER and times == 3 else None

    machine = AskedMachine(tmp_path, fate)
    _, leader, after = machine.run(DEFAULT, FASTER, SLOWER)
    assert (leader.reason, leader.latency_us) == ("crash", None)
    assert machine.asked[-1] == (SLOWER, 1.0)
    assert after.median_us == pytest.approx(known_us(SLOWER), rel=1e-3)


def test_what_may_still_win_is_kept_and_the_hopeless_is_not(tmp_path: Path) -> None:
    candidates = [DEFAULT, FASTER, SLOWER, HOPELESS]
    machine = AskedMachine(tmp_path)
    machine.run(*candidates)
    assert known_us(HOPELESS) > timing.HOPELESS * known_us(FASTER)
    there = [machine.path(SPEC, choices_key(each)).exists() for each in candidates]
    assert there == [True, True, True, False]


def test_without_the_merge_kernel_nothing_is_searched(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.broken = lambda choices: "step" not in choices
    with pytest.raises(UserError, match=r"merge.* cannot be compiled: broken"):
        work(machine, tmp_path, trials=8).run()
    assert machine.measured == []
