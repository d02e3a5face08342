"""Workers that crash, hang or lie: each is a failure with its reason; the next one is served."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tvmpaged import reference, schedules
from tvmpaged.cpu import native_target, num_threads
from tvmpaged.runtime import kernel_set
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning import check, limits, process, timing
from tvmpaged.tuning import machine as machine_module
from tvmpaged.tuning.case import Case
from tvmpaged.tuning.interrupt import Interrupt, held_back
from tvmpaged.tuning.machine import Machine, open_machine
from tvmpaged.tuning.process import Process, ask_all
from tvmpaged.tuning.task import HOPELESS, Task
from tvmpaged.tuning.trial import choices_key
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
        ("hang", "time-out", "no answer"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_replaced(
    worker: Process, fault: str, reason: str, detail: str
) -> None:
    before = worker.ask({}, 30).reply["pid"]
    answer = worker.ask({"fault": fault}, 0.5)
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


def test_what_a_library_prints_does_not_come_between_the_answers(worker: Process) -> None:
    assert worker.ask({"fault": "noise", "index": 1}, 30).reply["index"] == 1
    assert worker.ask({"index": 2, "size": 300_000}, 30).reply["index"] == 2


def test_a_machine_starts_each_of_its_workers_once(task: Task) -> None:
    machine = task.machine
    machine.start()
    workers = [*machine.compilers, machine.device]
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
        "print(worker.ask({}, 60).reply['pid'], flush=True)\n"
        "worker.ask({'fault': 'hang'}, 1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, TESTS["PYTHONPATH"]], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_a_signal_is_held_back_and_then_raised() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), held_back() as interrupt:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(interrupt())
    assert reached == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_is_not_held_back() -> None:
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was held back too")


# --- candidates that are wrong in ways that compiled code can be -------------------------------

C_CANDIDATES = {
    "crash": "*(volatile int *)0 = 1;",
    "hang": "for (volatile int x = 0;;) x = x + 1;",
    "silent": "",  # leaves out as it was: NaN
}
C_SOURCE = """
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
    found = {}
    for index, name in enumerate([*C_CANDIDATES, "garbage"]):
        choices = default | {"planted": index}
        plant(task.machine, name, choices_key(choices))
        found[name] = task.run(choices_key(choices), choices)
    assert {name: each.reason for name, each in found.items()} == {
        "crash": "crash",
        "hang": "time-out",
        "silent": "wrong",
        "garbage": "run",
    }
    assert "SIGSEGV" in found["crash"].detail
    assert "rows of out hold NaN" in found["silent"].detail
    impossible = default | {"lanes": 7}
    task.compile([default, impossible])
    assert task.answers[choices_key(impossible)].reason == "compile"
    trial = task.run(choices_key(default), default)
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
    environment = task.machine.device.environment
    assert environment["TVM_THREAD_POOL_SPIN_COUNT"] == kernel_set.SPIN_COUNT
    assert environment["TVM_NUM_THREADS"] == str(num_threads())
    assert process.START_TIMEOUT_S > machine_module.MEASURE_TIMEOUT_S


# --- the check itself, against kernels written here --------------------------------------------


def honest(spec: AttentionSpec) -> Any:
    """Return a kernel that is right; it writes out and lse itself and leaves nothing to merge."""

    def attention(
        q: Any, k: Any, v: Any, table: Any, items: Any, offsets: Any, out: Any, lse: Any, *rest: Any
    ) -> None:
        case, _, _ = check._case(spec, 512)
        step = case.steps[0]
        result = reference.paged_attention(
            q, k, v, step.query_start_loc, step.seq_lens, table, return_lse=True
        )
        for target, value in zip((out, lse), result, strict=True):
            target.copy_(torch.from_numpy(value))

    return attention


def faults(spec: AttentionSpec) -> dict[str, Any]:
    right = honest(spec)

    def spoil(change: Any) -> Any:
        def attention(*args: Any) -> None:
            right(*args)
            change(args[6], args[7])

        return attention

    def shift(out: Any, lse: Any) -> None:
        out.mul_(1 + 4 * limits.TOLERANCE[spec.out_dtype])

    def leave_a_head(out: Any, lse: Any) -> None:
        out[-1, -1] = torch.nan

    def swap_heads(out: Any, lse: Any) -> None:
        out.copy_(out.flip(1))

    def forget_a_key(out: Any, lse: Any) -> None:
        out[-1].mul_(0.9)

    def base_two(out: Any, lse: Any) -> None:
        lse.div_(np.log(2))

    def empty_row(out: Any, lse: Any) -> None:
        lse[lse == -torch.inf] = -5e4

    return {
        f.__name__: spoil(f)
        for f in (shift, leave_a_head, swap_heads, forget_a_key, base_two, empty_row)
    }


def ask(spec: AttentionSpec, attention: Any) -> str:
    choices = schedules.default_choices(spec, TARGET) | {"split_length": 512}
    checks = check.check(spec, attention, lambda *args: None, choices, 2)
    assert {each.what: each.limit for each in checks} == limits.limits(spec, choices)
    return check.wrong(checks)


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_right_numbers_pass_and_wrong_ones_do_not(kernel: str, dtype: str) -> None:
    spec = AttentionSpec.make(kernel, dtype, 64, 3, 16)
    assert ask(spec, honest(spec)) == ""
    for name, attention in faults(spec).items():
        assert ask(spec, attention), name


def test_the_checked_step_has_the_edges() -> None:
    for kernel in ("decode", "prefill"):
        spec = AttentionSpec.make(kernel, "float32", 64, 3, 16)
        workload = limits.check_workload(spec, 512)
        lengths = set(workload.seq_lens)
        assert {0, 1, 15, 16, 17} <= lengths
        assert max(lengths) > 512
        assert workload.seq_lens[1] <= workload.q_lens[1]
        case = Case.make(spec, workload, seed=1, poison=True)
        owned = np.unique(case.steps[0].block_table)
        assert len(owned) < len(case.k_cache)
        for cache in (case.k_cache, case.v_cache):
            missing = cache.isnan().any(dim=-1).all(dim=1)
            assert int((~missing).sum()) == sum(workload.seq_lens)
            assert bool(missing.any())


def test_block_tables_are_valid_and_every_set_is_used_in_turn() -> None:
    spec = AttentionSpec.make("decode", "float32", 64, 3, 16)
    case = Case.make(spec, Workload(2, (1, 1), (40, 33)), num_steps=3, seed=0)
    blocks = [np.unique(step.block_table) for step in case.steps]
    assert all(each.max() < len(case.k_cache) for each in blocks)
    used = [
        {int(b) for s, n in enumerate((3, 3)) for b in step.block_table[s, :n]}
        for step in case.steps
    ]
    assert len(set.union(*used)) == 18
    seen: list[int] = []
    choices = schedules.default_choices(spec, TARGET)
    call = case.bind(
        lambda q, k, v, table, *rest: seen.append(int(table[0, 0])), lambda *a: None, choices, 2
    )
    for _ in range(4):
        call()
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3
    for tensor in (case.q, case.k_cache, case.v_cache, case.out, case.lse):
        assert tensor.data_ptr() % 64 == 0


# --- times ---------------------------------------------------------------------------------------


def test_disturbed_calls_are_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter(([0] * 1 + [1_000_000]) * 10_000)

    class Queue:
        total = 0

        def waited_ns(self) -> int:
            Queue.total += next(waits)
            return Queue.total

        def close(self) -> None:
            pass

    turn = [0]

    def call() -> None:
        turn[0] += 1
        time.sleep(0.001 if turn[0] % 2 else 0.004)

    monkeypatch.setattr(timing, "RunQueue", Queue)
    monkeypatch.setattr(timing, "timed_once", _once_that_waits_on_long_calls)
    (samples,) = timing.measure([call], min_seconds=0.05, max_seconds=2.0)
    assert max(samples.times_us) < 3000
    assert samples.disturbed >= len(samples.times_us) - 2


def _once_that_waits_on_long_calls(call: Any, queue: Any) -> Any:
    begin = time.perf_counter_ns()
    call()
    us = (time.perf_counter_ns() - begin) / 1e3
    return timing.Taken(us, us < 3000, 0.0 if us < 3000 else 0.7)


def test_contenders_are_timed_in_turns_and_compared_round_by_round() -> None:
    order: list[int] = []

    def contender(which: int, seconds: float) -> Any:
        def call() -> None:
            order.append(which)
            time.sleep(seconds)

        return call

    calls = [contender(0, 0.004), contender(1, 0.001), contender(2, 0.004)]
    samples = timing.measure(calls, min_seconds=0.0, max_seconds=0.0)
    rounds = [order[i : i + 3] for i in range(3, len(order), 3)]
    assert all(sorted(each) == [0, 1, 2] for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3
    assert samples[0].speedup == 1.0
    assert samples[1].speedup > 1.5
    assert len(rounds) >= timing.MIN_REPEATS


def test_a_disturbance_that_hits_one_contender_more_makes_no_winner() -> None:
    """The first starts threads twice, so a busy machine makes it look slow; at best it is not."""
    random = np.random.default_rng(0)

    def taken(us: float, mean_delay_us: float) -> timing.Taken:
        delay = random.exponential(mean_delay_us)
        return timing.Taken(us + delay, False, delay / us)

    rounds = [[taken(500, 3000), taken(540, 1000)] for _ in range(300)]
    assert np.median([a.us / b.us for a, b in rounds]) > 1.2
    assert timing._speedup(rounds, 1) < 1.3
    quiet = [[timing.Taken(500, True, 0), timing.Taken(400, True, 0)] for _ in range(5)]
    assert timing._speedup(rounds + quiet, 1) == 1.25


def test_who_cannot_lead_is_let_go_at_once_and_who_may_is_timed_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quiet machine is a matter of luck, so the clock is not asked."""
    random = np.random.default_rng(0)

    def rounds_of(mean_us: float, leading_speedup: float) -> int:
        means = {first: 100.0, second: mean_us}
        count[0] = 0

        def taken(call: Any, queue: timing.RunQueue) -> timing.Taken:
            count[0] += 1
            return timing.Taken(means[call] * random.normal(1, 0.03), True, 0.0)

        monkeypatch.setattr(timing, "timed_once", taken)
        timing.measure(
            [first, second],
            min_seconds=60.0,
            max_seconds=60.0,
            max_repeats=100,
            leading_speedup=leading_speedup,
        )
        return count[0] // 2

    def first() -> None: ...
    def second() -> None: ...

    count = [0]
    assert rounds_of(200, leading_speedup=1.0) == timing.MIN_REPEATS
    assert timing.MIN_REPEATS < rounds_of(105, leading_speedup=1.0) < 100
    assert [rounds_of(mean, leading_speedup=1.0) for mean in (100, 98, 90)] == [100, 100, 100]


def test_on_a_busy_machine_only_the_hopeless_are_let_go() -> None:
    def rounds(slower: float) -> list[list[timing.Taken]]:
        return [[timing.Taken(100, False, 1), timing.Taken(100 * slower, False, 1)]] * 9

    assert timing.highest_speedup(rounds(1.4)) > 1.0
    assert timing.highest_speedup(rounds(1.6)) < 1.0


def test_waiting_for_a_core_is_seen() -> None:
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(4 * len(os.sched_getaffinity(0)))
    ]
    queue = timing.RunQueue()
    try:
        before, end = queue.waited_ns(), time.monotonic() + 0.5
        while time.monotonic() < end:
            threading.active_count()
        assert queue.waited_ns() - before > 50e6
    finally:
        queue.close()
        for each in busy:
            each.kill()
            each.wait()
