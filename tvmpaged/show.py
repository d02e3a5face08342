"""What ``tvmpaged show`` tells: the artifacts of bundles, or the records, and whether they hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tvmpaged import records
from tvmpaged.bundle import Artifact, Folder, scan, search
from tvmpaged.recorded import state_of
from tvmpaged.sm import Resources, limits, occupancy

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One artifact or record.

    Parameters
    ----------
    place : str
        The folder, with where it was named.
    target, spec : str
        Which case.
    kind : str
        ``tuned``, ``default``, ``generic``; of a record ``record``.
    median_us : float or None
        Median time in microseconds.
    measured_on : str or None
        The device of that time.
    num_threads : int or None
        The threads of that time.
    state : str
        ``current``, ``stale`` or ``tuned elsewhere``; see `tvmpaged.freshness`.
    record_id, sha256 : str or None
        Which record, which file.
    roof_fraction : float or None
        Of a record: the winner's rate by that of the roof that was measured beside it.
    resources : Resources or None
        Of a GPU's artifact: what its kernel takes.
    occupancy : float or None
        Of a GPU's artifact: the share of a multiprocessor's threads that can be resident.
    """

    place: str
    target: str
    spec: str
    kind: str
    median_us: float | None
    measured_on: str | None
    num_threads: int | None
    state: str
    record_id: str | None = None
    sha256: str | None = None
    roof_fraction: float | None = None
    resources: Resources | None = None
    occupancy: float | None = None


@dataclass(frozen=True)
class Problem:
    """A folder or a record that cannot be used, and why."""

    place: str
    reason: str


def show_bundles(bundle: Path | None = None) -> tuple[list[Row], list[Problem]]:
    """Return the artifacts of a bundle, or of all on the search path, and what cannot be used."""
    folders = search() if bundle is None else scan(bundle)
    rows, problems = [], []
    for folder in folders:
        if folder.manifest is None:
            problems.append(Problem(_place(folder), folder.problem))
            continue
        rows += [_artifact_row(folder, each) for each in folder.manifest.artifacts]
    return rows, problems


def show_records(folder: Path) -> tuple[list[Row], list[Problem]]:
    """Return the records in a folder, and those that cannot be read."""
    found, problems = records.load_all(folder)
    rows = [
        Row(
            place=str(folder),
            target=str(each.target),
            spec=str(each.spec),
            kind="record",
            median_us=each.median_us,
            measured_on=each.device,
            num_threads=each.num_threads,
            state=state_of(each),
            record_id=each.record_id,
            roof_fraction=each.roof_fraction,
        )
        for each in found
    ]
    return rows, [Problem(str(path), reason) for path, reason in problems.items()]


def _artifact_row(folder: Folder, artifact: Artifact) -> Row:
    assert folder.target is not None
    return Row(
        place=_place(folder),
        target=str(folder.target),
        spec=str(artifact.spec),
        kind=artifact.kind,
        median_us=artifact.measured_us,
        measured_on=artifact.measured_on,
        num_threads=artifact.num_threads,
        state=artifact.state(folder.target),
        record_id=artifact.record_id,
        sha256=artifact.sha256,
        resources=artifact.resources,
        occupancy=_occupancy(folder, artifact),
    )


def _occupancy(folder: Folder, artifact: Artifact) -> float | None:
    threads = artifact.choices.get("threads")
    if artifact.resources is None or folder.target is None or not isinstance(threads, int):
        return None
    return occupancy(limits(folder.target.arch)[0], threads, artifact.resources)


def _place(folder: Folder) -> str:
    return f"{folder.path} [{folder.source}]"
