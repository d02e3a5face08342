"""Workers that crash, hang or lie: each is a failure with its reason; the next one is served."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tune_tools import SPEC, TESTS

from tvmpaged.tuning import machine as machine_module
from tvmpaged.tuning import process
from tvmpaged.tuning.device import measuring_process
from tvmpaged.tuning.process import Process, ask_all
from tvmpaged.tuning.workload import Workload


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
        ("killed", "memory", "SIGKILL; the last words"),
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
        ("SIGKILL; its last words", True),  # the kernel's own way out
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


def test_what_a_library_prints_does_not_come_between_the_answers(worker: Process) -> None:
    assert worker.ask({"fault": "noise", "index": 1}, 30).reply["index"] == 1
    assert worker.ask({"index": 2, "size": 300_000}, 30).reply["index"] == 2


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
