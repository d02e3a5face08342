"""Runs in MLflow: a parent per command, a child per spec. Nothing here can hurt the search.

All calls go through a background thread that nobody waits for while it is behind. A server that
fails or hangs costs one warning; then nothing more is logged, and log and record are complete
without it: ``tvmpaged mlflow-sync`` uploads what was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmpaged.env import hide_secrets
from tvmpaged.errors import UserError, missing_extra
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning import tracking
from tvmpaged.tuning.background import Background
from tvmpaged.tuning.orphans import WRITER_TAG, close_orphans, writer
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.tracking import PARENT_TAG, Rate, Tracking
from tvmpaged.tuning.trial import Trial

#: To import MLflow and make a database's tables takes its time; a server is there or it is not.
DATABASE_TIMEOUT_S, SERVER_TIMEOUT_S = 90.0, 20.0
#: For a message, and for a spec's files.
ANSWER_TIMEOUT_S, UPLOAD_TIMEOUT_S = 10.0, 20.0
#: For all that is left when a command ends.
CLOSE_TIMEOUT_S = 60.0
#: How long the search waits for a server that was not behind before.
PATIENCE_S = 1.0


@dataclass
class SpecRun:
    """One spec's run.

    Parameters
    ----------
    id : str or None
        Known once the server has answered.
    """

    id: str | None = None


class RunLog:
    """The runs of one command.

    Parameters
    ----------
    uri : str
        From `tvmpaged.tuning.tracking.tracking_uri`.
    on_warning : callable
        Told once when logging stops.
    params : mapping
        Of the parent run.
    """

    def __init__(
        self, uri: str, on_warning: Callable[[str], None], params: Mapping[str, Any]
    ) -> None:
        self._uri = uri
        self._params = params
        self._on_warning = on_warning
        self._background = Background(self._warn)
        self._tracking: Tracking | None = None
        self._advice = " (later: tvmpaged mlflow-sync DIR)"
        self._parent: str | None = None
        #: Runs that this command has opened and not ended yet, the parent first.
        self._open: list[str] = []

    def connect(self) -> None:
        """Begin to connect; returns at once."""
        timeout_s = DATABASE_TIMEOUT_S if tracking.database(self._uri) else SERVER_TIMEOUT_S
        self._background.submit(self._connected, timeout_s)

    def start_spec(
        self,
        spec: AttentionSpec,
        target: TargetKey,
        setting: Setting,
        seed: int,
        *,
        earlier: str | None = None,
        orphans: Iterable[str] | None = None,
    ) -> SpecRun:
        """Open a spec's run, or the `earlier` one again; returns at once, before it has an id.

        Parameters
        ----------
        spec, target, setting, seed
            What is searched.
        earlier : str, optional
            The run that was cut short.
        orphans : iterable of str, optional
            Runs that nobody else writes: if they are still RUNNING, their command was killed. Given
            at all, other commands' runs are looked through, too.
        """
        run = SpecRun()
        mine = None if orphans is None else list(orphans)

        def job() -> None:
            server = self._connected()
            if mine is not None:
                close_orphans(server, mine)
            reopened = earlier if earlier and self._reopen(server, earlier) else None
            run.id = reopened or self._new_child(server, spec, target, setting, seed)

        self.connect()
        self._background.submit(job, ANSWER_TIMEOUT_S)
        return run

    def log_trials(self, run: SpecRun, before: list[Trial], batch: list[Trial], rate: Rate) -> None:
        """Log a batch: one step per trial."""
        if not batch:
            return
        points = list(tracking.trial_points(before, batch, rate))
        self._do(lambda server, run_id: server.log(run_id, points=points), run, ANSWER_TIMEOUT_S)

    def id_of(self, run: SpecRun) -> str | None:
        """Return a run's id, after a little patience."""
        if run.id is None:
            self._background.settle(PATIENCE_S)
        return run.id

    def settle(self) -> None:
        """Wait until all so far is logged, or given up: for who has nothing to do meanwhile."""
        self._background.settle(DATABASE_TIMEOUT_S)

    def finish_spec(self, run: SpecRun, record: Record, files: Iterable[Path]) -> None:
        """Log the winner and end a spec's run."""
        names = list(files)

        def job(server: Tracking, run_id: str) -> None:
            params, tags = tracking.winner_params(record), tracking.winner_tags(record)
            server.log(run_id, params=params, tags=tags, points=tracking.winner_points(record))
            self._upload(server, run_id, names)
            self._end(server, run_id, "FINISHED")

        self._do(job, run, UPLOAD_TIMEOUT_S)

    def keep_log(self, run: SpecRun, log: Path) -> None:
        """Upload the log of a search that is given up."""
        self._do(lambda server, run_id: self._upload(server, run_id, [log]), run, UPLOAD_TIMEOUT_S)

    def close(self, status: str) -> None:
        """End what is open: ``FINISHED``, ``FAILED`` or ``KILLED``; a late job ends the wait."""

        def job() -> None:
            for run_id in list(self._open):
                self._end(self._connected(), run_id, status)

        self._background.submit(job, ANSWER_TIMEOUT_S)
        if not self._background.settle(CLOSE_TIMEOUT_S):
            self._background.fail("no answer in time")

    def _do(self, job: Callable[[Tracking, str], None], run: SpecRun, deadline_s: float) -> None:
        """Submit a job about a run; wait a little for it, but for nothing that was late before."""

        def with_run() -> None:
            if run.id is not None:
                job(self._connected(), run.id)

        is_behind = not self._background.idle
        self._background.submit(with_run, deadline_s)
        if not is_behind:
            # Between batches nothing is measured, so this is the time to write.
            self._background.settle(PATIENCE_S)

    def _warn(self, why: str) -> None:
        shown = hide_secrets("", why.strip().splitlines()[0] if why.strip() else "no reason given")
        self._on_warning(f"MLflow: {shown}; tuning goes on without it{self._advice}")

    def _connected(self) -> Tracking:
        if self._tracking is None:
            try:
                self._tracking = Tracking(self._uri)
            except ImportError as error:
                self._advice = ""
                raise UserError(missing_extra(error) or str(error)) from error
        return self._tracking

    def _new_child(
        self,
        server: Tracking,
        spec: AttentionSpec,
        target: TargetKey,
        setting: Setting,
        seed: int,
    ) -> str:
        if self._parent is None:
            self._parent = self._create(server, "tune", {}, self._params)
        params = tracking.spec_params(spec, target, setting.as_dict(), seed)
        return self._create(server, str(spec), {PARENT_TAG: self._parent}, params)

    def _create(
        self, server: Tracking, name: str, tags: Mapping[str, str], params: Mapping[str, Any]
    ) -> str:
        run_id = server.create_run(name, {**tags, WRITER_TAG: writer()}, params)
        self._open.append(run_id)
        return run_id

    def _reopen(self, server: Tracking, run_id: str) -> bool:
        """Set a run that was cut short, and its parent, to running again; False when it was not."""
        from mlflow.exceptions import MlflowException

        try:
            run = server.client.get_run(run_id)
        except MlflowException:
            return False  # of another server
        if run.info.status == "FINISHED" or run.info.lifecycle_stage == "deleted":
            return False  # it has its winner, which cannot change
        parent = run.data.tags.get(PARENT_TAG)
        for each in (parent, run_id):
            if each and each not in self._open:
                server.client.update_run(each, status="RUNNING")
                server.log(each, tags={WRITER_TAG: writer()})
                self._open.append(each)
        self._parent = self._parent or parent
        return True

    def _upload(self, server: Tracking, run_id: str, files: Iterable[Path]) -> None:
        for file in files:
            if file.exists():
                server.client.log_artifact(run_id, str(file))

    def _end(self, server: Tracking, run_id: str, status: str) -> None:
        server.client.set_terminated(run_id, status)
        self._open.remove(run_id)
