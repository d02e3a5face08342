"""Honest times: in turns, without what others disturbed, and no longer than they tell anything."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tvmpaged.tuning import timing
from tvmpaged.tuning.clock import CpuClock


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
    (samples,) = timing.measure([call], CpuClock, min_seconds=0.05, max_seconds=2.0)
    assert max(samples.times_us) < 3000
    assert samples.disturbed >= len(samples.times_us) - 2


def _once_that_waits_on_long_calls(call: Any, queue: Any) -> Any:
    begin = time.perf_counter_ns()
    call()
    us = (time.perf_counter_ns() - begin) / 1e3
    return timing.Taken(us, us < 3000, 0.0 if us < 3000 else 0.7)


def test_a_busy_stretch_is_waited_out_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, quiet = timing.Taken(400.0, False, 0.7), timing.Taken(100.0, True, 0.0)

    def measured(calls: list[timing.Taken], max_seconds: float) -> timing.Samples:
        turns = iter(calls)
        monkeypatch.setattr(timing, "timed_once", lambda call, queue: next(turns))
        return timing.measure([lambda: None], CpuClock, min_seconds=0.0, max_seconds=max_seconds)[0]

    found = measured([busy] * 20 + [quiet] * 100, max_seconds=60.0)
    assert found.times_us == (100.0,) * 20  # until most are quiet
    assert found.disturbed == 20
    assert set(measured([busy] * 5_000, max_seconds=0.01).times_us) == {400.0}


def test_contenders_are_timed_in_turns_and_compared_round_by_round() -> None:
    order: list[int] = []

    def contender(which: int, seconds: float) -> Any:
        def call() -> None:
            order.append(which)
            time.sleep(seconds)

        return call

    calls = [contender(0, 0.004), contender(1, 0.001), contender(2, 0.004)]
    samples = timing.measure(calls, CpuClock, min_seconds=0.0, max_seconds=0.0)
    rounds = [order[i : i + 3] for i in range(3, len(order), 3)]
    assert all(sorted(each) == [0, 1, 2] for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3
    assert samples[0].speedup == 1.0
    assert samples[1].speedup > 1.5
    assert len(rounds) >= 5


def test_a_disturbance_that_hits_one_contender_more_makes_no_winner() -> None:
    """The first starts threads twice, so a busy machine makes it look slow; at best it is not."""
    random = np.random.default_rng(0)

    def taken(us: float, mean_delay_us: float) -> timing.Taken:
        delay = random.exponential(mean_delay_us)
        return timing.Taken(us + delay, False, delay / us)

    rounds = [[taken(500, 3000), taken(540, 1000)] for _ in range(300)]
    assert np.median([a.us / b.us for a, b in rounds]) > 1.2
    assert timing._speedup(rounds, 1) < 1.0
    quiet = [[timing.Taken(500, True, 0), timing.Taken(400, True, 0)] for _ in range(300)]
    assert timing._speedup(rounds + quiet, 1) == 1.25
    # A handful of quiet rounds agrees by chance.
    lucky = [[timing.Taken(700, True, 0), timing.Taken(560, True, 0)] for _ in range(5)]
    assert timing._speedup(rounds + lucky, 1) < 1.0


def test_when_quiet_rounds_are_too_few_the_least_disturbed_count() -> None:
    def rounds(count: int, us: float, clean: bool, waiting: float) -> list[list[timing.Taken]]:
        return [[timing.Taken(us, clean, waiting), timing.Taken(500, clean, waiting)]] * count

    found = rounds(10, 500, False, 0.9) + rounds(5, 500, False, 0.1) + rounds(4, 4500, True, 0.0)
    chosen = timing._undisturbed(found)
    assert [each[0].waiting for each in chosen] == [0.0] * 4 + [0.1]
    assert timing._speedup(found, 1) == 1.0  # four rounds decide nothing


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
            CpuClock,
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
