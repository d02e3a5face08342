"""What decides: times that compare, finalists, the clock, and a check that lets nothing through."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from record_tools import make_record
from tune_tools import SPEC, TARGET, FakeMachine, known_us, work

from tvmpaged import records, schedules, tune
from tvmpaged.errors import UserError
from tvmpaged.records import Latency
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.tuning import finalists, measure_worker, session, task, timing
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import read_searches
from tvmpaged.tuning.machine import Machine
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.session import Session
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.work import Settings
from tvmpaged.tuning.workload import Workload

DEFAULT = schedules.default_choices(SPEC, TARGET)


def test_the_fastest_wins_though_the_second_is_simpler() -> None:
    default = {"a": 0, "b": 0, "c": 0}
    contenders = [default, default | {"a": 1, "b": 1, "c": 1}, default | {"a": 1}]
    assert finalists._winner(contenders, [1.0, 1.10, 1.05]) == 1
    assert finalists._winner(contenders, [1.0, 1.055, 1.05]) == 2  # within what is worth its place
    assert finalists._winner(contenders, [1.0, 1.005, 0.9]) == 0


class FinalMachine(FakeMachine):
    """Lets the finalists' round fail while a certain number takes part."""

    failing = 4

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        if len(candidates) >= self.failing:
            return Answer({}, "crash", "SIGSEGV")
        return super().measure(spec, workload, merge, candidates, **options)


def test_a_finalist_that_fails_leaves_the_others_their_turn(tmp_path: Path) -> None:
    record = work(FinalMachine(tmp_path), tmp_path, trials=24).run()
    assert record.failures == {"crash": 1}
    assert record.choices == work(FakeMachine(tmp_path), tmp_path / "b", trials=24).run().choices


class SlowFinals(FakeMachine):
    """Takes twice as long in the finalists' round."""

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        answer = super().measure(spec, workload, merge, candidates, **options)
        if options.get("phase") == "finalists":
            for each in answer.reply["samples"]:
                each["times_us"] = [2 * us for us in each["times_us"]]
        return answer


def test_the_last_that_is_told_is_what_the_record_says(tmp_path: Path) -> None:
    told: list[Status] = []
    search = work(SlowFinals(tmp_path), tmp_path, trials=16)
    search.on_status = told.append
    record = search.run()
    assert [each.phase for each in told[-2:]] == ["finalists", "done"]
    assert told[-1].best_us == record.latency_us.median > 1.5 * (told[-2].best_us or 0)
    assert told[-1].default_us == record.default_latency_us.median
    assert told[-1].speedup == pytest.approx(record.speedup, abs=1e-3)
    assert told[-1].rate == pytest.approx(record.gb_per_s, rel=1e-3)
    assert told[-1].roof_fraction == record.roof_fraction


class BusyFinals(FakeMachine):
    """Has most rounds of the finals disturbed, and a roof below what kernels reach."""

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        answer = super().measure(spec, workload, merge, candidates, **options)
        if options.get("phase") == "finalists":
            for each in answer.reply["samples"]:
                each["disturbed"] = 200
        return answer


def test_a_busy_machine_is_said_and_so_is_a_roof_that_is_none(tmp_path: Path) -> None:
    told: list[str] = []
    machine = BusyFinals(tmp_path)
    machine.roof = MeasuredRoof("gb_per_s", 25.0, 1.43)
    search = work(machine, tmp_path, trials=16)
    search.on_warning = told.append
    record = search.run()
    assert ["the machine was busy: 200 rounds" in each for each in told] == [True]
    assert "--resume" in told[0]
    assert record.roof_fraction is None


def test_a_quiet_machine_says_nothing(tmp_path: Path) -> None:
    search = work(FakeMachine(tmp_path), tmp_path, trials=16)
    search.on_warning = lambda said: pytest.fail(said)
    assert search.run().roof_fraction == 0.5


def test_more_than_its_roof_is_not_shown_of_any_candidate(tmp_path: Path) -> None:
    told: list[Status] = []
    machine = FakeMachine(tmp_path)
    machine.roof = MeasuredRoof("gb_per_s", 0.01)
    search = work(machine, tmp_path, trials=16)
    search.on_status = told.append
    search.run()
    assert {each.roof_fraction for each in told} == {None}


def test_a_few_quick_calls_do_not_make_a_winner(tmp_path: Path) -> None:
    """Medians and rounds say that it is faster; its quickest calls are slower."""

    class Bimodal(FakeMachine):
        def measure(self, *what: Any, **options: Any) -> Answer:
            answer = super().measure(*what, **options)
            if options.get("phase") == "finalists":
                for index, each in enumerate(answer.reply["samples"]):
                    us = 500.0 if index == 0 else 510.0
                    slow = 5000.0 if index == 0 else 3000.0
                    each |= {"times_us": [us] * 4 + [slow] * 6, "speedup": 1.6}
                answer.reply["samples"][0]["speedup"] = 1.0
            return answer

    record = work(Bimodal(tmp_path), tmp_path, trials=24).run()
    assert record.is_default
    assert record.speedup == 1.0


def test_a_shorter_search_does_not_replace_a_better_record(tmp_path: Path) -> None:
    first = work(FakeMachine(tmp_path), tmp_path, trials=40).run()
    assert not first.is_default
    later = work(FakeMachine(tmp_path), tmp_path, trials=2, seed=9).run()
    assert later.choices == first.choices
    assert later.trials == 2
    # What no search may try any more does not stand in anybody's way.
    path = records.folder(tmp_path, TARGET, SPEC) / "record.json"
    path.write_text("{")
    assert work(FakeMachine(tmp_path), tmp_path, trials=2, seed=9).run().choices != first.choices


def test_resuming_what_is_not_there_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    for folder, expected in ((tmp_path / "a", 1), (tmp_path / "a", 1), (tmp_path / "typo", 2)):
        search = work(FakeMachine(tmp_path), folder, trials=8, resume=True)
        search.on_warning = told.append
        search.run()
        assert len(told) == expected
    assert "nothing to resume in" in told[-1]
    assert str(tmp_path / "typo") in told[-1]


class StoppedMachine(FakeMachine):
    """Is interrupted when the finalists' turn comes."""

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        self.stop |= options.get("phase") == "finalists"
        return super().measure(spec, workload, merge, candidates, **options)


def test_an_interrupt_among_finalists_fails_none_of_them(tmp_path: Path) -> None:
    with pytest.raises(GivenUpError):
        work(StoppedMachine(tmp_path), tmp_path, trials=16).run()
    assert records.load(tmp_path, TARGET, SPEC) is None


def test_a_record_holds_the_times_of_winner_and_default(tmp_path: Path) -> None:
    record = work(FakeMachine(tmp_path), tmp_path, trials=24).run()
    assert not record.is_default
    assert record.workload == Workload.representative(SPEC).as_dict()
    assert record.latency_us.median == pytest.approx(known_us(record.choices), abs=0.01)
    assert record.default_latency_us.median == pytest.approx(known_us(DEFAULT), abs=0.01)
    expected = known_us(DEFAULT) / known_us(record.choices)
    assert record.speedup == pytest.approx(expected, abs=1e-3)


class DeceivedMachine(FakeMachine):
    """Sees finalists twice as fast: by the rounds' ratios, by their times, or by both."""

    by = ""

    def measure(
        self, spec: Any, workload: Any, merge: Any, candidates: Sequence[Choices], **options: Any
    ) -> Answer:
        answer = super().measure(spec, workload, merge, candidates, **options)
        if options.get("phase") == "finalists":
            for each in answer.reply["samples"][1:]:
                each["speedup"] *= 2 if self.by in ("rounds", "both") else 1
                factor = 2 if self.by in ("times", "both") else 1
                each["times_us"] = [us / factor for us in each["times_us"]]
        return answer


@pytest.mark.parametrize(("by", "factor"), [("rounds", 1), ("times", 1), ("both", 2)])
def test_a_winner_is_as_much_faster_as_both_rounds_and_times_say(
    tmp_path: Path, by: str, factor: int
) -> None:
    machine = DeceivedMachine(tmp_path)
    machine.by = by
    record = work(machine, tmp_path, trials=24).run()
    expected = factor * known_us(DEFAULT) / known_us(record.choices)
    assert record.speedup == pytest.approx(expected, abs=1e-3)


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
HOPELESS = DEFAULT | {"prefetch_level": 1, "prefetch_keys": 0, "step": "columns"}


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


@pytest.mark.parametrize(("left", "size"), [(100.0, 8), (5.5, 5), (0.5, 0), (-1.0, 0)])
def test_a_batch_ends_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, left: float, size: int
) -> None:
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    machine = SimpleNamespace(interrupted=lambda: False)
    task: Any = SimpleNamespace(machine=machine, answers={})
    found = Session(task=task, num_trials=100, deadline=1000.0 + left, starts=[DEFAULT])
    found.trials = {"x": Trial(DEFAULT, reason="run")}
    found._seconds_each = 1.0
    assert found._batch_size() == size


@pytest.mark.parametrize(("took", "expected"), [(8.0, 8.0), (2.0, 3.0)])
def test_slow_batches_count_at_once_and_quick_ones_by_and_by(
    monkeypatch: pytest.MonkeyPatch, took: float, expected: float
) -> None:
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    task: Any = SimpleNamespace(answers={"new": None})
    found = Session(task=task, num_trials=100, deadline=2000.0, starts=[DEFAULT])
    found._seconds_each, found._batch_began = 4.0, 1000.0 - took
    found._took([Trial(DEFAULT, reason="run")])
    assert found._seconds_each == expected


def test_what_a_resumed_log_answers_says_nothing_of_the_time_left(tmp_path: Path) -> None:
    work(FakeMachine(tmp_path), tmp_path, trials=24).run()
    told: list[Status] = []
    resumed = work(FakeMachine(tmp_path), tmp_path, trials=40, resume=True)
    resumed.on_status = told.append
    resumed.run()
    searching = [each for each in told if each.phase in ("start", "search")]
    from_log = [each for each in searching if each.trials <= 24]
    assert len(from_log) >= 3
    assert all(each.eta_s is None for each in from_log)
    assert all(each.eta_s is not None for each in searching if each.trials > 24)


def test_without_the_merge_kernel_nothing_is_searched(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    machine.broken = lambda choices: "step" not in choices
    with pytest.raises(UserError, match=r"merge.* cannot be compiled: broken"):
        work(machine, tmp_path, trials=8).run()
    assert machine.measured == []


def test_those_that_are_left_share_the_time_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert [session.share_until(1300.0, left) for left in (3, 2, 1)] == [1100.0, 1150.0, 1300.0]


def test_specs_share_the_time_and_leave_some_for_their_finalists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    machine = SimpleNamespace(start=lambda: now.append(now[-1] + 20.0))
    deadlines: list[tuple[float, float]] = []

    class Fake:
        def __init__(
            self, spec: Any, target: Any, settings: Any, _: Any, deadline: float, *rest: Any
        ) -> None:
            self.deadline = deadline

        def run(self) -> Any:
            deadlines.append((now[-1], self.deadline))
            now.append(self.deadline)
            if len(deadlines) == 2:
                raise UserError("the second one fails")

    monkeypatch.setattr(tune, "Work", Fake)
    monkeypatch.setattr(tune, "open_machine", lambda interrupt, gpus: nullcontext(machine))
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    specs = [replace(SPEC, group_size=each) for each in (1, 2, 3)]
    settings = Settings(time_limit_s=320.0, use_mlflow=False)
    results = tune.tune(specs, TARGET, settings)
    # 300 s are left when the workers have started; they took 20 s, so the finalists get 30.
    assert deadlines[0] == (1020.0, 1020.0 + 100.0 - 30.0)
    assert deadlines[1] == (1090.0, 1090.0 + 115.0 - 30.0)
    assert deadlines[2] == (1175.0, 1175.0 + 145.0 - 30.0)
    # One that fails leaves the others their turn.
    assert [each.failure for each in results] == ["", "the second one fails", ""]


def test_a_call_that_waited_for_a_core_is_not_clean() -> None:
    def once(waited_ns: int, call: Callable[[], None]) -> timing.Taken:
        count = iter((0, waited_ns))
        queue: Any = SimpleNamespace(waited_ns=lambda: next(count))
        return timing.timed_once(call, queue)

    def long() -> None:
        time.sleep(0.01)

    def short() -> None: ...

    assert once(0, long).clean
    assert not once(5_000_000, long).clean
    assert once(15_000, short).clean  # to wake a thread takes as long
    assert not once(5_000_000, short).clean


# --- what is on the disk -----------------------------------------------------------------------


def test_a_record_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name} {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    path = records.save(tmp_path, make_record())
    new = done[0].removeprefix("sync ")
    assert new != "record.json"
    assert done == [f"sync {new}", f"rename {new} record.json", f"sync {path.parent.name}"]
