"""HOW the programs are laid on a machine: choices as data, and the schedules that apply them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvmpaged.schedules.choices import default_choices, space
from tvmpaged.schedules.rules import Choices, reject

if TYPE_CHECKING:
    from tvm.s_tir import Schedule

    from tvmpaged.spec import AttentionSpec, TargetKey

__all__ = ["Choices", "default_choices", "reject", "schedule", "space"]


def schedule(
    sch: Schedule, spec: AttentionSpec, choices: dict[str, Any], target: TargetKey
) -> None:
    """Lay a program out for a target, in place.

    Parameters
    ----------
    sch : tvm.s_tir.Schedule
        Holds the program of ``kernel(spec, choices)``.
    spec : AttentionSpec
        The case.
    choices : dict
        The options.
    target : TargetKey
        What it is laid out for.

    Raises
    ------
    ValueError
        When no schedule exists for the target's kind.
    """
    if target.kind != "cpu":
        raise ValueError(f"target {target} has no schedules yet; allowed: cpu/<microarchitecture>")
    from tvmpaged.schedules import cpu

    cpu.schedule(sch, spec, choices)
