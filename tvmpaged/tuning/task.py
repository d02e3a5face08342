"""One spec's candidates: compiled and measured through a `Machine`, each answered once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tvmpaged.roofs import MeasuredRoof
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.machine import Machine, failed, latencies
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.timing import HOPELESS
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.workload import Workload

#: How often a new leader is timed again, at once; its time is the middle one.
CONFIRMATIONS = 2


@dataclass
class Task:
    """One spec's candidates, what is known of them, and what they are compared with.

    Each candidate is timed in turns with the untuned default, and its time is given as the
    default's first time by the ratio: so that times taken minutes or days apart, on a machine
    whose speed varies, compare.

    Parameters
    ----------
    machine, spec, target, workload, merge
        What to do it with and on; `merge` is the compiled merge kernel.
    default : dict
        The untuned default.
    rotation_bytes : int
        K and V that are read before the same are read again.
    seed : int
        Of the values measured on.
    answers : dict
        Key -> trial: what is known, from before and from now.
    roof : MeasuredRoof or None
        What bounds the kernel here, once it was measured.
    """

    machine: Machine
    spec: AttentionSpec
    target: TargetKey
    workload: Workload
    merge: Path
    default: Choices
    rotation_bytes: int
    seed: int
    answers: dict[str, Trial] = field(default_factory=dict)
    roof: MeasuredRoof | None = None

    def compile(self, batch: Sequence[Choices]) -> None:
        """Compile what has no answer yet; failures become answers."""
        new = [each for each in batch if choices_key(each) not in self.answers]
        if new and self.default not in new and not self.artifact(self.default).exists():
            new.append(self.default)
        answers = self.machine.compile(self.spec, self.target, new)
        for choices, answer in zip(new, answers, strict=True):
            failure = failed(choices, answer, "compile")
            if failure is not None:
                self.answers.setdefault(failure.key, failure)

    def run_all(self, batch: Sequence[Choices]) -> list[Trial]:
        """Check and time compiled candidates, on several devices side by side; in their order."""

        def run(choices: Choices) -> Trial:
            return self.run(choices_key(choices), choices)

        if self.machine.num_devices < 2:
            return [run(each) for each in batch]
        # What all are compared with is measured before the others.
        alone = 0 if choices_key(self.default) in self.answers else 1
        trials = [run(each) for each in batch[:alone]]
        pool = ThreadPoolExecutor(self.machine.num_devices)
        try:
            return trials + list(pool.map(run, batch[alone:]))
        finally:
            pool.shutdown(cancel_futures=True)

    def run(self, key: str, choices: Choices) -> Trial:
        """Check and time one compiled candidate, unless it has an answer."""
        if key not in self.answers:
            trial = self._measure(choices)
            if trial.median_us < self._best_us() < math.inf:
                # A disturbance of a second makes a leader that nothing real ever beats.
                trial = _middle([trial] + [self._measure(choices) for _ in range(CONFIRMATIONS)])
            self.answers[key] = trial
            # What may still win is kept for the finalists.
            if choices != self.default and trial.median_us > HOPELESS * self._best_us():
                self.machine.path(self.spec, key).unlink(missing_ok=True)
        return self.answers[key]

    def _measure(self, choices: Choices) -> Trial:
        unit = self.answers.get(choices_key(self.default))
        if unit is not None and unit.latency_us is None:
            unit = None
        answer = self.machine.measure(
            self.spec,
            self.workload,
            self.merge,
            [choices] if unit is None else [self.default, choices],
            rotation_bytes=self.rotation_bytes,
            seed=self.seed,
            leading_speedup=0.0 if unit is None else unit.median_us / self._best_us(),
        )
        return failed(choices, answer, "run") or _timed(choices, answer, unit)

    def measure_roof(self, beside: Choices | None = None) -> MeasuredRoof | None:
        """Measure `roof`, in turns with a compiled candidate if one is named.

        None: it failed, or the candidate went through it, so that it is none.

        A search does not need it, so a failure of it fails nothing.
        """
        found = self.machine.measure_roof(
            self.spec,
            self.workload,
            self.merge,
            beside,
            rotation_bytes=self.rotation_bytes,
            seed=self.seed,
        )
        if found is not None and not found.is_credible:
            return None
        self.roof = found or self.roof
        return found

    def artifact(self, choices: Choices) -> Path:
        """Return where a candidate's artifact lies, if it is still there."""
        return self.machine.path(self.spec, choices_key(choices))

    def _best_us(self) -> float:
        # A copy, because other devices' answers may come in meanwhile.
        return min((each.median_us for each in [*self.answers.values()]), default=math.inf)


def _middle(trials: list[Trial]) -> Trial:
    """Return the trial with the middle time, or the first failure."""
    failures = [each for each in trials if each.latency_us is None]
    middle = sorted(trials, key=lambda each: each.median_us)[len(trials) // 2]
    return failures[0] if failures else middle


def _timed(choices: Choices, answer: Answer, unit: Trial | None) -> Trial:
    raw = latencies(answer)[-1]
    if unit is None:
        return Trial(choices, raw)
    scale = unit.median_us / answer.reply["samples"][-1]["speedup"] / raw.median
    return Trial(choices, raw.scaled(scale), scale=round(scale, 4))
