"""The finals: who wins, by how much, and what a busy machine or a lucky call cannot do."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tune_tools import SPEC, TARGET, FakeMachine, known_us, work

from tvmpaged import records, schedules
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.tuning import finalists
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.trial import Choices
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
