"""MetaSchedule's search strategy over a flat list of options.

The candidates' programs are built where they are compiled: choices change the program itself, and
to build one takes longer than to compile it. So a candidate's module here is a stand-in that
carries the choices; strategy, cost model, builder and log all read the same data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.search_strategy import PySearchStrategy

from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.features import CHOICES_ATTRIBUTE, choices_of
from tvmpaged.tuning.trial import Choices, Trial, choices_key

#: Share of a batch that is drawn at random whatever the model says.
EXPLORE = 0.2
#: Candidates the model ranks for one batch: drawn at random, and varied from the best so far.
NUM_DRAWN = 192
NUM_VARIED = 320
NUM_PARENTS = 8


def stand_in() -> tvm.IRModule:
    """Return the module that candidates are made of."""
    function = tvm.tirx.PrimFunc([], tvm.tirx.Evaluate(0))
    function = function.with_attr("global_symbol", "main").with_attr("s_tir", True)
    return tvm.IRModule({"main": function})


@dataclass
class Progress:
    """What the strategy and the world tell each other.

    Parameters
    ----------
    batch_size : callable
        Asked before each batch: how many candidates it may hold; 0 ends the search.
    trials_of : callable
        Choices' keys -> their trials, once MetaSchedule says a batch is done.
    on_batch : callable
        Called with each batch's trials.
    error : BaseException or None
        What went wrong in here: MetaSchedule would drop its type on the way out.
    """

    batch_size: Callable[[], int]
    trials_of: Callable[[Sequence[str]], list[Trial]]
    on_batch: Callable[[list[Trial]], None]
    error: BaseException | None = field(default=None)


@derived_object
class FlatSearch(PySearchStrategy):  # type: ignore[misc]
    """First the starts, then what the model ranks highest, with a share of random draws.

    Parameters
    ----------
    candidates : Candidates
        Where to draw from.
    starts : sequence of choices
        Measured first, in order; the untuned default leads.
    known : sequence of Trial
        Measured before; not measured again.
    seed : int
        Two searches with one seed and the same times propose the same candidates.
    progress : Progress
        The world.
    """

    def __init__(
        self,
        candidates: Candidates,
        starts: Sequence[Choices],
        known: Sequence[Trial],
        seed: int,
        progress: Progress,
    ) -> None:
        self.candidates = candidates
        self.starts = list(starts)
        self.trials = {each.key: each for each in known}
        self.random = np.random.default_rng(seed)
        self.progress = progress
        self.context: Any = None
        self.model: Any = None
        self.base = stand_in()

    def _initialize_with_tune_context(self, context: Any) -> None:
        self.context = context

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: Any,
        database: Any = None,
        cost_model: Any = None,
    ) -> None:
        """Take the cost model, and teach it what is known."""
        del max_trials, num_trials_per_iter, design_spaces, database
        self.model = cost_model
        timed = [each for each in self.trials.values() if each.latency_us is not None]
        if timed:
            results = [ms.runner.RunnerResult([each.median_us / 1e6], None) for each in timed]
            self.model.update(self.context, [self.wrap(each.choices) for each in timed], results)

    def post_tuning(self) -> None:
        """Nothing is held."""

    def generate_measure_candidates(self) -> list[Any] | None:
        """Return the next batch; None ends the search."""
        try:
            count = 0 if self.progress.error is not None else self.progress.batch_size()
            batch = self.propose(count)
        except BaseException as error:  # noqa: BLE001, raised again by whoever started the search
            self.progress.error = error
            return None
        return [self.wrap(each) for each in batch] or None

    def notify_runner_results(self, measure_candidates: Any, results: Any) -> None:
        """Learn what became of a batch."""
        del results  # without their reasons
        try:
            keys = [choices_key(choices_of(each.sch.mod)) for each in measure_candidates]
            batch = self.progress.trials_of(keys)
            done = [each for each in batch if each.reason != "interrupted"]
            self.trials.update({each.key: each for each in done})
            self.progress.on_batch(done)
        except BaseException as error:  # noqa: BLE001, raised again by whoever started the search
            self.progress.error = error

    def clone(self) -> Any:
        """Return the same search: its state is its own, and one task runs it."""
        return self._outer()  # set by derived_object

    def wrap(self, choices: Choices) -> Any:
        """Return choices as MetaSchedule's candidate."""
        module = self.base.with_attr(CHOICES_ATTRIBUTE, json.dumps(choices))
        return ms.MeasureCandidate(Schedule(module), [])

    def propose(self, count: int) -> list[Choices]:
        """Return up to `count` choice lists that were never measured, the most promising first."""
        chosen: dict[str, Choices] = {}
        while self.starts and len(chosen) < count:
            self._take(self.starts.pop(0), chosen)
        if len(chosen) < count and any(each.latency_us for each in self.trials.values()):
            num_ranked = max(1, round((count - len(chosen)) * (1 - EXPLORE)))
            for choices in self._ranked()[:num_ranked]:
                self._take(choices, chosen)
        for _ in range(20 * count):
            if len(chosen) >= count:
                break
            self._take(self.candidates.draw(self.random), chosen)
        return list(chosen.values())

    def _take(self, choices: Choices, chosen: dict[str, Choices]) -> None:
        key = choices_key(choices)
        if key not in self.trials:
            chosen.setdefault(key, choices)

    def _ranked(self) -> list[Choices]:
        """Return new candidates, by the model's prediction."""
        timed = [each for each in self.trials.values() if each.latency_us is not None]
        parents = sorted(timed, key=lambda each: (each.median_us, each.key))[:NUM_PARENTS]
        pool: dict[str, Choices] = {}
        for _ in range(NUM_DRAWN):
            self._take(self.candidates.draw(self.random), pool)
        for index in range(NUM_VARIED):
            parent = parents[index % len(parents)].choices
            self._take(self.candidates.vary(parent, self.random), pool)
        choices = list(pool.values())
        if not choices:
            return []
        scores = self.model.predict(self.context, [self.wrap(each) for each in choices])
        order = np.argsort(-np.asarray(scores), kind="stable")
        return [choices[i] for i in order]
