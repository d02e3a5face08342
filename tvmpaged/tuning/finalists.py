"""The end of a search: the best candidates and the untuned default once more, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmpaged.errors import UserError
from tvmpaged.records import Latency
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.machine import failed, latencies
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, Trial, choices_key

NUM_FINALISTS = 3
#: What a candidate must gain over the default, and over a simpler one, to be worth its place.
MIN_GAIN = 0.01
MIN_SECONDS = 0.5
MAX_SECONDS_EACH = 1.5


@dataclass(frozen=True)
class Result:
    """Who won.

    Parameters
    ----------
    choices : dict
        The winner.
    is_default : bool
        Whether it is the untuned default.
    latency_us, default_latency_us : Latency
        Times of one run, taken in turns.
    speedup : float
        The default's time by the winner's: the least of the medians' ratio, that of the tenth
        percentiles, and the one that `tvmpaged.tuning.timing` gives.
    failures : list of Trial
        Finalists that failed now.
    """

    choices: Choices
    is_default: bool
    latency_us: Latency
    default_latency_us: Latency
    speedup: float
    failures: list[Trial]


def decide(
    task: Task,
    default: Choices,
    trials: Sequence[Trial],
    champion: Choices | None = None,
) -> Result:
    """Measure finalists beside the default and name the winner.

    Parameters
    ----------
    task, default, trials
        Of the search.
    champion : dict, optional
        Who won before: a later search replaces it by what beats it only.

    Raises
    ------
    UserError
        When not even the default can be measured.
    """
    timed = sorted((each for each in trials if each.latency_us), key=lambda each: each.median_us)
    contenders = [each.choices for each in timed if each.key != choices_key(default)]
    contenders = [default, *contenders[:NUM_FINALISTS]]
    if champion is not None and champion not in contenders:
        contenders.insert(1, champion)
    failures: list[Trial] = []
    missing = [each for each in contenders if not task.artifact(each).exists()]
    answers = task.machine.compile(task.spec, task.target, missing)
    for choices, answer in zip(missing, answers, strict=True):
        failure = failed(choices, answer, "compile")
        if failure is not None:
            _stop_if_interrupted(failure)
            failures.append(failure)
            contenders.remove(choices)
    while contenders and contenders[0] == default:
        answer = task.machine.measure(
            task.spec,
            task.workload,
            task.merge,
            contenders,
            rotation_bytes=task.rotation_bytes,
            seed=task.seed,
            min_seconds=MIN_SECONDS,
            max_seconds=MAX_SECONDS_EACH * len(contenders),
            phase="finalists",
        )
        failure = failed(contenders[-1], answer, "run")
        if failure is None:
            times = latencies(answer)
            # By rounds, by medians and by the quickest: on a busy machine one alone may deceive.
            unit = times[0]
            speedups = [
                min(each["speedup"], unit.median / time.median, unit.p10 / time.p10)
                for each, time in zip(answer.reply["samples"], times, strict=True)
            ]
            best = _winner(contenders, speedups)
            return Result(
                choices=contenders[best],
                is_default=best == 0,
                latency_us=times[best],
                default_latency_us=times[0],
                speedup=1.0 if best == 0 else float(speedups[best]),
                failures=failures,
            )
        _stop_if_interrupted(failure)
        # Each passed alone before; without the least of them the others get their turn.
        failures.append(failure)
        contenders.pop()
    raise UserError(f"{task.spec}: the untuned default cannot be measured: {failures[-1].detail}")


def _stop_if_interrupted(failure: Trial) -> None:
    if failure.reason == "interrupted":
        raise GivenUpError


def _winner(contenders: Sequence[Choices], speedups: Sequence[float]) -> int:
    """Return the fastest's index; within `MIN_GAIN` of it the simplest wins, the default first."""
    best = max(speedups)
    default = contenders[0]

    def distance(index: int) -> int:
        return sum(1 for name, value in default.items() if contenders[index][name] != value)

    close = [i for i, speedup in enumerate(speedups) if speedup * (1 + MIN_GAIN) >= best]
    return min(close, key=lambda index: (distance(index), -speedups[index]))
