"""Workers that crash, hang or lie: each is a failure with its reason; the next one is served."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tvmpaged import schedules
from tvmpaged.cpu import native_target, num_threads
from tvmpaged.runtime import kernel_set
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning import machine as machine_module
from tvmpaged.tuning import process, timing
from tvmpaged.tuning.device import measuring_process, memory_total
from tvmpaged.tuning.interrupt import Interrupt, held_back
from tvmpaged.tuning.machine import Machine, open_machine
from tvmpaged.tuning.process import Process, ask_all
from tvmpaged.tuning.task import HOPELESS, Task
from tvmpaged.tuning.trial import Trial, choices_key
from tvmpaged.tuning.workload import Workload

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = native_target()
TESTS = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
def worker() -> Iterator[Process]:
    made = Process("faulty_worker", TESTS)
    yield made
    made.kill()


def test_a_worker_is_started_once(worker: Process) -> None:
    first, second = (worker.ask({"index": i}, 30).reply for i in range(2))
    assert first["pid"] == second["pid"]
    assert worker.num_starts == 1


@pytest.mark.parametrize(
    ("fault", "reason", "detail"),
    [
        ("crash", "crash", "SIGSEGV; the last words"),
        ("exit", "crash", "exit code 3"),
        ("garbage", "crash", "its answer is no JSON: b'\\xff\\xfe"),
        ("eat in C++", "memory", "SIGABRT; what():  std::bad_alloc"),
        ("hang", "time-out", "no answer"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_replaced(
    worker: Process, fault: str, reason: str, detail: str
) -> None:
    before = worker.ask({}, 30).reply["pid"]
    answer = worker.ask({"fault": fault}, 0.5 if fault == "hang" else 30)
    assert (answer.reason, answer.reply) == (reason, {})
    assert detail in answer.detail
    after = worker.ask({"index": 7}, 30)
    assert after.reply["index"] == 7
    assert after.reply["pid"] != before
    assert not Path(f"/proc/{before}").exists()


def test_what_a_worker_raises_is_its_answer(worker: Process) -> None:
    answer = worker.ask({"fault": "raise"}, 30)
    assert answer.reply == {"error": "ValueError: no such thing"}
    assert worker.ask({}, 30).reply["pid"]
    assert worker.num_starts == 1


def test_a_worker_that_wants_too_much_memory_is_refused_it() -> None:
    worker = Process("faulty_worker", TESTS, 1 << 30)
    try:
        failure = machine_module.failed({}, worker.ask({"fault": "eat"}, 30), "compile")
        assert failure is not None
        assert failure.reason == "memory"
        assert worker.ask({"index": 1}, 30).reply["index"] == 1
    finally:
        worker.kill()


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("MemoryError: ", True),
        ("SIGABRT; Buffer allocation failed", True),  # LLVM
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9", True),
        ("OSError: [Errno 12] Cannot allocate memory", True),
        ("ValueError: choices cannot be built: lanes=7 does not divide head_dim=64", False),
        ("SIGSEGV", False),
    ],
)
def test_memory_that_was_refused_is_known_by_its_words(text: str, is_memory: bool) -> None:
    assert process.is_out_of_memory(text) == is_memory


def test_a_case_that_does_not_fit_is_refused_its_memory() -> None:
    worker = measuring_process("cpu", 1 << 30)
    workload = Workload(8, (1,) * 8, (1000,) * 8).as_dict()
    request = {"spec": str(SPEC), "workload": workload, "num_workers": 1, "roof": True}
    try:
        answer = worker.ask({**request, "rotation_bytes": 4 << 30, "candidates": []}, 60)
        failure = machine_module.failed({}, answer, "run")
        assert failure is not None
        assert failure.reason == "memory", failure.detail
    finally:
        worker.kill()


def test_no_worker_may_take_all_memory(task: Task) -> None:
    task.machine.start()
    for worker in [*task.machine.compilers, *task.machine.devices]:
        limit, _ = resource.prlimit(worker.pid, resource.RLIMIT_DATA)
        assert 0 < limit <= memory_total() // 2


def test_what_a_worker_started_ends_with_it(worker: Process) -> None:
    started = worker.ask({"fault": "child"}, 30).reply["pid"]
    assert Path(f"/proc/{started}").exists()
    worker.kill()
    end = time.monotonic() + 10
    while is_running(started) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(started)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for whoever takes its exit code."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_no_request_pays_for_a_workers_start() -> None:
    worker = Process("faulty_worker", TESTS | {"FAULTY_START_S": "3"})
    try:
        assert worker.ask({"index": 1}, 2.5).reply["index"] == 1
    finally:
        worker.kill()


def test_a_worker_whose_parent_is_gone_before_it_looks_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "faulty_worker", "1"],
        env=os.environ | TESTS,
        input=b'{"index": 1}\n',
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")


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


def test_what_a_library_prints_does_not_come_between_the_answers(worker: Process) -> None:
    assert worker.ask({"fault": "noise", "index": 1}, 30).reply["index"] == 1
    assert worker.ask({"index": 2, "size": 300_000}, 30).reply["index"] == 2


def test_a_machine_starts_each_of_its_workers_once(task: Task) -> None:
    machine = task.machine
    machine.start()
    workers = [*machine.compilers, *machine.devices]
    assert [each.num_starts for each in workers] == [1] * len(workers)


def test_answers_come_in_the_order_of_the_requests() -> None:
    workers = [Process("faulty_worker", TESTS) for _ in range(2)]
    requests: list[dict[str, Any]] = [{"index": i} for i in range(7)]
    requests[2] = {"fault": "crash"}
    try:
        answers = ask_all(workers, requests, 30)
    finally:
        for each in workers:
            each.kill()
    assert answers[2].reason == "crash"
    assert [each.reply.get("index") for each in answers] == [0, 1, None, 3, 4, 5, 6]


def test_an_interrupt_gives_up_what_is_in_flight(worker: Process) -> None:
    worker.ask({}, 30)
    begin = time.monotonic()
    answer = worker.ask({"fault": "hang"}, 60, lambda: time.monotonic() - begin > 0.5)
    assert answer.reason == "interrupted"
    assert time.monotonic() - begin < 10


def test_workers_die_with_their_parent() -> None:
    code = (
        "import os, sys\nfrom tvmpaged.tuning.process import Process\n"
        "worker = Process('faulty_worker', {'PYTHONPATH': sys.argv[1]})\n"
        "pid = worker.ask({}, 60).reply['pid']\n"
        # It hangs, and so does not see that nobody is there to ask it more.
        "worker.send({'fault': 'hang'}, 1000)\n"
        "print(pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, TESTS["PYTHONPATH"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_held_back_and_then_raised(number: signal.Signals) -> None:
    reached = []
    # As the command line has it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), held_back() as interrupt:  # noqa: PT012
            os.kill(os.getpid(), number)
            reached.append(interrupt())
        assert reached == [True]
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """A shell starts what runs in the background so."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_was_given_up_is_never_taken_for_done() -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), held_back():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM]


def test_a_second_signal_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was held back too")


# --- candidates that are wrong in ways that compiled code can be -------------------------------

C_CANDIDATES = {
    "crash": "*(volatile int *)0 = 1;",
    # Not for ever: a time-out that is broken is a test that fails, and none that hangs.
    "hang": "for (time_t end = time(0) + 45; time(0) < end;);",
    "silent": "",  # leaves out as it was: NaN
}
C_SOURCE = """
#include <time.h>
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
        "silent": "wrong",
        "garbage": "run",
    }
    assert "SIGSEGV" in found["crash"].detail
    for each in (alone, found["silent"]):
        assert each.reason == "wrong"
        assert "rows of out hold NaN" in each.detail
    assert trial.latency_us is not None
    assert trial.latency_us.repeats >= timing.MIN_REPEATS
    assert 1 < trial.median_us < 1e5
    # What has an answer is neither compiled nor measured again.
    assert task.run(choices_key(default), default) is trial
    other = default | {"dot_unroll": 1}
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
