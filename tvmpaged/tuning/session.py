"""One spec's search from its first candidate to its record."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import numpy as np
from tvm.s_tir import meta_schedule as ms

from tvmpaged import schedules
from tvmpaged.build import tvm_target
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.features import ChoiceFeatures, Encoder
from tvmpaged.tuning.finalists import Result
from tvmpaged.tuning.metaschedule import TaskBuilder, TaskRunner
from tvmpaged.tuning.search import FlatSearch, Progress, stand_in
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, Trial, choices_key

#: Candidates of one batch: the model learns after each, and workers idle at the end of each.
BATCH = 8


@dataclass
class Session:
    """The state of one search.

    Parameters
    ----------
    task : Task
        The spec, its workload and what measures it.
    seed : int
        Of the proposals.
    num_trials : int
        Candidates to try, those of a log included.
    deadline : float
        Of `time.monotonic`; no batch starts that is not expected to end before it.
    starts : sequence of choices
        Tried first; the untuned default leads.
    known : sequence of Trial
        Measured before by another path; taken as they are.
    on_batch : callable
        Called with each batch's new trials.
    """

    task: Task
    seed: int
    num_trials: int
    deadline: float
    starts: Sequence[Choices]
    known: Sequence[Trial] = ()
    on_batch: Callable[[list[Trial]], None] = lambda _batch: None
    trials: dict[str, Trial] = field(default_factory=dict)
    _batch_began: float = 0.0
    _seconds_each: float = 0.0

    @property
    def default(self) -> Choices:
        """The untuned default."""
        return self.starts[0]

    def search(self) -> None:
        """Try candidates until the trials or the time are used up.

        Raises
        ------
        BaseException
            What went wrong in a callback of MetaSchedule.
        """
        spec, target = self.task.spec, self.task.target
        space = schedules.space(spec, target)
        candidates = Candidates(
            space, lambda each: schedules.reject(spec, target, each), self.default
        )
        self.trials.update({each.key: each for each in self.known})
        progress = Progress(self._batch_size, self._trials_of, self._took)
        strategy = FlatSearch(candidates, self.starts, self.known, self.seed, progress)
        # The model takes random numbers of NumPy's global generator while it has seen too little.
        np.random.seed(self.seed % 2**32)  # noqa: NPY002, it is that generator that is meant
        model = ms.cost_model.XGBModel(
            extractor=ChoiceFeatures(Encoder(space)),
            config=ms.cost_model.xgb_model.XGBConfig(seed=self.seed % 2**31, nthread=1),
            num_warmup_samples=BATCH // 2,
            num_tuning_cores=1,
        )
        with without_intrinsics():
            context = ms.TuneContext(
                mod=stand_in(),
                target=tvm_target(target),
                space_generator=ms.space_generator.ScheduleFn(
                    lambda _sch: None, sch_rules=[], postprocs=[], mutator_probs={}
                ),
                search_strategy=strategy,
                task_name=str(spec),
                rand_state=self.seed % (2**31 - 1) + 1,
                num_threads=1,
            )
        batch: dict[str, Choices] = {}
        ms.tune.tune_tasks(
            tasks=[context],
            task_weights=[1.0],
            work_dir=str(self.task.machine.folder),
            max_trials_global=2**30,
            max_trials_per_task=2**30,
            num_trials_per_iter=BATCH,
            builder=TaskBuilder(self.task, batch),
            runner=TaskRunner(self.task, batch),
            database="memory",
            cost_model=model,
            measure_callbacks=[ms.measure_callback.UpdateCostModel()],
            task_scheduler="round-robin",
        )
        if progress.error is not None:
            raise progress.error

    def _batch_size(self) -> int:
        self._batch_began = time.monotonic()
        if self.task.machine.interrupted():
            return 0
        wanted = min(BATCH, self.num_trials - len(self.trials))
        left = self.deadline - time.monotonic()
        if not self.trials:
            return wanted if left > 0 else min(wanted, 2)  # with nothing measured nothing is won
        if self._seconds_each * wanted > left:
            wanted = int(left / self._seconds_each)
        return wanted if left > 0 else 0

    def _trials_of(self, keys: Sequence[str]) -> list[Trial]:
        return [self.task.answers[key] for key in keys]

    def _took(self, batch: list[Trial]) -> None:
        seconds = (time.monotonic() - self._batch_began) / max(1, len(batch))
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

    def default_trial(self) -> Trial | None:
        """Return the untuned default's trial."""
        return self.trials.get(choices_key(self.default))

    def failures(self) -> dict[str, int]:
        """Return how many candidates failed, by reason."""
        return dict(Counter(each.reason for each in self.trials.values() if each.reason))


@contextmanager
def without_intrinsics() -> Iterator[None]:
    """Keep a context from parsing TVM's tensor intrinsics, which takes a core for about 20 s.

    No stand-in uses one; a program that does is built in the workers.
    """
    name = "tvm.s_tir.tensor_intrin"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


def make_record(
    session: Session, setting: Setting, result: Result, seed: int, mlflow_run_id: str | None
) -> Record:
    """Return what a search found as a record."""
    spec: AttentionSpec = session.task.spec
    target: TargetKey = session.task.target
    name, rate = setting.workload.rate(spec, result.latency_us.median)
    rates: dict[str, Any] = {"gb_per_s": None, "gflop_per_s": None} | {name: round(rate, 3)}
    failures = Counter(session.failures()) + Counter(each.reason for each in result.failures)
    return Record(
        spec=spec,
        target=target,
        choices=dict(result.choices),
        is_default=result.is_default,
        source_sha256=setting.source_sha256,
        tvm=setting.tvm,
        tvm_ffi=setting.tvm_ffi,
        device=setting.device,
        num_threads=setting.num_threads,
        caches_bytes=setting.caches_bytes,
        rotation_bytes=setting.rotation_bytes,
        latency_us=result.latency_us,
        default_latency_us=result.default_latency_us,
        speedup=round(result.speedup, 4),
        workload=setting.workload.as_dict(),
        trials=len(session.trials),
        failures=dict(failures),
        seed=seed,
        mlflow_run_id=mlflow_run_id,
        created_at=datetime.now(UTC).replace(microsecond=0).isoformat(),
        **rates,
    )
