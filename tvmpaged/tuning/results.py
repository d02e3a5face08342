"""What came of measuring an export: every answer with its numbers, as the device gave it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tvmpaged.bundle import BundleError
from tvmpaged.bundle.fields import Fields, load_object, parsed
from tvmpaged.tuning.device import Device
from tvmpaged.tuning.export_manifest import RESULTS_NAME, check_version
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.trial import Reason, as_reason

SCHEMA_VERSION = 2
PHASES = ("search", "finalists", "roof")


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
    def question(self) -> tuple[str, str, tuple[str, ...]]:
        """What was asked: of which spec, for what, of which candidates."""
        return self.spec, self.phase, self.keys

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


def decode(data: bytes) -> Results:
    """Read `encode`'s bytes; whether they are to be believed is for `tvmpaged.tuning.doubt`.

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
