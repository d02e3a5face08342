"""What came of measuring an export: every answer with its numbers, and what makes one credible.

A verdict is never taken over. Times are summarised and candidates compared again from the calls'
own times, and an answer that calls a candidate right must bring the errors that show it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from tvmpaged.bundle import BundleError
from tvmpaged.bundle.fields import Fields, load_object, parsed
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.device import Device
from tvmpaged.tuning.export_manifest import (
    RESULTS_NAME,
    Candidate,
    Export,
    ExportedSpec,
    check_version,
)
from tvmpaged.tuning.limits import limits
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.timing import MIN_REPEATS
from tvmpaged.tuning.trial import REASONS, Reason, as_reason

SCHEMA_VERSION = 2
PHASES = ("search", "finalists", "roof")
#: Of a measurement: what does not compile is not measured, and an interrupt says nothing.
_REASONS = tuple(each for each in REASONS if each not in ("compile", "interrupted"))
#: How far a speed-up may lie outside of what the calls' own times allow: those are of the least
#: disturbed rounds, while on a busy machine the speed-up is taken from all rounds.
_SPEEDUP_SLACK = 1.5


@dataclass(frozen=True)
class Measured:
    """One answer of the measuring process.

    Parameters
    ----------
    spec : str
        Of which.
    phase : str
        One of `PHASES`.
    keys, sha256s : tuple of str
        The candidates that were timed in turns, and the digests of what was loaded.
    reply : dict
        The worker's; see `tvmpaged.tuning.measure_worker`. Times in microseconds.
    reason, detail : str
        Why there is no reply, and for a person.
    """

    spec: str
    phase: str
    keys: tuple[str, ...]
    sha256s: tuple[str, ...]
    reply: dict[str, Any]
    reason: Reason | Literal[""] = ""
    detail: str = ""

    @property
    def answer(self) -> Answer:
        """The same as the process gave it."""
        return Answer(self.reply, self.reason, self.detail)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def read(cls, entry: Fields) -> Measured:
        """Read back what `as_dict` gave.

        Raises
        ------
        BundleError
            Naming the field.
        """
        reason = entry.take("reason", str)
        found = cls(
            spec=entry.take("spec", str),
            phase=entry.take("phase", str),
            keys=tuple(entry.take_list("keys", str)),
            sha256s=tuple(entry.take_list("sha256s", str)),
            reply=entry.take("reply", dict),
            reason=parsed(as_reason, reason, f"{entry.where}.reason") if reason else "",
            detail=entry.take("detail", str),
        )
        entry.end()
        return found


@dataclass(frozen=True)
class Results:
    """All answers for an export, measured under one setting.

    Parameters
    ----------
    export_sha256 : str
        Of the export's manifest.
    device : Device
        What it was measured on.
    measured_with : dict
        Package -> version there; for a person who looks for a cause.
    created_at : str
        UTC, ISO 8601.
    answers : tuple of Measured
        In the order they came.
    gpu : dict or None
        What the driver said of the GPU at the end: clocks, power state, other processes.
    """

    export_sha256: str
    device: Device
    measured_with: dict[str, str]
    created_at: str = ""
    answers: tuple[Measured, ...] = ()
    gpu: dict[str, str] | None = None

    def header(self) -> dict[str, Any]:
        """Return what an answer holds for: plain data, the same in every run that may go on."""
        data = asdict(replace(self, answers=()))
        return {name: data[name] for name in ("export_sha256", "device", "measured_with")}


def encode(results: Results) -> bytes:
    """Return the bytes of ``results.json``."""
    data = {
        "schema_version": SCHEMA_VERSION,
        **results.header(),
        "created_at": results.created_at,
        "gpu": results.gpu,
        "answers": [each.as_dict() for each in results.answers],
    }
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def decode(data: bytes, export: Export) -> Results:
    """Read `encode`'s bytes, and hold every answer against the export.

    Raises
    ------
    BundleError
        Naming what is not as it must be.
    """
    top = Fields(load_object(data, RESULTS_NAME), "results")
    check_version(top, SCHEMA_VERSION)
    results = Results(
        export_sha256=top.sha256("export_sha256"),
        device=_read_device(top.fields("device")),
        measured_with=top.take("measured_with", dict),
        created_at=top.take("created_at", str),
        gpu=_read_gpu(top.take("gpu", dict, None)),
        answers=tuple(
            Measured.read(Fields(each, f"results.answers[{index}]"))
            for index, each in enumerate(top.take_list("answers", dict))
        ),
    )
    top.end()
    for index, each in enumerate(results.answers):
        why = doubt(each, export)
        if why:
            asked = f"{each.phase} of {' '.join(each.keys)}"
            raise BundleError(f"answer {index} ({each.spec}, {asked}) is not believed: {why}")
    return results


def _read_gpu(facts: dict[str, Any] | None) -> dict[str, str] | None:
    wrong = [name for name, value in (facts or {}).items() if not isinstance(value, str)]
    if wrong:
        raise BundleError(f"results.gpu.{wrong[0]} must be of type str")
    return facts


def _read_device(entry: Fields) -> Device:
    device = Device(
        name=entry.take("name", str),
        num_threads=entry.take("num_threads", int),
        caches_bytes=entry.take("caches_bytes", dict),
        rotation_bytes=entry.take("rotation_bytes", int),
    )
    entry.end()
    if device.num_threads < 1 or not device.name:
        raise BundleError(f"{entry.where} names no device, or no threads")
    sizes = {f"caches_bytes.{name}": size for name, size in device.caches_bytes.items()}
    for name, size in (sizes | {"rotation_bytes": device.rotation_bytes}).items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BundleError(f"{entry.where}.{name}={size!r} must be bytes, at least 1")
    return device


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
        if not _allows(samples[0]["times_us"], times, each["speedup"]):
            return f"speedup={each['speedup']:.3g} is not what its times say"
    if samples[0]["speedup"] != 1.0:
        return "the first candidate is compared with itself, and its speed-up is not 1"
    return ""


def _allows(first_us: Sequence[float], times_us: Sequence[float], speedup: float) -> bool:
    least, most = min(first_us) / max(times_us), max(first_us) / min(times_us)
    return least / _SPEEDUP_SLACK <= speedup <= most * _SPEEDUP_SLACK


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
