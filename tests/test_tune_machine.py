"""The machine that compiles and measures, and candidates that go wrong as compiled code can."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tune_tools import SPEC, TARGET, TESTS

from tvmpaged import schedules
from tvmpaged.cpu import num_threads
from tvmpaged.runtime import kernel_set
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning import machine as machine_module
from tvmpaged.tuning import process, timing
from tvmpaged.tuning.device import memory_total
from tvmpaged.tuning.interrupt import Interrupt
from tvmpaged.tuning.machine import Machine, open_machine
from tvmpaged.tuning.process import Process
from tvmpaged.tuning.task import HOPELESS, Task
from tvmpaged.tuning.trial import Trial, choices_key
from tvmpaged.tuning.workload import Workload


def test_no_worker_may_take_all_memory(task: Task) -> None:
    task.machine.start()
    for worker in [*task.machine.compilers, *task.machine.devices]:
        limit, _ = resource.prlimit(worker.pid, resource.RLIMIT_DATA)
        assert 0 < limit <= memory_total() // 2


def test_what_a_killed_compiler_leaves_goes_with_the_machine(task: Task) -> None:
    machine = task.machine
    folders = [each.environment["TMPDIR"] for each in machine.compilers]
    assert folders == [str(machine.folder)] * len(machine.compilers)


def test_a_compiler_that_hangs_is_a_failure_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "COMPILE_TIMEOUT_S", 1.0)
    machine = Machine([Process("faulty_worker", TESTS) for _ in range(2)], [], tmp_path, 1)
    try:
        answers = machine.compile(SPEC, TARGET, [{"fault": "hang"}, {"n": 1}, {"n": 2}])
    finally:
        machine.close()
    assert [each.reason for each in answers] == ["time-out", "", ""]


def test_where_there_is_no_room_to_compile_the_disk_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine([Process("faulty_worker", TESTS)], [], tmp_path, 1)
    room = [1 << 30]
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=room[0]))
    try:
        (answer,) = machine.compile(SPEC, TARGET, [{"fault": "raise"}])
        assert answer.reply == {"error": "ValueError: no such thing"}
        room[0] = 1000
        assert machine.compile(SPEC, TARGET, [{}])[0].reply["pid"]
        with pytest.raises(OSError, match="No space left on device") as caught:
            machine.compile(SPEC, TARGET, [{"fault": "raise"}])
        assert caught.value.filename == str(tmp_path)
    finally:
        machine.close()


def test_a_machine_starts_each_of_its_workers_once(task: Task) -> None:
    machine = task.machine
    machine.start()
    workers = [*machine.compilers, *machine.devices]
    assert [each.num_starts for each in workers] == [1] * len(workers)


C_CANDIDATES = {
    "crash": "*(volatile int *)0 = 1;",
    # Not for ever: a time-out that is broken is a test that fails, and none that hangs.
    "hang": "for (time_t end = time(0) + 45; time(0) < end;);",
    # As a kernel asks for its scratch.
    "greedy": "TVMBackendAllocWorkspace(1, 0, 1ull << 40, 2, 32);",
    "silent": "",  # leaves out as it was: NaN
}
C_SOURCE = """
#include <stdint.h>
#include <time.h>
void *TVMBackendAllocWorkspace(int, int, uint64_t, int, int);
int __tvm_ffi_decode(void *self, const void *args, int count, void *result) {{ {body} return 0; }}
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    interrupt = Interrupt()
    with open_machine(interrupt) as machine:
        machine.start()
        merge = AttentionSpec.make("merge", "float32")
        choices = schedules.default_choices(merge, TARGET)
        (answer,) = machine.compile(merge, TARGET, [choices])
        assert not answer.reason, answer
        assert not answer.reply, answer
        workload = Workload(2, (1, 1), (40, 1100))
        path = machine.path(merge, choices_key(choices))
        default = schedules.default_choices(SPEC, TARGET)
        yield Task(machine, SPEC, TARGET, workload, path, default, 1 << 20, 0)


def plant(machine: Machine, name: str, key: str) -> None:
    path = machine.path(SPEC, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    if name not in C_CANDIDATES:
        path.write_bytes(b"no library")
        return
    source = path.with_suffix(".c")
    source.write_text(C_SOURCE.format(body=C_CANDIDATES[name]))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source], check=True)


def test_faulty_candidates_are_failures_and_the_next_one_is_measured(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "MEASURE_TIMEOUT_S", 5.0)
    default = schedules.default_choices(SPEC, TARGET)

    def run(name: str, index: int) -> Trial:
        choices = default | {"planted": index}
        plant(task.machine, name, choices_key(choices))
        return task.run(choices_key(choices), choices)

    # By itself, and in turns with the default, which is right.
    alone = run("silent", 0)
    impossible = default | {"lanes": 7}
    task.compile([default, impossible])
    assert task.answers[choices_key(impossible)].reason == "compile"
    trial = task.run(choices_key(default), default)
    found = {name: run(name, 1 + i) for i, name in enumerate([*C_CANDIDATES, "garbage"])}
    assert {name: each.reason for name, each in found.items()} == {
        "crash": "crash",
        "hang": "time-out",
        "greedy": "memory",
        "silent": "wrong",
        "garbage": "run",
    }
    assert "SIGSEGV" in found["crash"].detail
    assert "bad_alloc" in found["greedy"].detail
    for each in (alone, found["silent"]):
        assert each.reason == "wrong"
        assert "rows of out hold NaN" in each.detail
    assert trial.latency_us is not None
    assert trial.latency_us.repeats >= timing.MIN_REPEATS
    assert 1 < trial.median_us < 1e5
    # What has an answer is neither compiled nor measured again.
    assert task.run(choices_key(default), default) is trial
    other = default | {"dot_keys": 1}
    task.compile([other])
    timed = task.run(choices_key(other), other)
    # Its time is the default's by the ratio of this run.
    assert timed.latency_us is not None
    assert 0.2 * trial.median_us < timed.median_us < 5 * trial.median_us
    assert task.artifact(default).exists()
    assert task.artifact(other).exists() == (timed.median_us <= HOPELESS * trial.median_us)


def test_the_pool_is_set_up_as_serving_does(task: Task) -> None:
    environment = task.machine.devices[0].environment
    assert environment["TVM_THREAD_POOL_SPIN_COUNT"] == kernel_set.SPIN_COUNT
    assert environment["TVM_NUM_THREADS"] == str(num_threads())
    assert process.START_TIMEOUT_S > machine_module.MEASURE_TIMEOUT_S
