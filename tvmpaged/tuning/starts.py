"""What a search of a spec begins with, whatever measures it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tvmpaged import records, schedules
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.trial import Choices, Trial

#: Specs whose winners are tried right after the default.
NUM_NEIGHBOURS = 3


def spec_seed(seed: int, spec: AttentionSpec) -> int:
    """Return the seed of one spec's proposals and inputs under a command's seed."""
    return int.from_bytes(hashlib.sha256(f"{seed} {spec}".encode()).digest()[:4])


def default_start(spec: AttentionSpec, target: TargetKey) -> Choices:
    """Return the untuned default, its options in the space's order."""
    choices = schedules.default_choices(spec, target)
    return {name: choices[name] for name in schedules.space(spec, target)}


def neighbours(spec: AttentionSpec, target: TargetKey, work_dir: Path) -> list[Choices]:
    """Return what won for similar specs, the most similar first."""
    space = schedules.space(spec, target)
    known, _ = records.load_all(work_dir, target)  # what cannot be read is not this spec's business
    others = [each for each in known if each.spec.kernel == spec.kernel and each.spec != spec]
    fitting = [each for each in others if may_be_tried(spec, target, each.choices)]
    nearest = sorted(fitting, key=lambda each: (_distance(each.spec, spec), str(each.spec)))
    return [{name: each.choices[name] for name in space} for each in nearest[:NUM_NEIGHBOURS]]


def credible(spec: AttentionSpec, target: TargetKey, trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials of a log whose choices are ones that a search of the spec may try."""
    return [each for each in trials if may_be_tried(spec, target, each.choices)]


def may_be_tried(spec: AttentionSpec, target: TargetKey, choices: Choices) -> bool:
    """Whether a choice list from a file is one of the space, and legal."""
    return why_not_tried(spec, target, choices) is None


def why_not_tried(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    """Return why no search would try a choice list from a file; None when one may."""
    space = schedules.space(spec, target)
    if choices.keys() != space.keys():
        return "its options are not those of the space"
    for name, values in space.items():
        if choices[name] not in values:
            return f"{name}={choices[name]!r} is not in the space; allowed: {list(values)}"
    return schedules.reject(spec, target, choices)


def _distance(one: AttentionSpec, other: AttentionSpec) -> int:
    names = ("q_dtype", "kv_dtype", "head_dim", "head_dim_v", "block_size", "group_size", "layout")
    return sum(getattr(one, name) != getattr(other, name) for name in names)
