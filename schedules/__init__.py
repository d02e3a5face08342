"""HOW the programs are laid on a machine: choices as data, and the schedules that apply them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvmpaged.schedules import cpu_choices, cpu_rules, cuda_choices, cuda_rules
from tvmpaged.schedules.choices import Choices

if TYPE_CHECKING:
    from tvm.s_tir import Schedule

    from tvmpaged.spec import AttentionSpec, TargetKey

__all__ = ["Choices", "default_choices", "reject", "schedule", "space"]


def default_choices(spec: AttentionSpec, target: TargetKey) -> Choices:
    """Return a spec's untuned default: vectorised, all threads, no search behind it."""
    if target.kind == "cuda":
        return cuda_choices.default_choices(spec)
    return cpu_choices.default_choices(spec, target)


def space(spec: AttentionSpec, target: TargetKey) -> dict[str, tuple[Any, ...]]:
    """Return the open list: each option's values, those of the untuned default among them."""
    if target.kind == "cuda":
        return cuda_choices.space(spec)
    return cpu_choices.space(spec, target)


def reject(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    """Return why a choice list cannot be built or cannot win; None when it may be tried."""
    if target.kind == "cuda":
        return cuda_rules.reject(spec, target, choices)
    return cpu_rules.reject(spec, target, choices)


def schedule(sch: Schedule, spec: AttentionSpec, target: TargetKey) -> None:
    """Lay a program out for a target, in place.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        Holds the program of ``kernel(spec, choices)``.
    spec : AttentionSpec
        The case.
    target : TargetKey
        What it is laid out for.
    """
    from tvmpaged.schedules import cpu, cuda

    if target.kind == "cuda":
        cuda.schedule(sch, spec)
    else:
        cpu.schedule(sch, spec)
