"""What ``tvmpaged mlflow-sync`` does: upload what a tracking server missed of a folder of logs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvmpaged.errors import UserError
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning import tracking
from tvmpaged.tuning.log import Search, open_log
from tvmpaged.tuning.orphans import WRITER_TAG, close_orphans, writer
from tvmpaged.tuning.searches import Wanted, folder_searches, log_folders
from tvmpaged.tuning.tracking import PARENT_TAG, Tracking, answering, connect

SCHEMA_VERSION = 1

#: What a run is found by when the log does not name it.
SEARCH_TAG = "tvmpaged.search"
#: How a search may have ended that has no record.
_OVER = ("FAILED", "KILLED")

#: Called with how many are done, and the last one's name.
Progress = Callable[[int, str], None]


@dataclass(frozen=True)
class Synced:
    """What became of one search.

    Parameters
    ----------
    target, spec : str
        Which; with what failed as a whole, the folder's.
    run_id : str or None
        On the server.
    state : str
        ``complete`` (nothing was missing), ``uploaded``, ``missing`` (a dry run would have uploaded
        it), ``deleted`` (somebody deleted its run, so it stays away) or ``failed``.
    added : dict
        What was missing: ``params``, ``tags``, ``metrics``, ``files`` -> how many.
    failure : str
        Why it failed.
    """

    target: str
    spec: str
    run_id: str | None
    state: str
    added: dict[str, int]
    failure: str = ""


def sync(
    root: Path,
    uri: str,
    *,
    dry_run: bool = False,
    progress: Progress = lambda _done, _name: None,
) -> list[Synced]:
    """Upload every search below a folder that the server lacks, whole or in part.

    Parameters
    ----------
    root : Path
        A ``tuning_logs`` folder.
    uri : str
        From `tvmpaged.tuning.tracking.tracking_uri`.
    dry_run : bool
        Only find out what is missing.
    progress : callable
        See `Progress`.

    Raises
    ------
    FileNotFoundError
        When there is no such folder.
    ValueError
        When a log or record lies in a folder that names no target and spec.
    UserError
        When the server does not answer; run it again, then what is there is not sent twice.
    """
    folders = log_folders(root)
    server = None
    file = tracking.database(uri)
    # A dry run makes no database.
    if not dry_run or file is None or file.exists():
        server = connect(uri, create=not dry_run)
    with answering(uri):
        upload = _Upload(server, dry_run)
        found: list[Synced] = []
        try:
            for done, (folder, target, spec) in enumerate(folders, start=1):
                found += upload.folder(folder, target, spec)
                progress(done, str(spec))
        finally:
            upload.close()
        if server is not None and not dry_run:
            # Of commands that lost sight of the server before they could end their own.
            close_orphans(server, ())
    return found


class _Upload:
    """The part that knows the server.

    Parameters
    ----------
    server : Tracking or None
        None is an empty one.
    dry_run : bool
        Whether nothing is to be written.
    """

    def __init__(self, server: Tracking | None, dry_run: bool) -> None:
        self._server = server
        self._dry_run = dry_run
        self._parent: str | None = None

    def folder(self, folder: Path, target: TargetKey, spec: AttentionSpec) -> list[Synced]:
        """Upload what is missing of one folder; while it is held, nobody else writes its runs."""
        try:
            with nullcontext() if self._dry_run else open_log(folder):
                searches = folder_searches(folder, target, spec)
                return [self._search(folder, target, spec, *each) for each in searches]
        except (UserError, ValueError) as error:
            return [Synced(str(target), str(spec), None, "failed", {}, str(error))]

    def close(self) -> None:
        """End the run that holds those made here."""
        if self._server is not None and self._parent is not None:
            self._server.client.set_terminated(self._parent, "FINISHED")

    def _search(
        self,
        folder: Path,
        target: TargetKey,
        spec: AttentionSpec,
        search: Search,
        record: Record | None,
    ) -> Synced:
        wanted = Wanted.of(folder, target, spec, search, record)
        run = self._find(search.mlflow_run_id, wanted)
        run_id = None if run is None else str(run.info.run_id)
        if run is not None and run.info.lifecycle_stage == "deleted":
            return Synced(str(target), str(spec), run_id, "deleted", {})
        missing = wanted if run is None else self._missing(run, wanted)
        status = "" if run is None else run.info.status
        is_over = status == "FINISHED" or (wanted.status == "KILLED" and status in _OVER)
        added = missing.counts()
        if is_over and not any(added.values()):
            return Synced(str(target), str(spec), run_id, "complete", added)
        if self._dry_run or self._server is None:
            return Synced(str(target), str(spec), run_id, "missing", added)
        if run_id is None:
            run_id = self._create(self._server, str(spec), wanted.key)
        server = self._server
        server.log(run_id, params=missing.params, tags=missing.tags, points=missing.points)
        for file in missing.files:
            server.client.log_artifact(run_id, str(file))
        if not is_over:
            server.client.set_terminated(run_id, wanted.status)
        return Synced(str(target), str(spec), run_id, "uploaded", added)

    def _find(self, run_id: str | None, wanted: Wanted) -> Any:
        """Return the run of a search: by the name in the log, else by its tag."""
        from mlflow.exceptions import MlflowException

        if self._server is None:
            return None
        if run_id is not None:
            try:
                run = self._server.client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
            else:
                # A name is random, but the file that holds it may have been edited.
                if run.data.params.get("spec", wanted.params["spec"]) == wanted.params["spec"]:
                    return run
        if not self._server.experiment:
            return None
        key = f"tags.`{SEARCH_TAG}` = '{wanted.key}'"
        found = self._server.client.search_runs([self._server.experiment], key, max_results=1)
        return next(iter(found), None)

    def _missing(self, run: Any, wanted: Wanted) -> Wanted:
        assert self._server is not None
        client, run_id = self._server.client, run.info.run_id
        names = {name for name, _, _ in wanted.points}
        there = {
            (name, point.step)
            for name in names
            for point in client.get_metric_history(run_id, name)
        }
        points = [each for each in wanted.points if (each[0], each[2]) not in there]
        files = {each.path for each in client.list_artifacts(run_id)}
        return replace(
            wanted,
            params={k: v for k, v in wanted.params.items() if k not in run.data.params},
            tags={k: v for k, v in wanted.tags.items() if run.data.tags.get(k) != v},
            points=points,
            files=[each for each in wanted.files if points or each.name not in files],
        )

    def _create(self, server: Tracking, name: str, key: str) -> str:
        if self._parent is None:
            self._parent = server.create_run("mlflow-sync", {WRITER_TAG: writer()}, {})
        # The tag comes with the run, so that one that is cut short is found again.
        tags = {PARENT_TAG: self._parent, WRITER_TAG: writer(), SEARCH_TAG: key}
        return server.create_run(name, tags, {})
