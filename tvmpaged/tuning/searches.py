"""The searches that a ``tuning_logs`` folder holds, and what a run of each holds on a server."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tvmpaged import records
from tvmpaged.records import RECORD_NAME, Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning import tracking
from tvmpaged.tuning.log import LOG_NAME, Search, read_searches
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.summary import SUMMARY_NAME
from tvmpaged.tuning.tracking import Point, short
from tvmpaged.tuning.workload import Workload


def log_folders(root: Path) -> list[tuple[Path, TargetKey, AttentionSpec]]:
    """Return the folders below `root` that hold a log or a record, with what they are for.

    Raises
    ------
    FileNotFoundError
        When there is no such folder.
    ValueError
        When a folder names no target and spec.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"dir={str(root)!r} is no folder")
    found = {each.parent for name in (LOG_NAME, RECORD_NAME) for each in root.rglob(name)}
    return [
        (
            each,
            TargetKey.parse("/".join(each.relative_to(root).parts[:-1])),
            AttentionSpec.parse(each.name),
        )
        for each in sorted(found)
    ]


@dataclass(frozen=True)
class Wanted:
    """What a run is to hold.

    Parameters
    ----------
    key : str
        From `search_key`.
    params, tags, points, files
        See `tvmpaged.tuning.tracking`.
    status : str
        ``FINISHED`` with a record, ``KILLED`` without.
    """

    key: str
    params: dict[str, Any]
    tags: dict[str, str]
    points: list[Point]
    files: list[Path]
    status: str

    @classmethod
    def of(
        cls,
        folder: Path,
        target: TargetKey,
        spec: AttentionSpec,
        search: Search,
        record: Record | None,
    ) -> Wanted:
        """Return what the run of a search holds."""
        workload = Workload.from_dict(search.setting["workload"])
        params = tracking.spec_params(spec, target, search.setting, search.seed)
        trials = list(search.trials.values())
        points = list(
            tracking.trial_points(
                trials[: search.begin],
                trials[search.begin :],
                lambda latency_us: workload.rate(spec, latency_us),
            )
        )
        tags: dict[str, str] = {}
        files = [folder / LOG_NAME]
        if record is not None:
            params |= tracking.winner_params(record)
            tags |= tracking.winner_tags(record)
            points += tracking.winner_points(record)
            files += [folder / RECORD_NAME, folder / SUMMARY_NAME]
        status = "KILLED" if record is None else "FINISHED"
        return cls(
            key=search_key(target, spec, search),
            params=params,
            tags={name: short(value) for name, value in tags.items()},
            points=points,
            files=[each for each in files if each.exists()],
            status=status,
        )

    def counts(self) -> dict[str, int]:
        """Return how much that is."""
        return {
            "params": len(self.params),
            "tags": len(self.tags),
            "metrics": len(self.points),
            "files": len(self.files),
        }


def folder_searches(
    folder: Path, target: TargetKey, spec: AttentionSpec
) -> list[tuple[Search, Record | None]]:
    """Return the searches of a folder that found something, the record with the one it is of.

    Raises
    ------
    ValueError
        When the record is none.
    """
    root = folder.parents[len(str(target).split("/"))]
    record = records.load(root, target, spec)
    searches = read_searches(folder / LOG_NAME)
    owner = None if record is None else _owner(record, searches)
    if record is not None and owner is None:
        setting = {each.name: getattr(record, each.name) for each in fields(Setting)}
        owner = Search("", setting, record.seed)
        owner.mlflow_run_id, owner.record_id = record.mlflow_run_id, record.record_id
        searches.append(owner)
    return [
        (each, record if each is owner else None)
        for each in searches
        if each is owner or len(each.trials) > each.begin
    ]


def _owner(record: Record, searches: list[Search]) -> Search | None:
    for each in reversed(searches):
        if each.record_id == record.record_id:
            return each
    # Logs of before their end was written down.
    for each in reversed(searches):
        sources = each.setting.get("source_sha256")
        same = (each.mlflow_run_id, sources) == (record.mlflow_run_id, record.source_sha256)
        if same and each.record_id is None:
            return each
    return None


def search_key(target: TargetKey, spec: AttentionSpec, search: Search) -> str:
    """Return what names a search on any server: it does not change when the search goes on."""
    own = list(search.trials.values())[search.begin :]
    first = own[0].as_dict() if own else search.record_id
    text = json.dumps([str(target), str(spec), search.setting, first], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
