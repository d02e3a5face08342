"""Honest times on a machine that others use too.

Each call is timed by itself. A call during which one of this process's threads waited for a core
is set aside: what it took says nothing about the kernel. Several contenders are timed in turns.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_REPEATS = 5
#: Waiting for a core, as a share of a call's time, above which a call is set aside.
MAX_WAITING = 0.03
#: Waking a sleeping thread always takes a little.
_WAKING_NS = 20_000


@dataclass(frozen=True)
class Samples:
    """Times of one contender.

    Parameters
    ----------
    times_us : tuple of float
        Undisturbed calls; when there were too few, the least disturbed ones.
    disturbed : int
        Calls that were set aside, or should have been.
    speedup : float
        Median of the first contender's time by this one's, round by round.
    """

    times_us: tuple[float, ...]
    disturbed: int
    speedup: float


@dataclass(frozen=True)
class _Taken:
    us: float
    clean: bool
    waiting: float  # share of the time


class RunQueue:
    """How long this process's threads have waited for a core; reads the kernel's own count."""

    def __init__(self) -> None:
        self._files = []
        for path in Path("/proc/self/task").glob("*/schedstat"):
            try:
                self._files.append(os.open(path, os.O_RDONLY))
            except OSError:
                continue

    def waited_ns(self) -> int:
        """Return the sum over all threads, in nanoseconds."""
        total = 0
        for file in self._files:
            try:
                total += int(os.pread(file, 100, 0).split()[1])
            except (OSError, IndexError):
                continue
        return total

    def close(self) -> None:
        """Give the files back."""
        for file in self._files:
            os.close(file)


def measure(
    calls: Sequence[Callable[[], None]],
    *,
    min_seconds: float,
    max_seconds: float,
    max_repeats: int = 200,
    hopeless_us: float = float("inf"),
) -> list[Samples]:
    """Time contenders in turns, the order rotated from round to round.

    Parameters
    ----------
    calls : sequence of callable
        Contenders.
    min_seconds, max_seconds : float
        How long to go on: at least, and at most in search of undisturbed calls (but `MIN_REPEATS`
        rounds are always done).
    max_repeats : int
        Undisturbed calls that are enough in any case.
    hopeless_us : float
        Microseconds; once `MIN_REPEATS` calls of a lone contender all took longer, it is let go.
    """
    for call in calls:
        call()  # pages, caches, branch predictors, and the pool's threads
    queue = RunQueue()
    taken: list[list[_Taken]] = [[] for _ in calls]
    begin = time.perf_counter()
    try:
        for index in range(10_000_000):
            for turn in range(len(calls)):
                which = (index + turn) % len(calls)
                taken[which].append(_once(calls[which], queue))
            seconds = time.perf_counter() - begin
            clean = min(sum(1 for each in one if each.clean) for one in taken)
            if index + 1 < MIN_REPEATS:
                continue
            lost = len(calls) == 1 and min(each.us for each in taken[0]) > hopeless_us
            if lost or clean >= max_repeats or seconds >= max_seconds:
                break
            if clean >= MIN_REPEATS and seconds >= min_seconds:
                break
    finally:
        queue.close()
    return [_samples(taken[0], each) for each in taken]


def _once(call: Callable[[], None], queue: RunQueue) -> _Taken:
    waited = queue.waited_ns()
    begin = time.perf_counter_ns()
    call()
    spent = time.perf_counter_ns() - begin
    waited = queue.waited_ns() - waited
    clean = waited <= MAX_WAITING * spent + _WAKING_NS
    return _Taken(spent / 1e3, clean, waited / max(1, spent))


def _samples(first: list[_Taken], taken: list[_Taken]) -> Samples:
    rounds = [
        (a.us / b.us, a.clean and b.clean, a.waiting + b.waiting)
        for a, b in zip(first, taken, strict=True)
    ]
    ratios = [each[0] for each in _choose(rounds)]
    times = [each[0] for each in _choose([(each.us, each.clean, each.waiting) for each in taken])]
    disturbed = sum(1 for each in taken if not each.clean)
    return Samples(tuple(times), disturbed, statistics.median(ratios))


def _choose(taken: list[tuple[float, bool, float]]) -> list[tuple[float, bool, float]]:
    """Return the undisturbed ones; when they are too few, those that waited least."""
    clean = [each for each in taken if each[1]]
    if len(clean) >= MIN_REPEATS:
        return clean
    return sorted(taken, key=lambda each: each[2])[:MIN_REPEATS]
