"""The log of trials: nothing that was finished is lost, and a resumed search goes the same path."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tune_tools import SPEC, TARGET, FakeMachine, known_us, work

from tvmpaged import records
from tvmpaged.errors import UserError
from tvmpaged.records import Latency
from tvmpaged.tuning import device
from tvmpaged.tuning import log as trial_log
from tvmpaged.tuning.device import cpu_caches, rotation_bytes
from tvmpaged.tuning.finalists import MIN_GAIN
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import open_log, read_runs
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.summary import option_costs, steps
from tvmpaged.tuning.trial import Trial
from tvmpaged.tuning.workload import Workload

SETTING = Setting.here(Workload.representative(SPEC))
TRIALS = [
    Trial({"lanes": 8}, Latency.of([10.0, 11.0])),
    Trial({"lanes": 16}, reason="crash", detail="SIGSEGV"),
    Trial({"lanes": 4}, Latency.of([9.0])),
]


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.start(SETTING, 3, "run")
        log.append(TRIALS[:2])
        log.append(TRIALS[2:])
        found = log.earlier(SETTING)
    assert found.trials == TRIALS
    assert (found.seed, found.mlflow_run_id) == (3, "run")


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_costs_that_line_only(tmp_path: Path, cut: int) -> None:
    with open_log(tmp_path) as log:
        log.start(SETTING, 0)
        log.append(TRIALS)
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    with open_log(tmp_path) as log:
        kept = log.earlier(SETTING).trials
        assert kept[:2] == TRIALS[:2]
        log.append(TRIALS[2:])
        assert log.earlier(SETTING).trials == TRIALS


def test_noise_between_the_lines_is_passed_over(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.start(SETTING, 0)
        with log.path.open("ab") as file:
            file.write(b'\xff\xfe\n[1]\n{"kind": "trial"}\n{"kind": "run"}\n')
        log.append(TRIALS)
        assert log.earlier(SETTING).trials == TRIALS


@pytest.mark.parametrize(
    "change",
    [
        {"source_sha256": "1"},
        {"tvm": "0.28"},
        {"tvm_ffi": "0.2"},
        {"device": "another CPU"},
        {"num_threads": 77},
        {"caches_bytes": {}},
        {"rotation_bytes": 1},
        {"workload": Workload(1, (1,), (1,))},
    ],
)
def test_times_of_another_setting_are_not_compared(tmp_path: Path, change: dict[str, Any]) -> None:
    other = replace(SETTING, **change)
    with open_log(tmp_path) as log:
        log.start(other, 0)
        log.append(TRIALS[:1])
        log.start(SETTING, 0)
        log.append(TRIALS[2:])
        assert log.earlier(SETTING).trials == TRIALS[2:]
        assert log.earlier(other).trials == TRIALS[:1]


def hold(folder: str, held: Any) -> None:
    with open_log(Path(folder)):
        held.set()
        time.sleep(60)


def test_one_writer_per_log_and_a_killed_one_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_log, "LOCK_TIMEOUT_S", 0.3)
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    holder = context.Process(target=hold, args=(str(tmp_path), held))
    holder.start()
    try:
        assert held.wait(60)
        said = f"process {holder.pid}; waited .* s; run this again"
        with pytest.raises(UserError, match=said), open_log(tmp_path):
            pass
    finally:
        holder.kill()
        holder.join()
    with open_log(tmp_path) as log:
        log.append([])


def test_a_full_disk_stops_the_search_and_keeps_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = work(FakeMachine(tmp_path), tmp_path)
    real, count = os.fsync, [0]

    def full(descriptor: int) -> None:
        count[0] += 1
        if count[0] == 4:  # once: no later failure is to speak for it
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*trials\.jsonl"):
        search.run()
    monkeypatch.undo()
    folder = records.folder(tmp_path, TARGET, SPEC)
    assert len(read_runs(folder / "trials.jsonl", search_key()).trials) >= 16
    assert records.load(tmp_path, TARGET, SPEC) is None


def test_a_disk_that_is_full_for_the_compilers_makes_no_failures(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    compiled, count = machine.compile, [0]

    def full(spec: Any, target: Any, choices: Any) -> Any:
        count[0] += 1
        if count[0] == 4:  # the merge kernel, and two batches
            raise OSError(28, "No space left on device", "/tmp")
        return compiled(spec, target, choices)

    machine.compile = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space left"):
        work(machine, tmp_path / "full").run()
    log = records.folder(tmp_path / "full", TARGET, SPEC) / "trials.jsonl"
    kept = read_runs(log, search_key()).trials
    assert len(kept) == 16
    assert not any(each.reason for each in kept)
    found = work(machine, tmp_path / "full", resume=True).run()
    assert found.choices == work(FakeMachine(tmp_path), tmp_path / "whole").run().choices


def search_key() -> str:
    return Setting.here(Workload.representative(SPEC)).key


def test_a_search_that_is_stopped_and_resumed_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    unbroken = FakeMachine(tmp_path)
    expected = work(unbroken, tmp_path / "unbroken").run()
    random = np.random.default_rng(0)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        machine = FakeMachine(folder)
        stops = sorted(random.integers(1, 40, size=2))
        for stop in stops:
            _run_until(machine, folder, int(stop))
        found = work(machine, folder, resume=True).run()
        assert found.choices == expected.choices
        assert found.trials == expected.trials
        # Nothing that is in the log was measured again, but by the finalists' round.
        search = machine.measured[:-3]
        assert len(set(search)) == len(search)


def _run_until(machine: FakeMachine, folder: Path, num_measured: int) -> None:
    """Search until so many candidates are measured, then lose the batch and tear the last line."""
    machine.fate = lambda _choices: _stop(machine, num_measured)
    with pytest.raises(GivenUpError):
        work(machine, folder, resume=True).run()
    machine.stop, machine.fate = False, lambda _choices: None
    log = records.folder(folder, TARGET, SPEC) / "trials.jsonl"
    with log.open("ab") as file:
        file.write(b'{"choices": {"lanes": 8, "st')
    # The fake counts a candidate that was given up as measured; the real one was not.
    done = {each.key for each in read_runs(log, search_key()).trials}
    machine.measured[:] = [key for key in machine.measured if key in done]


def _stop(machine: FakeMachine, limit: int) -> Any:
    from tvmpaged.tuning.process import Answer

    if len(machine.measured) < limit:
        return None
    machine.stop = True
    return Answer({}, "interrupted", "interrupted")


def test_with_another_seed_the_log_still_counts(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    work(machine, tmp_path, trials=24).run()
    first = len(machine.measured)
    record = work(machine, tmp_path, trials=32, seed=5, resume=True).run()
    assert record.trials == 32
    # New ones, and the finalists: the best three, and what won before if it is none of them.
    assert len(machine.measured) - first in (8 + 3, 8 + 4)
    log = records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl"
    best = min(each.median_us for each in read_runs(log, search_key()).trials)
    # Of those that cannot be told apart the simpler one wins.
    assert best <= record.latency_us.median <= best * (1 + MIN_GAIN)


@pytest.mark.parametrize("seed", [0, 5])
def test_trials_of_the_log_that_a_shorter_search_does_not_come_to_count(
    tmp_path: Path, seed: int
) -> None:
    machine = FakeMachine(tmp_path)
    first = work(machine, tmp_path, trials=24).run()
    record = work(machine, tmp_path, trials=8, seed=seed, resume=True).run()
    assert (record.trials, record.choices) == (24, first.choices)


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("change", [{"lbnes": 16}, {"lanes": "x"}, {"lanes": 7}, {"step": None}])
def test_a_line_whose_choices_mean_nothing_here_costs_that_line_only(
    tmp_path: Path, seed: int, change: dict[str, Any]
) -> None:
    machine = FakeMachine(tmp_path)
    expected = work(machine, tmp_path, trials=16).run()
    log = records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl"
    lines = [json.loads(each) for each in log.read_text().splitlines()]
    last = next(each for each in reversed(lines) if each["kind"] == "trial")
    last["choices"] |= change
    # It even calls itself the best.
    last["latency_us"] |= {"median": 1.0, "p10": 1.0, "p90": 1.0}
    log.write_text("".join(json.dumps(each) + "\n" for each in lines))
    record = work(machine, tmp_path, trials=16, seed=seed, resume=True).run()
    assert record.trials == expected.trials
    assert record.latency_us.median > 1000.0


def test_without_resume_the_log_is_left_alone(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    work(machine, tmp_path, trials=16).run()
    count = len(machine.measured)
    work(machine, tmp_path, trials=16).run()
    assert len(machine.measured) == 2 * count


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import tune_tools
def slowly(choices):
    time.sleep(0.05)
folder = Path(sys.argv[1])
tune_tools.work(tune_tools.FakeMachine(folder, slowly), folder, trials=400).run()
"""


def test_kill_9_loses_at_most_the_batch_in_flight(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent)]
    )
    log = records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl"
    try:
        _wait(lambda: log.exists() and log.read_bytes().count(b"\n") > 20)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    done = read_runs(log, search_key()).trials
    assert len(done) >= 20
    machine = FakeMachine(tmp_path)
    record = work(machine, tmp_path, trials=len(done) + 8, resume=True).run()
    assert record.trials == len(done) + 8
    assert len(machine.measured) == 8 + 3


def _wait(condition: Any, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_caches_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    for index, (level, kind, size, cores) in enumerate(
        [
            ("1", "Data", "48K", "0"),
            ("1", "Instruction", "32K", "0"),
            ("2", "Unified", "2M", "0-1"),
            ("3", "Unified", "32M", "0-3,8-11"),
        ]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value + "\n")
        (folder / "shared_cpu_list").write_text(cores + "\n")
    caches = cpu_caches(tmp_path)
    assert caches == {"L1": (48 << 10, 1), "L2": (2 << 20, 2), "L3": (32 << 20, 8)}
    # A half of the last level is the share of four threads; twice that is rotated through.
    assert rotation_bytes(caches | {"L3": (64 << 20, 4)}, 2) == 64 << 20
    assert rotation_bytes(caches | {"L3": (1 << 30, 2)}, 2) == 256 << 20
    assert rotation_bytes({}, 2) == 64 << 20


def test_a_device_rotates_through_what_its_caches_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cpu_caches", lambda: {"L2": (2 << 20, 1), "L3": (50 << 20, 1)})
    here = device.Device.here(TARGET)
    assert here.rotation_bytes == 100 << 20
    assert here.caches_bytes == {"L2": 2 << 20, "L3": 50 << 20}


def test_the_summary_says_what_each_options_values_cost() -> None:
    trials = [
        Trial({"lanes": 8, "step": "rows"}, Latency.of([20.0])),
        Trial({"lanes": 16, "step": "rows"}, Latency.of([10.0])),
        Trial({"lanes": 16, "step": "columns"}, reason="crash"),
        Trial({"lanes": 8, "step": "columns"}, Latency.of([15.0])),
    ]
    costs = option_costs(trials)
    assert costs == {"lanes": {16: 1.0, 8: 1.5}, "step": {"rows": 1.0, "columns": 1.5}}
    assert steps(trials) == [(1, 20.0), (2, 10.0)]
    assert option_costs(trials[2:3]) == {}


def test_the_log_holds_choices_as_plain_data(tmp_path: Path) -> None:
    record = work(FakeMachine(tmp_path), tmp_path, trials=8).run()
    lines = (records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl").read_text().splitlines()
    first, roof, *trials, roof_at_the_end, last = map(json.loads, lines)
    measured = {"kind": "roof", "name": "gb_per_s", "value": 25.0, "fraction": 0.5}
    assert roof == roof_at_the_end == measured
    # The record's own numbers agree: its rate is that share of its roof.
    assert record.gb_per_s is not None
    assert record.roof_gb_per_s == pytest.approx(record.gb_per_s / 0.5, rel=1e-3)
    assert record.roof_fraction == 0.5
    assert last == {"kind": "record", "record_id": record.record_id}
    assert first["kind"] == "run"
    assert first["setting"]["source_sha256"] == SETTING.source_sha256
    assert len(trials) == 8
    for each in trials:
        assert each["latency_us"]["median"] == pytest.approx(known_us(each["choices"]), abs=0.01)
