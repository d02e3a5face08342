"""Measuring a roof where candidates are measured, and a candidate beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tvmpaged.roofs import MeasuredRoof, Roof
from tvmpaged.tuning.clock import Clock
from tvmpaged.tuning.timing import Taken

MIN_ROUNDS = 5
#: Timed calls of a turn.
CALLS = 5
#: In search of undisturbed rounds.
MAX_SECONDS = 2.0


def measure_roof(
    roof: Roof,
    make_clock: Callable[[], Clock],
    call: Callable[[], None] | None = None,
    amount: int = 0,
) -> dict[str, Any]:
    """Measure a roof; with a call of a kernel, that in turns with it.

    A kernel and torch have threads of their own, and those that wait spin for a while. So a turn
    is several calls, and its first, in which the other's threads go to sleep, is not timed. A
    disturbance only ever adds time, so a turn counts by its fastest call.

    Parameters
    ----------
    roof : Roof
        Which.
    make_clock : callable
        Gives the device's clock, asked for once all have run.
    call : callable, optional
        The kernel's step.
    amount : int
        What it reads or computes, in the roof's unit.

    Returns
    -------
    dict
        `MeasuredRoof` as plain data.
    """
    contenders = [roof.call] if call is None else [roof.call, call]
    for each in contenders:
        each()  # starts its threads, so that the clock counts them
    clock = make_clock()
    rounds: list[_Round] = []
    begin = time.perf_counter()
    try:
        while len(rounds) < MIN_ROUNDS or (
            sum(each.clean for each in rounds) < MIN_ROUNDS
            and time.perf_counter() - begin < MAX_SECONDS
        ):
            taken = [_turn(each, clock) for each in contenders]
            clean = all(each.clean for each in taken)
            rounds.append(_Round(clean, roof.rate(taken[0].us), amount / taken[-1].us / 1e3))
    finally:
        clock.close()
    value, fraction = _summary(rounds)
    return asdict(MeasuredRoof(roof.name, value, None if call is None else fraction))


@dataclass(frozen=True)
class _Round:
    clean: bool
    roof: float
    kernel: float


def _summary(rounds: list[_Round]) -> tuple[float, float]:
    """Return the roof's rate, and the kernel's by it.

    Medians of the rounds in which nothing waited for a core; when those are too few, the best rates
    of all: a disturbance only ever adds time.
    """
    clean = [each for each in rounds if each.clean]
    if len(clean) >= MIN_ROUNDS:
        value = statistics.median(each.roof for each in clean)
        return value, statistics.median(each.kernel / each.roof for each in clean)
    value = max(each.roof for each in rounds)
    return value, max(each.kernel for each in rounds) / value


def _turn(call: Callable[[], None], clock: Clock) -> Taken:
    """Return the fastest of some calls, after one that is not timed."""
    call()
    return min((clock.once(call) for _ in range(CALLS)), key=lambda each: each.us)
