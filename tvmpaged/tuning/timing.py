"""Honest times on a machine that others use too.

Each call is timed by itself, by the device's own clock (`tvmpaged.tuning.clock`). A disturbed call
is set aside, such as one during which one of this process's threads waited for a core: what it took
says nothing about the kernel. Several contenders are timed in turns.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tvmpaged.tuning.clock import Clock

MIN_REPEATS = 5
#: Waiting for a core, as a share of a call's time, above which a call is set aside.
MAX_WAITING = 0.03
#: A candidate that is slower than the best by more than this factor never wins.
HOPELESS = 1.5
#: Waking a sleeping thread always takes a little.
_WAKING_NS = 20_000


@dataclass(frozen=True)
class Samples:
    """Times of one contender.

    Parameters
    ----------
    times_us : tuple of float
        Calls of undisturbed rounds; when there were too few, of the least disturbed ones.
    disturbed : int
        Calls that were set aside, or should have been.
    speedup : float
        The first contender's time by this one's.
    """

    times_us: tuple[float, ...]
    disturbed: int
    speedup: float


@dataclass(frozen=True)
class Taken:
    """One call.

    Parameters
    ----------
    us : float
        Its time, microseconds.
    clean : bool
        Whether no thread had to wait for a core.
    waiting : float
        How long threads waited, as a share of the time.
    """

    us: float
    clean: bool
    waiting: float


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
    make_clock: Callable[[], Clock],
    *,
    min_seconds: float,
    max_seconds: float,
    max_repeats: int = 200,
    leading_speedup: float = 0.0,
) -> list[Samples]:
    """Time contenders in turns, the order rotated from round to round.

    Parameters
    ----------
    calls : sequence of callable
        Contenders.
    make_clock : callable
        Gives the device's clock, asked for once all contenders have run.
    min_seconds, max_seconds : float
        How long to go on: at least, and at most until most rounds are undisturbed (but
        `MIN_REPEATS` rounds are always done).
    max_repeats : int
        Undisturbed calls that are enough in any case.
    leading_speedup : float
        Of two contenders the second is let go as soon as it is surely no faster than the first by
        this factor. What may lead is so timed the longest: of many short times the best is a lucky
        one.
    """
    for call in calls:
        call()  # pages, caches, branch predictors, and the pool's threads
    clock = make_clock()
    rounds: list[list[Taken]] = []
    begin = time.perf_counter()
    try:
        while True:
            rounds.append(_round(calls, len(rounds), clock))
            seconds = time.perf_counter() - begin
            if len(rounds) < MIN_REPEATS:
                continue
            clean = sum(1 for each in rounds if _clean(each))
            lost = len(calls) == 2 and highest_speedup(rounds) < leading_speedup
            enough = _is_quiet(rounds) and seconds >= min_seconds
            if lost or enough or clean >= max_repeats or seconds >= max_seconds:
                break
    finally:
        clock.close()
    return summary(rounds)


def summary(rounds: list[list[Taken]]) -> list[Samples]:
    """Return what rounds say of each contender; a round has a call of each."""
    chosen = _undisturbed(rounds)
    return [
        Samples(
            times_us=tuple(each[which].us for each in chosen),
            disturbed=sum(1 for each in rounds if not each[which].clean),
            speedup=_speedup(rounds, which),
        )
        for which in range(len(rounds[0]))
    ]


def _round(calls: Sequence[Callable[[], None]], index: int, clock: Clock) -> list[Taken]:
    """Time each contender once, beginning with another one each round."""
    order = [(index + turn) % len(calls) for turn in range(len(calls))]
    taken = {which: clock.once(calls[which]) for which in order}
    return [taken[which] for which in range(len(calls))]


def timed_once(call: Callable[[], Any], queue: RunQueue) -> Taken:
    """Time one call on the CPU, and tell whether it was disturbed."""
    waited = queue.waited_ns()
    begin = time.perf_counter_ns()
    call()
    spent = time.perf_counter_ns() - begin
    waited = queue.waited_ns() - waited
    clean = waited <= MAX_WAITING * spent + _WAKING_NS
    return Taken(spent / 1e3, clean, waited / max(1, spent))


def _clean(taken: list[Taken]) -> bool:
    return all(each.clean for each in taken)


def _is_quiet(rounds: list[list[Taken]]) -> bool:
    """Whether enough rounds, and most of them, were undisturbed."""
    clean = sum(1 for each in rounds if _clean(each))
    return clean >= MIN_REPEATS and 2 * clean >= len(rounds)


def _undisturbed(rounds: list[list[Taken]]) -> list[list[Taken]]:
    """Return the rounds that nothing disturbed; when they are too few, those that waited least.

    Whole rounds, so that all contenders' times come from the same moments.
    """
    clean = [each for each in rounds if _clean(each)]
    if len(clean) >= MIN_REPEATS:
        return clean
    count = max(MIN_REPEATS, len(rounds) // 4)
    return sorted(rounds, key=lambda each: sum(one.waiting for one in each))[:count]


def highest_speedup(rounds: list[list[Taken]]) -> float:
    """Return a speedup that the second of two contenders surely does not reach.

    Three standard errors above the median (1.2533 of the mean's each), and a hundredth, for few
    rounds may agree by chance. Disturbed rounds rule out only what is `HOPELESS`.
    """
    ratios = [each[0].us / each[1].us for each in rounds if _clean(each)]
    if len(ratios) < MIN_REPEATS:
        return HOPELESS * _speedup(rounds, 1)
    error = 1.2533 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return 1.01 * statistics.median(ratios) + 3 * error


def _speedup(rounds: list[list[Taken]], which: int) -> float:
    """Return the first contender's time by another's.

    The median of the undisturbed rounds' ratios. When those are too few, the ratio of the tenth
    percentiles or of the quickest, whichever is less: a disturbance only ever adds time, and it
    adds more to what starts more threads. When they are enough but not most, the least of all: on
    a busy machine a handful agrees by chance.
    """
    clean = [each for each in rounds if _clean(each)]
    ratio = math.inf
    if len(clean) >= MIN_REPEATS:
        ratio = statistics.median(each[0].us / each[which].us for each in clean)
    if _is_quiet(rounds):
        return ratio
    quick = [np.percentile([each[i].us for each in rounds], (0, 10)) for i in (0, which)]
    return min(ratio, *(float(each) for each in quick[0] / quick[1]))
