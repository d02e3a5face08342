"""Measuring shares no core with compiling: workers are pinned, and the two take turns."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tvmpaged import schedules
from tvmpaged.cpu import native_target
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning import machine as machine_module
from tvmpaged.tuning.machine import Machine, open_machine
from tvmpaged.tuning.process import Answer, Process
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import choices_key
from tvmpaged.tuning.workload import Workload

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = native_target()
CORES = os.sched_getaffinity(0)


@pytest.fixture(scope="module")
def task() -> Iterator[Task]:
    """A real machine, with the merge kernel and the default compiled."""
    with open_machine() as machine:
        machine.start()
        merge = AttentionSpec.make("merge", "float32")
        choices = schedules.default_choices(merge, TARGET)
        default = schedules.default_choices(SPEC, TARGET)
        for spec, each in ((merge, choices), (SPEC, default)):
            (answer,) = machine.compile(spec, TARGET, [each])
            assert (answer.reason, answer.reply) == ("", {})
        workload, path = Workload(2, (1, 1), (40, 1100)), machine.path(merge, choices_key(choices))
        yield Task(machine, SPEC, TARGET, workload, path, default, 1 << 20, 0)


def family(worker: Process) -> list[psutil.Process]:
    assert worker.pid is not None
    parent = psutil.Process(worker.pid)
    return [parent, *parent.children(recursive=True)]


def affinities(worker: Process) -> set[frozenset[int]]:
    return {
        frozenset(os.sched_getaffinity(thread.id))
        for each in family(worker)
        for thread in each.threads()
    }


def test_each_compiler_keeps_to_its_core_and_measuring_has_them_all(task: Task) -> None:
    machine = task.machine
    assert [affinities(each) for each in machine.compilers] == [
        {frozenset({core})} for core in sorted(CORES)
    ]
    (device,) = machine.devices
    assert task.run(choices_key(task.default), task.default).latency_us is not None
    # As serving runs: every thread, of the kernel's pool too, may run everywhere.
    assert affinities(device) == {frozenset(CORES)}


def test_a_compiler_that_was_replaced_keeps_to_the_same_core(task: Task) -> None:
    worker = task.machine.compilers[-1]
    worker.kill()
    assert worker.ask({"ping": True}, 60).reply == {}
    assert affinities(worker) == {frozenset({max(CORES)})}


def test_no_compiler_works_while_something_is_measured(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, spent = task.machine, []
    (device,) = machine.devices

    def cpu_seconds() -> float:
        workers = [process for each in machine.compilers for process in family(each)]
        return sum(sum(each.cpu_times()) for each in workers)

    ask = device.ask

    def watched(*arguments: Any) -> Answer:
        before = cpu_seconds()
        answer = ask(*arguments)
        spent.append(cpu_seconds() - before)
        assert "roof" in answer.reply
        return answer

    monkeypatch.setattr(device, "ask", watched)
    first = task.default | {"split_length": 128}
    batch = [first, task.default | {"split_length": 512}]
    # From another thread, as a search that compiles ahead would; measuring waits for it.
    ahead = threading.Thread(target=machine.compile, args=(SPEC, TARGET, batch))
    begin = cpu_seconds()
    ahead.start()
    time.sleep(0.05)
    for _ in range(3):
        # Whether what is measured beside another test is credible is not asked.
        task.measure_roof(beside=task.default)
    ahead.join()
    assert cpu_seconds() - begin > 0.1
    assert spent == [0.0] * 3
    assert machine.path(SPEC, choices_key(first)).exists()


def test_turns_never_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, most = [], []

    def work(*_arguments: Any, **_options: Any) -> Any:
        busy.append(1)
        most.append(len(busy))
        time.sleep(0.01)
        busy.pop()
        return [Answer({"error": "nothing is done"})]

    class Device:
        ask = staticmethod(lambda *_arguments: work()[0])

    monkeypatch.setattr(machine_module, "ask_all", work)
    machine = Machine([], [Device()], tmp_path, 1)  # type: ignore[list-item]
    calls: list[Callable[[], Any]] = [
        lambda: machine.compile(SPEC, TARGET, [{}]),
        lambda: machine.measure(
            SPEC, Workload(1, (1,), (1,)), tmp_path, [], rotation_bytes=1, seed=0
        ),
        lambda: machine.measure_roof(
            SPEC, Workload(1, (1,), (1,)), tmp_path, None, rotation_bytes=1, seed=0
        ),
    ]
    threads = [threading.Thread(target=call) for call in calls * 4]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1] * len(threads)
