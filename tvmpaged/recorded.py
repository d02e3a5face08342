"""Reading what a search found: ``<records>/<target>/<spec>/record.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmpaged.spec import AttentionSpec, TargetKey

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Record:
    """Choices and their measured time, as far as packaging needs them; times in microseconds."""

    spec: AttentionSpec
    target: TargetKey
    choices: dict[str, int | str]
    source_sha256: str
    record_id: str | None
    mlflow_run_id: str | None
    median_us: float | None
    device: str | None
    num_threads: int | None


def read_record(folder: Path, target: TargetKey, spec: AttentionSpec) -> Record | None:
    """Return the record of a spec for a target, or None when there is none.

    Raises
    ------
    ValueError
        When the file is there and is no record of exactly this spec and target.
    """
    path = folder / str(target) / str(spec) / "record.json"
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        if data["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {data['schema_version']}, not {SCHEMA_VERSION}")
        record = Record(
            spec=AttentionSpec.parse(data["spec"]),
            target=TargetKey.parse(data["target"]),
            choices=dict(data["choices"]),
            source_sha256=data["source_sha256"],
            record_id=data.get("record_id"),
            mlflow_run_id=data.get("mlflow_run_id"),
            median_us=(data.get("latency_us") or {}).get("median"),
            device=data.get("device"),
            num_threads=data.get("num_threads"),
        )
    except FileNotFoundError:
        return None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no record: {type(error).__name__}: {error}") from error
    if (record.spec, record.target) != (spec, target):
        raise ValueError(f"{path} is the record of {record.spec} for {record.target}")
    return record


def all_records(folder: Path, target: TargetKey | None = None) -> Iterator[Record]:
    """Yield the records in a folder, in order; of one target or of all.

    Raises
    ------
    ValueError
        As `read_record`.
    """
    for path in sorted(folder.rglob("record.json")):
        parts = path.relative_to(folder).parts
        found = TargetKey.parse("/".join(parts[:-2]))
        if target in (None, found):
            record = read_record(folder, found, AttentionSpec.parse(parts[-2]))
            if record is not None:
                yield record
