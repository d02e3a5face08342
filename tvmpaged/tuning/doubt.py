"""Whether what came of measuring an export can be believed, one answer by itself and all together.

A verdict is never taken over. Times are summarised and candidates compared again from the calls'
own times, and an answer that calls a candidate right must bring the errors that show it. Numbers
that agree with each other can still be made up: nothing here proves where they came from.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from tvmpaged.bundle import BundleError
from tvmpaged.roofs import CREDIBLE, UNITS, MeasuredRoof
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.export_manifest import Candidate, Export, ExportedSpec
from tvmpaged.tuning.limits import limits
from tvmpaged.tuning.results import PHASES, Measured, Results
from tvmpaged.tuning.timing import MIN_REPEATS
from tvmpaged.tuning.trial import REASONS

#: Of a measurement: what does not compile is not measured, and an interrupt says nothing.
_REASONS = tuple(each for each in REASONS if each not in ("compile", "interrupted"))
#: How far a speed-up may lie above what the calls' own times allow where most rounds were
#: disturbed: the times are of the least disturbed ones, and it is taken from all of them.
_DISTURBED = 3.0
#: How far the finals may see a candidate ahead of the default and of what its search saw.
_SLACK = 1.5


def check_answers(results: Results, export: Export) -> None:
    """Hold every answer against the export.

    Raises
    ------
    BundleError
        Naming the answer, and what is not as it must be.
    """
    for index, each in enumerate(results.answers):
        why = doubt(each, export)
        if why:
            asked = f"{each.phase} of {' '.join(each.keys)}"
            raise BundleError(f"answer {index} ({each.spec}, {asked}) is not believed: {why}")


def doubt(measured: Measured, export: Export) -> str:
    """Return why an answer is not to be believed; empty when it is.

    Parameters
    ----------
    measured : Measured
        From a file that anyone may have written.
    export : Export
        What was to be measured.
    """
    exported = next((each for each in export.specs if str(each.spec) == measured.spec), None)
    if exported is None:
        return "its spec is not in the export"
    if measured.phase not in PHASES:
        return f"phase {measured.phase!r} is not known"
    found = [exported.find(key) for key in measured.keys]
    candidates = [each for each in found if each is not None]
    if len(candidates) < len(found) or (not found and measured.phase != "roof"):
        return "it names candidates that are not in the export, or none"
    wanted = [each.library.sha256 if each.library else "" for each in candidates]
    if list(measured.sha256s) != wanted:
        return "what was measured has another sha256 than what was exported"
    if measured.reason:
        return "" if measured.reason in _REASONS else f"reason {measured.reason!r} says nothing"
    failure = measured.reply.get("wrong", measured.reply.get("error"))
    if failure is not None:
        return "" if isinstance(failure, str) and failure else "it fails without saying why"
    if measured.phase == "roof":
        return _doubt_roof(measured.reply.get("roof"), exported)
    return _doubt_times(measured.reply, len(candidates)) or _doubt_checks(
        measured.reply, exported, candidates
    )


def _doubt_roof(roof: Any, exported: ExportedSpec) -> str:
    if not isinstance(roof, dict) or not _is_positive(roof.get("value")):
        return "it has no roof above 0"
    name, _ = exported.workload.rate(exported.spec, 1.0)
    if roof.keys() != {each.name for each in fields(MeasuredRoof)} or roof["name"] != name:
        return f"its roof is not name={name!r}, value and fraction alone"
    fraction = roof.get("fraction")
    return "" if fraction is None or _is_positive(fraction) else f"fraction={fraction!r} is none"


def _doubt_times(reply: Mapping[str, Any], count: int) -> str:
    samples = reply.get("samples")
    if not isinstance(samples, list) or len(samples) != count:
        return f"it says that {count} candidates passed, and has no times of each"
    for each in samples:
        times = each.get("times_us") if isinstance(each, dict) else None
        if not isinstance(times, list) or len(times) < MIN_REPEATS:
            return f"a candidate that passed needs at least {MIN_REPEATS} times"
        if not all(_is_positive(us) for us in times):
            return "its times are not all finite and above 0"
        if not isinstance(each.get("disturbed"), int) or each["disturbed"] < 0:
            return f"disturbed={each.get('disturbed')!r} is no count"
        if not _is_positive(each.get("speedup")):
            return f"speedup={each.get('speedup')!r} is no ratio"
    if len({len(each["times_us"]) for each in samples}) > 1:
        return "its candidates were timed in turns, and have different numbers of times"
    if samples[0]["speedup"] != 1.0:
        return "the first candidate is compared with itself, and its speed-up is not 1"
    for each in samples[1:]:
        least, most = _speedups(samples, each)
        if not least <= each["speedup"] <= most:
            return f"speedup={each['speedup']:.3g} is not what its times say"
    return ""


def _speedups(samples: Sequence[Any], sample: Any) -> tuple[float, float]:
    """Return between which bounds a candidate's speed-up over the first one must lie.

    Where most rounds were undisturbed, the times are those of all of these, one of each candidate
    a round, and the speed-up is the median of the rounds' ratios: see `tvmpaged.tuning.timing`.
    Elsewhere it is the least of several, also of rounds whose times are not told; then it may be
    any less than what is told, which helps nobody who makes it up.
    """
    first_us, times_us = samples[0]["times_us"], sample["times_us"]
    disturbed = sum(each["disturbed"] for each in samples)
    if disturbed == 0 or MIN_REPEATS < len(times_us) >= disturbed:
        ratio = statistics.median(a / b for a, b in zip(first_us, times_us, strict=True))
        return ratio * (1 - 1e-6), ratio * (1 + 1e-6)
    return 0.0, max(first_us) / min(times_us) * _DISTURBED


def contradiction(exported: ExportedSpec, answers: Sequence[Measured]) -> str:
    """Return why the finals of a spec cannot be true beside its other answers; empty: they can.

    Parameters
    ----------
    exported : ExportedSpec
        The spec's part of the export.
    answers : sequence of Measured
        Each credible by itself.
    """
    mine = [each for each in answers if each.spec == str(exported.spec)]
    passed = [each for each in mine if "samples" in each.reply]
    searched: dict[str, float] = {}
    for each in passed:
        if each.phase == "search" and len(each.keys) > 1:
            before = searched.get(each.keys[-1], 0.0)
            searched[each.keys[-1]] = max(before, each.reply["samples"][-1]["speedup"])
    roofs = [each.reply["roof"]["value"] for each in mine if "roof" in each.reply]
    for each in passed:
        if each.phase == "finalists":
            medians = [statistics.median(one["times_us"]) for one in each.reply["samples"]]
            ahead = _ahead(each.keys, medians, searched)
            return ahead or _above_roof(exported, each.keys, medians, max(roofs, default=math.inf))
    return ""


def _ahead(keys: Sequence[str], medians: Sequence[float], searched: Mapping[str, float]) -> str:
    for key, us in zip(keys, medians, strict=True):
        speedup, before = medians[0] / us, searched.get(key, math.inf)
        # One that a busy moment of the search made slow may well be as fast as the default.
        if speedup > _SLACK * max(before, 1.0):
            return (
                f"in the finals {key} took {us:.4g} us, {speedup:.3g} times as fast as the "
                f"default, and in its search {before:.3g} times as fast"
            )
    return ""


def _above_roof(
    exported: ExportedSpec, keys: Sequence[str], medians: Sequence[float], roof: float
) -> str:
    """Return which candidate is above the roof; where the default is, too, it is no roof."""
    (name, default), *others = (exported.workload.rate(exported.spec, us) for us in medians)
    if default > CREDIBLE * roof:
        return ""
    for key, (_, rate) in zip(keys[1:], others, strict=True):
        if rate > CREDIBLE * roof:
            return (
                f"in the finals {key} reached {rate:.4g} {UNITS[name]}, and this machine's roof "
                f"was measured at {roof:.4g} {UNITS[name]}"
            )
    return ""


def _doubt_checks(
    reply: Mapping[str, Any], exported: ExportedSpec, candidates: Sequence[Candidate]
) -> str:
    checks = reply.get("checks")
    if not isinstance(checks, list) or len(checks) != len(candidates):
        return f"it says that {len(candidates)} candidates passed, and has no errors of each"
    for candidate, found in zip(candidates, checks, strict=True):
        why = _doubt_errors(exported.spec, candidate, found)
        if why:
            return why
    return ""


def _doubt_errors(spec: AttentionSpec, candidate: Candidate, found: Any) -> str:
    allowed = limits(spec, candidate.choices)
    entries = found if isinstance(found, list) else []
    errors = {each.get("what"): each.get("error") for each in entries if isinstance(each, dict)}
    if errors.keys() != allowed.keys():
        return "its errors are not those of the checks that every candidate must pass"
    for what, limit in allowed.items():
        error: Any = errors[what]
        if not _is_number(error) or not 0 <= error <= limit:
            return f"its error {error!r} of {what!r} is no number up to {limit:.1e}"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0
