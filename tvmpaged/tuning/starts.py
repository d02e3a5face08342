"""What a search of a spec begins with, whatever measures it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tvmpaged import records, schedules
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.trial import Choices

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
    found: list[tuple[int, str, Choices]] = []
    try:
        for each in records.load_all(work_dir, target):
            if each.choices.keys() != space.keys():
                continue
            choices: Choices = {name: each.choices[name] for name in space}
            fits = all(choices[name] in values for name, values in space.items())
            other = each.spec.kernel == spec.kernel and each.spec != spec
            if fits and other and schedules.reject(spec, target, choices) is None:
                found.append((_distance(each.spec, spec), str(each.spec), choices))
    except ValueError:
        return []  # a record that cannot be read is not this spec's business
    nearest = sorted(found, key=lambda each: each[:2])
    return [choices for _, _, choices in nearest][:NUM_NEIGHBOURS]


def _distance(one: AttentionSpec, other: AttentionSpec) -> int:
    names = ("q_dtype", "kv_dtype", "head_dim", "head_dim_v", "block_size", "group_size", "layout")
    return sum(getattr(one, name) != getattr(other, name) for name in names)
