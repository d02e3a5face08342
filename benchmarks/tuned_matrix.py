"""A matrix of tuned specs: how any choice list compares with what was tuned for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tvmpaged import schedules
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.machine import Machine, failed, latencies
from tvmpaged.tuning.trial import Choices, choices_key
from tvmpaged.tuning.workload import Workload

#: Lists that are compiled at a time.
BATCH = 8


@dataclass
class Matrix:
    """Tuned specs, and how lists compare with what was tuned.

    Parameters
    ----------
    machine, target, records
        The specs' records, and what compiles and measures.
    seconds : float
        For which a list is timed on a spec.
    seed : int
        Of the values measured on.
    lists : dict
        Key -> choices, of all that were timed on any spec.
    ratios : dict
        (spec, key) -> the list's time by that of the spec's winner; infinite where it failed.
    """

    machine: Machine
    target: TargetKey
    records: dict[AttentionSpec, Record]
    seconds: float = 0.3
    seed: int = 0
    lists: dict[str, Choices] = field(default_factory=dict)
    ratios: dict[tuple[AttentionSpec, str], float] = field(default_factory=dict)
    _merges: dict[str, Path] = field(default_factory=dict)
    _least: dict[AttentionSpec, float] = field(default_factory=dict)

    def rebuild(self) -> dict[AttentionSpec, float]:
        """Compile, check and time each winner beside itself: what equal kernels differ by."""
        for dtype in {spec.out_dtype for spec in self.records}:
            merge = AttentionSpec.make("merge", dtype)
            choices = schedules.default_choices(merge, self.target)
            self._compile(merge, [choices])
            self._merges[dtype] = self.machine.path(merge, choices_key(choices))
        found = {}
        for spec, record in self.records.items():
            self._compile(spec, [record.choices])
            found[spec], _ = self.compare(spec, record.choices, self.seconds)
            if found[spec] == float("inf"):
                raise SystemExit(f"{spec}: record {record.record_id} cannot be run")
        return found

    def compare(self, spec: AttentionSpec, choices: Choices, seconds: float) -> tuple[float, bool]:
        """Return a compiled list's time by the winner's, and whether the machine was too busy.

        The list stands first: times that are in doubt then speak for it.
        """
        record = self.records[spec]
        answer = self.machine.measure(
            spec,
            Workload.from_dict(record.workload),
            self._merges[spec.out_dtype],
            [choices, record.choices],
            rotation_bytes=record.rotation_bytes,
            seed=self.seed,
            min_seconds=seconds,
            max_seconds=2 * seconds,
        )
        if failed(choices, answer, "run"):
            return float("inf"), False
        doubtful = any(each.is_doubtful for each in latencies(answer))
        return float(answer.reply["samples"][-1]["speedup"]), doubtful

    def race(self, specs: Sequence[AttentionSpec], lists: Sequence[Choices], slack: float) -> None:
        """Time lists on specs, each until it is worse than the best by more than `slack`."""
        for begin in range(0, len(lists), BATCH):
            batch = list(lists[begin : begin + BATCH])
            for spec in specs:
                self._time(spec, batch)
                ranking = self.ranking(specs)
                limit = slack * self.bound(specs, ranking[0]) if ranking else float("inf")
                batch = [each for each in batch if self.bound(specs, each) <= limit]

    def bound(self, specs: Sequence[AttentionSpec], choices: Choices) -> float:
        """Return a list's mean; where it was not timed it counts as the best that was."""
        key = choices_key(choices)
        return geomean(self.ratios.get((each, key), self._least.get(each, 1.0)) for each in specs)

    def ranking(self, specs: Sequence[AttentionSpec]) -> list[Choices]:
        """Return the lists that were timed on all specs and failed on none, the best first."""
        means = {
            key: geomean(self.ratios.get((each, key), float("inf")) for each in specs)
            for key in self.lists
        }
        whole = [key for key, mean in means.items() if mean < float("inf")]
        return [self.lists[key] for key in sorted(whole, key=lambda key: means[key])]

    def _time(self, spec: AttentionSpec, lists: Sequence[Choices]) -> None:
        new = {choices_key(each): each for each in lists}
        new = {key: each for key, each in new.items() if (spec, key) not in self.ratios}
        self.lists |= new
        own = choices_key(self.records[spec].choices)
        broken = self._compile(
            spec, [each for key, each in new.items() if key != own], strict=False
        )
        for key, each in new.items():
            ratio = 1.0 if key == own else float("inf")
            if key != own and key not in broken:
                ratio, _ = self.compare(spec, each, self.seconds)
            self.ratios[spec, key] = ratio
            self._least[spec] = min(ratio, self._least.get(spec, 1.0))

    def _compile(
        self, spec: AttentionSpec, lists: Sequence[Choices], *, strict: bool = True
    ) -> set[str]:
        """Compile lists; return the keys of those that cannot be."""
        answers = self.machine.compile(spec, self.target, lists)
        found = [failed(*each, "compile") for each in zip(lists, answers, strict=True)]
        failures = [each for each in found if each]
        if strict and failures:
            raise SystemExit(f"{spec} cannot be compiled: {failures[0].detail}")
        return {each.key for each in failures}


def geomean(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(list(ratios)))))
