"""A session whose candidates come from MetaSchedule's search under a cost model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from tvm.s_tir import meta_schedule as ms

# MetaSchedule imports it after a batch, through FFI, which makes another error of a missing module.
from xgboost import DMatrix  # noqa: F401

from tvmpaged import schedules
from tvmpaged.build import tvm_target
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.features import ChoiceFeatures, Encoder
from tvmpaged.tuning.metaschedule import TaskBuilder, TaskRunner
from tvmpaged.tuning.search import FlatSearch, Progress, stand_in
from tvmpaged.tuning.session import BATCH, Session
from tvmpaged.tuning.trial import Choices, Trial


@dataclass(kw_only=True)
class ModelSession(Session):
    """Tries its starts first, then what a model of all trials ranks highest.

    Parameters
    ----------
    seed : int
        Of the proposals.
    """

    seed: int

    def search(self) -> None:
        """Try candidates until the trials or the time are used up.

        Raises
        ------
        BaseException
            What went wrong in a callback of MetaSchedule.
        """
        self.trials.update({each.key: each for each in self.known})
        progress = Progress(self._batch_size, self._trials_of, self._took)
        search = _Search.make(
            self.task.spec, self.task.target, self.starts, self.known, self.seed, progress
        )
        batch: dict[str, Choices] = {}
        ms.tune.tune_tasks(
            tasks=[search.context],
            task_weights=[1.0],
            work_dir=str(self.task.machine.folder),
            max_trials_global=2**30,
            max_trials_per_task=2**30,
            num_trials_per_iter=BATCH,
            builder=TaskBuilder(self.task, batch, progress),
            runner=TaskRunner(self.task, batch, progress),
            database="memory",
            cost_model=search.model,
            measure_callbacks=[ms.measure_callback.UpdateCostModel()],
            task_scheduler="round-robin",
        )
        if progress.error is not None:
            raise progress.error

    def _trials_of(self, keys: Sequence[str]) -> list[Trial]:
        # Of what went wrong in the middle of a batch there is no answer.
        return [self.task.answers[key] for key in keys if key in self.task.answers]


def propose(
    spec: AttentionSpec,
    target: TargetKey,
    starts: Sequence[Choices],
    known: Sequence[Trial],
    seed: int,
    count: int,
) -> list[Choices]:
    """Return candidates that a search would try next, without trying any.

    Parameters
    ----------
    spec, target
        For what.
    starts : sequence of choices
        Come first, but for those that are known; the untuned default leads.
    known : sequence of Trial
        What the model learns from; not proposed again.
    seed : int
        Of the proposals.
    count : int
        How many at most.
    """
    idle = Progress(lambda: 0, lambda _keys: [], lambda _batch: None)
    search = _Search.make(spec, target, starts, known, seed, idle)
    search.strategy.pre_tuning(0, 0, [], None, search.model)
    found: list[Choices] = search.strategy.propose(count)
    return found


@dataclass
class _Search:
    """MetaSchedule's parts for one spec."""

    strategy: Any
    model: Any
    context: Any

    @classmethod
    def make(
        cls,
        spec: AttentionSpec,
        target: TargetKey,
        starts: Sequence[Choices],
        known: Sequence[Trial],
        seed: int,
        progress: Progress,
    ) -> _Search:
        space = schedules.space(spec, target)
        candidates = Candidates(space, lambda each: schedules.reject(spec, target, each), starts[0])
        strategy = FlatSearch(candidates, starts, known, seed, progress)
        # The model takes random numbers of NumPy's global generator while it has seen too little.
        np.random.seed(seed % 2**32)  # noqa: NPY002, it is that generator that is meant
        model = ms.cost_model.XGBModel(
            extractor=ChoiceFeatures(Encoder(space)),
            config=ms.cost_model.xgb_model.XGBConfig(seed=seed % 2**31, nthread=1),
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
                rand_state=seed % (2**31 - 1) + 1,
                num_threads=1,
            )
        return cls(strategy, model, context)


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
