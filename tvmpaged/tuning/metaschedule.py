"""MetaSchedule's builder and runner interfaces, over worker processes of our own.

Both answer a whole batch before they return, so nothing compiles while something is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from tvmpaged.records import Latency
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.features import choices_of
from tvmpaged.tuning.process import START_TIMEOUT_S, Answer, Process, ask_all
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.workload import Workload

COMPILE_TIMEOUT_S = 120.0
#: For one candidate's check and times; kernels that are tuned take milliseconds.
MEASURE_TIMEOUT_S = 60.0
#: Of an error's text; a compiler's may run to pages.
_MAX_DETAIL = 500
MIN_SECONDS = 0.12
MAX_SECONDS = 1.0
#: A candidate that is slower than the best by more than this factor gets the least repeats.
HOPELESS = 1.5


@dataclass
class Machine:
    """The processes that compile and measure, and where artifacts lie in between.

    Parameters
    ----------
    compilers : list of Process
        One core each.
    device : Process
        Alone on the machine while it works.
    folder : Path
        Of artifacts; temporary.
    num_workers : int
        Threads of a kernel.
    interrupted : callable
        True once all work is to be given up.
    """

    compilers: list[Process]
    device: Process
    folder: Path
    num_workers: int
    interrupted: Callable[[], bool] = lambda: False

    def compile(
        self, spec: AttentionSpec, target: TargetKey, choices: Sequence[Choices]
    ) -> list[Answer]:
        """Compile candidates into `path`; an answer without reason means it is there."""
        self.path(spec, "").parent.mkdir(parents=True, exist_ok=True)
        requests = [
            {
                "spec": str(spec),
                "target": str(target),
                "choices": each,
                "path": str(self.path(spec, choices_key(each))),
            }
            for each in choices
        ]
        return ask_all(self.compilers, requests, COMPILE_TIMEOUT_S, self.interrupted)

    def path(self, spec: AttentionSpec, key: str) -> Path:
        """Return where a candidate's artifact lies."""
        return self.folder / str(spec) / f"{key}.so"

    def measure(
        self,
        spec: AttentionSpec,
        workload: Workload,
        merge: Path,
        candidates: Sequence[Choices],
        *,
        rotation_bytes: int,
        seed: int,
        min_seconds: float = MIN_SECONDS,
        max_seconds: float = MAX_SECONDS,
        hopeless_speedup: float = 0.0,
    ) -> Answer:
        """Check candidates and time them in turns."""
        request = {
            "spec": str(spec),
            "workload": workload.as_dict(),
            "seed": seed,
            "rotation_bytes": rotation_bytes,
            "num_workers": self.num_workers,
            "merge": str(merge),
            "candidates": [
                {"path": str(self.path(spec, choices_key(each))), "choices": each}
                for each in candidates
            ],
            "min_seconds": min_seconds,
            "max_seconds": max_seconds,
            "hopeless_speedup": hopeless_speedup,
        }
        timeout_s = MEASURE_TIMEOUT_S + max_seconds * len(candidates)
        return self.device.ask(request, timeout_s, self.interrupted)

    def start(self) -> None:
        """Start all processes at once, so that no candidate pays for it."""
        processes = [*self.compilers, self.device]
        requests = [{"ping": True}] * len(processes)
        ask_all(processes, requests, START_TIMEOUT_S, self.interrupted)

    def close(self) -> None:
        """End the processes."""
        for each in (*self.compilers, self.device):
            each.kill()


@dataclass
class Task:
    """One spec's search, as its builder and runner see it.

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

    def run(self, key: str, choices: Choices) -> Trial:
        """Check and time one compiled candidate, unless it has an answer."""
        if key not in self.answers:
            unit = self.answers.get(choices_key(self.default))
            alone = unit is None or unit.latency_us is None
            answer = self.machine.measure(
                self.spec,
                self.workload,
                self.merge,
                [choices] if alone else [self.default, choices],
                rotation_bytes=self.rotation_bytes,
                seed=self.seed,
                hopeless_speedup=0.0 if unit is None else self._hopeless_speedup(unit),
            )
            self.answers[key] = failed(choices, answer, "run") or _timed(choices, answer, unit)
            # What may still win is kept for the finalists.
            best = min(each.median_us for each in self.answers.values())
            if choices != self.default and self.answers[key].median_us > HOPELESS * best:
                self.machine.path(self.spec, key).unlink(missing_ok=True)
        return self.answers[key]

    def artifact(self, choices: Choices) -> Path:
        """Return where a candidate's artifact lies, if it is still there."""
        return self.machine.path(self.spec, choices_key(choices))

    def _hopeless_speedup(self, unit: Trial) -> float:
        best = min(each.median_us for each in self.answers.values())
        return unit.median_us / best / HOPELESS


def _timed(choices: Choices, answer: Answer, unit: Trial | None) -> Trial:
    raw = latencies(answer)[-1]
    if unit is None or unit.latency_us is None:
        return Trial(choices, raw)
    scale = unit.median_us / answer.reply["samples"][-1]["speedup"] / raw.median
    return Trial(choices, raw.scaled(scale), scale=round(scale, 4))


def latencies(answer: Answer) -> list[Latency]:
    """Return the times of a measuring worker's reply."""
    return [Latency.of(each["times_us"], each["disturbed"]) for each in answer.reply["samples"]]


def failed(choices: Choices, answer: Answer, stage: str) -> Trial | None:
    """Return the failure that an answer tells of, or None."""
    if answer.reason:
        return Trial(choices, reason=answer.reason, detail=answer.detail)
    if "wrong" in answer.reply:
        return Trial(choices, reason="wrong", detail=answer.reply["wrong"])
    if "error" in answer.reply:
        detail = answer.reply["error"][:_MAX_DETAIL]
        reason = "memory" if detail.startswith("MemoryError") else stage
        return Trial(choices, reason=reason, detail=detail)
    return None


@derived_object
class TaskBuilder(PyBuilder):  # type: ignore[misc]
    """MetaSchedule's builder over a `Task`."""

    def __init__(self, task: Task, batch: dict[str, Choices]) -> None:
        self.task = task
        self.batch = batch

    def build(self, build_inputs: Any) -> list[Any]:
        """Compile a batch."""
        batch = [choices_of(each.mod) for each in build_inputs]
        self.batch.clear()
        self.batch.update({choices_key(each): each for each in batch})
        self.task.compile(batch)
        results = []
        for key in self.batch:
            known = self.task.answers.get(key)
            error = known.reason if known is not None and known.reason else None
            path = None if error else str(self.task.machine.path(self.task.spec, key))
            results.append(BuilderResult(path, error))
        return results


@derived_object
class _Done(PyRunnerFuture):  # type: ignore[misc]
    def __init__(self, result: Any) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result


@derived_object
class TaskRunner(PyRunner):  # type: ignore[misc]
    """MetaSchedule's runner over a `Task`."""

    def __init__(self, task: Task, batch: dict[str, Choices]) -> None:
        self.task = task
        self.batch = batch

    def run(self, runner_inputs: Any) -> list[Any]:
        """Measure a batch, one after the other."""
        futures = []
        for each in runner_inputs:
            key = Path(str(each.artifact_path)).stem
            trial = self.task.run(key, self.batch[key])
            seconds = None if trial.reason else [trial.median_us / 1e6]
            futures.append(_Done(RunnerResult(seconds, trial.reason or None)))
        return futures
