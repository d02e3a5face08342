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
    hopeless_speedup: float = 0.0,
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
    hopeless_speedup : float
        Of two contenders the second is let go after `MIN_REPEATS` rounds when it is no faster than
        the first by this factor.
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
            lost = len(calls) == 2 and _speedup(*taken) < hopeless_speedup
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
    clean = [each for each in taken if each.clean]
    if len(clean) < MIN_REPEATS:
        clean = sorted(taken, key=lambda each: each.waiting)[:MIN_REPEATS]
    disturbed = sum(1 for each in taken if not each.clean)
    return Samples(tuple(each.us for each in clean), disturbed, _speedup(first, taken))


def _speedup(first: list[_Taken], taken: list[_Taken]) -> float:
    """Return the median of the rounds' ratios.

    Over the undisturbed rounds; when they are too few, over all: what disturbs one contender of a
    round often disturbs the other.
    """
    rounds = list(zip(first, taken, strict=True))
    clean = [(a, b) for a, b in rounds if a.clean and b.clean]
    chosen = clean if len(clean) >= MIN_REPEATS else rounds
    return statistics.median(a.us / b.us for a, b in chosen)
