"""Records: what a search found, as plain data: ``<work_dir>/<target>/<spec>/record.json``.

Read them with `load` and `load_all`, never by hand. Choices rebuild the artifact without any
database; everything else says what the measured times hold for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tvmpaged.files import replace_file
from tvmpaged.spec import AttentionSpec, TargetKey

SCHEMA_VERSION = 2
#: What a record of an earlier schema did not know.
_UNKNOWN_IN_1 = ("roof_gb_per_s", "roof_gflop_per_s", "roof_fraction", "gpu")
RECORD_NAME = "record.json"


@dataclass(frozen=True)
class Latency:
    """What calls took.

    Parameters
    ----------
    median, p10, p90 : float
        Of the undisturbed calls, microseconds.
    repeats : int
        How many those were.
    disturbed : int
        Calls during which a thread had to wait for a core; they were set aside, unless all were.
    """

    median: float
    p10: float
    p90: float
    repeats: int
    disturbed: int = 0

    @property
    def is_doubtful(self) -> bool:
        """Whether more calls were disturbed than counted: the machine was busy."""
        return self.disturbed > self.repeats

    @classmethod
    def of(cls, times_us: Sequence[float], disturbed: int = 0) -> Latency:
        """Summarise times in microseconds."""
        median, p10, p90 = (round(float(np.percentile(times_us, p)), 3) for p in (50, 10, 90))
        return cls(median, p10, p90, len(times_us), disturbed)

    @classmethod
    def read(cls, data: dict[str, Any]) -> Latency:
        """Read back plain data.

        Raises
        ------
        TypeError, ValueError
            When it is no latency, or its times are not all finite and above 0.
        """
        found = cls(**data)
        for us in (found.median, found.p10, found.p90):
            if not 0 < us < float("inf"):
                raise ValueError(f"{us} us is no time")
        return found

    def scaled(self, factor: float) -> Latency:
        """Return the times multiplied with a factor."""
        median, p10, p90 = (round(us * factor, 3) for us in (self.median, self.p10, self.p90))
        return replace(self, median=median, p10=p10, p90=p90)


@dataclass(frozen=True)
class Record:
    """The choices that won for a spec on a target.

    Parameters
    ----------
    spec, target
        For what.
    choices : dict
        Option -> value.
    is_default : bool
        Whether the untuned default won (ties go to it).
    source_sha256 : str
        Of the kernel and schedule sources; with others the record is *stale*.
    tvm, tvm_ffi : str
        Versions it was compiled with.
    device : str
        What it was measured on.
    num_threads : int
        Threads it was measured with; elsewhere or with others it is *tuned elsewhere*.
    caches_bytes : dict
        The device's caches.
    rotation_bytes : int
        K and V that were read before the same were read again.
    latency_us, default_latency_us : Latency
        Of these choices and of the untuned default, timed in turns in one run.
    speedup : float
        The default's time by the winner's: the least of the medians' ratio, that of the tenth
        percentiles, and the median of the undisturbed rounds' ratios.
    gb_per_s, gflop_per_s : float or None
        What bounds the kernel: bytes of K and V read (decode) or operations (prefill), per second.
    roof_gb_per_s, roof_gflop_per_s : float or None
        The same of this machine's measured roof, see `tvmpaged.roofs`; None when it is not known.
        Measured in turns with the winner, and given by the winner's rate and `roof_fraction`.
    roof_fraction : float or None
        The winner's rate by the roof's, timed in turns.
    gpu : dict or None
        Of a GPU: driver, clocks and power state while it was measured.
    workload : dict
        What was measured on.
    trials : int
        Candidates tried, failures included.
    failures : dict
        Reason -> how many.
    seed : int
        Of the search.
    mlflow_run_id : str or None
        Of the run that found it.
    created_at : str
        UTC, ISO 8601.
    record_id : str
        Derived from all of the above.
    """

    spec: AttentionSpec
    target: TargetKey
    choices: dict[str, int | str]
    is_default: bool
    source_sha256: str
    tvm: str
    tvm_ffi: str
    device: str
    num_threads: int
    caches_bytes: dict[str, int]
    rotation_bytes: int
    latency_us: Latency
    default_latency_us: Latency
    speedup: float
    gb_per_s: float | None
    gflop_per_s: float | None
    roof_gb_per_s: float | None
    roof_gflop_per_s: float | None
    roof_fraction: float | None
    gpu: dict[str, str] | None
    workload: dict[str, Any]
    trials: int
    failures: dict[str, int]
    seed: int
    mlflow_run_id: str | None
    created_at: str
    record_id: str = field(default="")

    def __post_init__(self) -> None:
        if not self.record_id:
            text = json.dumps(self._plain(), sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            object.__setattr__(self, "record_id", digest)

    @property
    def median_us(self) -> float:
        """Median time in microseconds."""
        return self.latency_us.median

    def _plain(self) -> dict[str, Any]:
        data = asdict(self)
        return data | {"spec": str(self.spec), "target": str(self.target)}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {"schema_version": SCHEMA_VERSION, **self._plain()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Read back what `as_dict` gave.

        Raises
        ------
        AttributeError, TypeError, ValueError
            When a field is missing or of another kind, the schema is another one, or the content is
            not what the record's id was derived from.
        """
        version = data.get("schema_version")
        if version == 1:
            data = dict.fromkeys(_UNKNOWN_IN_1) | data
        elif version != SCHEMA_VERSION:
            raise ValueError(f"schema version {version}, not {SCHEMA_VERSION}")
        if missing := [each.name for each in fields(cls) if each.name not in data]:
            raise ValueError(f"{', '.join(missing)} missing")
        values = {each.name: data[each.name] for each in fields(cls)}
        values |= {
            "spec": AttentionSpec.parse(data["spec"]),
            "target": TargetKey.parse(data["target"]),
            "choices": dict(data["choices"]),
            "latency_us": Latency.read(data["latency_us"]),
            "default_latency_us": Latency.read(data["default_latency_us"]),
        }
        if version == SCHEMA_VERSION:  # an earlier one's id is of fewer fields
            values["record_id"] = ""
        record = cls(**values)
        if record.record_id != data["record_id"]:
            raise ValueError(
                f"it was changed after it was written: its record_id is {data['record_id']!r}, "
                f"and what it holds has {record.record_id!r}"
            )
        return record


def folder(root: Path, target: TargetKey, spec: AttentionSpec) -> Path:
    """Return where the record and the log of a spec on a target lie."""
    return root / str(target) / str(spec)


def load(root: Path, target: TargetKey, spec: AttentionSpec) -> Record | None:
    """Return the record of a spec on a target, or None when there is none.

    Raises
    ------
    ValueError
        When the file is there and is no record of exactly this spec and target.
    """
    path = folder(root, target, spec) / RECORD_NAME
    try:
        record = Record.from_dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is no record: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record: {type(error).__name__}: {error}") from error
    if (record.spec, record.target) != (spec, target):
        raise ValueError(f"{path} is the record of {record.spec} for {record.target}")
    return record


def load_all(root: Path, target: TargetKey | None = None) -> tuple[list[Record], dict[Path, str]]:
    """Return the records under a folder, in order, and why others cannot be read.

    Parameters
    ----------
    root : Path
        Holds ``<target>/<spec>/``.
    target : TargetKey, optional
        Only its records.

    Returns
    -------
    found : list of Record
        In the order of their folders' names.
    problems : dict
        File -> what is wrong with it: one that is broken takes no other with it.
    """
    found, problems = [], {}
    for path in sorted((root if target is None else root / str(target)).rglob(RECORD_NAME)):
        parts = path.relative_to(root).parts
        try:
            of = TargetKey.parse("/".join(parts[:-2])), AttentionSpec.parse(path.parent.name)
            record = load(root, *of)
        except ValueError as error:
            problems[path] = str(error)
        else:
            found += [record] if record is not None else []
    return found, problems


def specs(root: Path, target: TargetKey) -> list[AttentionSpec]:
    """Return the specs that have a record for a target, whether or not it can be read.

    Raises
    ------
    ValueError
        When a record lies in a folder that names no spec.
    """
    found = (root / str(target)).glob(f"*/{RECORD_NAME}")
    return [AttentionSpec.parse(path.parent.name) for path in sorted(found)]


def save(root: Path, record: Record) -> Path:
    """Write a record so that a reader sees the old one or the new one, whole; return its path."""
    path = folder(root, record.target, record.spec) / RECORD_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(record.as_dict(), indent=2) + "\n").encode())
    return path
