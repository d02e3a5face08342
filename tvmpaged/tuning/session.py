"""A spec's candidates, one batch after the other, while trials and time last."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tvmpaged.roofs import MeasuredRoof
from tvmpaged.tuning.finalists import Result
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, Trial, choices_key

#: Candidates of one batch: the model learns after each, and workers idle at the end of each.
BATCH = 8


@dataclass(kw_only=True)
class Session:
    """The state of one spec's candidates: those in `starts` are tried in their order.

    Parameters
    ----------
    task : Task
        The spec, its workload and what measures it.
    num_trials : int
        Candidates to try, those of a log included.
    deadline : float
        Of `time.monotonic`; no batch starts that is not expected to end before it.
    starts : sequence of choices
        Tried in this order; the untuned default leads.
    known : sequence of Trial
        Measured before by another path; taken as they are.
    on_batch : callable
        Called with each batch's new trials.
    """

    task: Task
    num_trials: int
    deadline: float
    starts: Sequence[Choices]
    known: Sequence[Trial] = ()
    on_batch: Callable[[list[Trial]], None] = lambda _batch: None
    trials: dict[str, Trial] = field(default_factory=dict)
    _batch_began: float = 0.0
    _known_before: int = 0
    _seconds_each: float = 0.0

    @property
    def default(self) -> Choices:
        """The untuned default."""
        return self.starts[0]

    def search(self) -> None:
        """Try candidates until there are none, or the trials or the time are used up."""
        left = [each for each in self.starts if choices_key(each) not in self.trials]
        while left and (count := self._batch_size()):
            batch, left = left[:count], left[count:]
            self.task.compile(batch)
            trials = self.task.run_all(batch)
            self._took([each for each in trials if each.reason != "interrupted"])

    def _batch_size(self) -> int:
        self._batch_began, self._known_before = time.monotonic(), len(self.task.answers)
        if self.task.machine.interrupted():
            return 0
        wanted = min(BATCH, self.num_trials - len(self.trials))
        left = self.deadline - time.monotonic()
        if not self.trials:
            return wanted if left > 0 else min(wanted, 2)  # with nothing measured nothing is won
        if self._seconds_each * wanted > left:
            wanted = int(left / self._seconds_each)
        return wanted if left > 0 else 0

    def _took(self, batch: list[Trial]) -> None:
        # What was answered before, by a log that is resumed, took no time and tells of none.
        if tried := len(self.task.answers) - self._known_before:
            seconds = (time.monotonic() - self._batch_began) / tried
            # Slow batches count at once, quick ones by and by: a deadline is a promise.
            self._seconds_each = max(seconds, (self._seconds_each + seconds) / 2)
        self.trials.update({each.key: each for each in batch})
        self.on_batch(batch)

    def best(self) -> Trial | None:
        """Return the fastest trial so far."""
        timed = [each for each in self.trials.values() if each.latency_us is not None]
        return min(timed, key=lambda each: each.median_us, default=None)

    def eta_s(self) -> float | None:
        """Return the seconds until the search ends, as far as that is known."""
        left = self.deadline - time.monotonic()
        if self._seconds_each:
            left = min(left, (self.num_trials - len(self.trials)) * self._seconds_each)
        return max(0.0, left) if left != float("inf") else None

    def status(self, phase: str) -> Status:
        """Return how far the search is; see `Status` for the phases."""
        best, default = self.best(), self.default_trial()
        name, rate, fraction = "", None, None
        unit = default.median_us if default and default.latency_us else None
        if best is not None:
            name, rate = self.task.workload.rate(self.task.spec, best.median_us)
            fraction = None if self.task.roof is None else self.task.roof.fraction_of(rate)
        return Status(
            spec=self.task.spec,
            phase=phase,
            trials=len(self.trials),
            num_trials=max(self.num_trials, len(self.trials)),  # a longer log counts whole
            failures=sum(self.failures().values()),
            best_us=best.median_us if best is not None else None,
            default_us=unit,
            speedup=unit / best.median_us if best is not None and unit is not None else None,
            rate_name=name,
            rate=rate,
            roof_fraction=fraction,
            eta_s=self.eta_s() if phase in ("start", "search") else None,
        )

    def done(self, result: Result, roof: MeasuredRoof | None) -> Status:
        """Return the end, by the times of the finals: those of the search may be lucky ones.

        Parameters
        ----------
        result : Result
            Who won.
        roof : MeasuredRoof or None
            Measured in turns with the winner.
        """
        best_us = result.latency_us.median
        return replace(
            self.status("done"),
            best_us=best_us,
            default_us=result.default_latency_us.median,
            speedup=result.speedup,
            rate=self.task.workload.rate(self.task.spec, best_us)[1],
            roof_fraction=None if roof is None else roof.fraction,
        )

    def default_trial(self) -> Trial | None:
        """Return the untuned default's trial."""
        return self.trials.get(choices_key(self.default))

    def failures(self) -> dict[str, int]:
        """Return how many candidates failed, by reason."""
        return dict(Counter(each.reason for each in self.trials.values() if each.reason))


def share_until(end: float, num_left: int) -> float:
    """Return until when the next of so many specs may take, so that all get an equal share.

    Parameters
    ----------
    end : float
        Of `time.monotonic`, for all.
    num_left : int
        Specs that are not done.
    """
    now = time.monotonic()
    return now + (end - now) / num_left
