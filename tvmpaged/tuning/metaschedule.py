"""MetaSchedule's builder and runner interfaces, over a `Task`.

Both answer a whole batch before they return, so nothing compiles while something is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvm.ir.utils import derived_object
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from tvmpaged.tuning.features import choices_of
from tvmpaged.tuning.search import Progress
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, Trial, choices_key


@derived_object
class TaskBuilder(PyBuilder):  # type: ignore[misc]
    """MetaSchedule's builder over a `Task`; what goes wrong in here becomes `Progress.error`."""

    def __init__(self, task: Task, batch: dict[str, Choices], progress: Progress) -> None:
        self.task = task
        self.batch = batch
        self.progress = progress

    def build(self, build_inputs: Any) -> list[Any]:
        """Compile a batch."""
        batch = [choices_of(each.mod) for each in build_inputs]
        self.batch.clear()
        self.batch.update({choices_key(each): each for each in batch})
        try:
            self.task.compile(batch)
        except BaseException as error:  # noqa: BLE001, raised again by whoever started the search
            self.progress.error = error
            return [BuilderResult(None, "not compiled") for _ in batch]
        results = []
        for key in self.batch:
            known = self.task.answers.get(key)
            reason = known.reason if known is not None and known.reason else None
            path = None if reason else str(self.task.machine.path(self.task.spec, key))
            results.append(BuilderResult(path, reason))
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
    """MetaSchedule's runner over a `Task`; what goes wrong in here becomes `Progress.error`."""

    def __init__(self, task: Task, batch: dict[str, Choices], progress: Progress) -> None:
        self.task = task
        self.batch = batch
        self.progress = progress

    def run(self, runner_inputs: Any) -> list[Any]:
        """Measure a batch."""
        keys = [Path(str(each.artifact_path)).stem for each in runner_inputs]
        trials: list[Trial] = []
        if self.progress.error is None:
            try:
                trials = self.task.run_all([self.batch[key] for key in keys])
            except BaseException as error:  # noqa: BLE001, raised by whoever started the search
                self.progress.error = error
        return [_Done(_result(each)) for each in trials] or [
            _Done(RunnerResult(None, "not measured")) for _ in keys
        ]


def _result(trial: Trial) -> Any:
    return RunnerResult(None if trial.reason else [trial.median_us / 1e6], trial.reason or None)
