"""How long a search goes on and what it tells meanwhile: batches, deadlines, shares, logs."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tune_tools import SPEC, TARGET, FakeMachine, work

from tvmpaged import schedules, tune
from tvmpaged.errors import UserError
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.tuning import session
from tvmpaged.tuning.session import Session
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.trial import Trial
from tvmpaged.tuning.work import Settings

DEFAULT = schedules.default_choices(SPEC, TARGET)


def test_more_than_its_roof_is_not_shown_of_any_candidate(tmp_path: Path) -> None:
    told: list[Status] = []
    machine = FakeMachine(tmp_path)
    machine.roof = MeasuredRoof("gb_per_s", 0.01)
    search = work(machine, tmp_path, trials=16)
    search.on_status = told.append
    search.run()
    assert {each.roof_fraction for each in told} == {None}


def test_resuming_what_is_not_there_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    for folder, expected in ((tmp_path / "a", 1), (tmp_path / "a", 1), (tmp_path / "typo", 2)):
        search = work(FakeMachine(tmp_path), folder, trials=8, resume=True)
        search.on_warning = told.append
        search.run()
        assert len(told) == expected
    assert "nothing to resume in" in told[-1]
    assert str(tmp_path / "typo") in told[-1]


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
