"""What a record makes of the artifact that is built from its choices, and what it is worth here."""

from __future__ import annotations

from dataclasses import replace

from tvmpaged.bundle import Artifact
from tvmpaged.freshness import STALE, device_here, freshness
from tvmpaged.records import Record


def with_record(artifact: Artifact, record: Record) -> Artifact:
    """Return an artifact of the record's choices with what the record says of it."""
    fresh = record.source_sha256 == artifact.source_sha256
    return replace(
        artifact,
        kind="tuned",
        record_id=record.record_id,
        mlflow_run_id=record.mlflow_run_id,
        # Other sources make another program of the same choices: its time is not known.
        measured_us=record.median_us if fresh else None,
        measured_on=record.device if fresh else None,
        num_threads=record.num_threads if fresh else None,
    )


def state_of(record: Record) -> str:
    """Return ``current``, ``stale`` or ``tuned elsewhere``."""
    return freshness(record.target, record.source_sha256, record.device, record.num_threads)


def note_on(record: Record) -> str:
    """Return what a person should know of a record that is not current."""
    if state_of(record) == STALE:
        return (
            f"{record.spec}: the record is stale: its choices were found with other kernel "
            "sources, and what it measured is left out; tune again"
        )
    unit = "threads" if record.target.kind == "cpu" else "multiprocessors"
    name, threads = device_here(record.target)
    here = f"this machine is {name} with {threads}" if name else "no such GPU is here"
    return (
        f"{record.spec}: the record was tuned elsewhere: on {record.device} with "
        f"{record.num_threads} {unit}; {here}"
    )
