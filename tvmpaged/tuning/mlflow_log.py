"""Runs in MLflow: a parent per command, a child per spec. Nothing here can hurt the search.

All calls go through a background thread. A server that fails or hangs costs a bounded time and one
warning; then nothing more is logged, and the records are complete without it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from tvmpaged.env import hide_secrets
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.background import Background
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.trial import Trial

DEFAULT_URI = "sqlite:///mlflow.db"
EXPERIMENT = "tvmpaged"
#: To import MLflow and make a database's tables takes its time; a server is there or it is not.
DATABASE_TIMEOUT_S, SERVER_TIMEOUT_S = 90.0, 20.0
ANSWER_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 30.0
#: What every tracking server takes.
MAX_PARAM, MAX_BATCH = 500, 100
#: Microseconds -> (metric's name, value).
Rate = Callable[[float], tuple[str, float]]
_SQLITE = "sqlite:///"


def tracking_uri(flag: str | None) -> str:
    """Return where runs go: the flag, else MLFLOW_TRACKING_URI, else our default.

    Raises
    ------
    ValueError
        When it is a plain folder, which MLflow keeps no runs in any more.
    """
    uri = flag or os.environ.get("MLFLOW_TRACKING_URI", "").strip() or DEFAULT_URI
    parts = urlsplit(uri)
    if parts.scheme in ("", "file") and not os.environ.get("MLFLOW_ALLOW_FILE_STORE"):
        folder = parts.path or uri
        raise ValueError(
            f"mlflow uri {uri!r} is a plain folder, which MLflow keeps no runs in any more; write "
            f"--mlflow-uri {_SQLITE}{folder.rstrip('/')}/mlflow.db"
        )
    return uri


class RunLog:
    """The runs of one command.

    Parameters
    ----------
    uri : str
        From `tracking_uri`.
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
        self._client: Any = None
        self._experiment = ""
        self._parent: str | None = None
        #: Runs that this command has opened and not ended yet.
        self._open: list[str] = []

    def connect(self) -> None:
        """Begin to connect; returns at once."""
        self._background.submit(self._connect)

    def start_spec(
        self,
        spec: AttentionSpec,
        target: TargetKey,
        setting: Setting,
        seed: int,
        earlier: str | None,
    ) -> str | None:
        """Open a spec's run, the `earlier` one again if there is one; return its id."""
        found: list[str] = []

        def job() -> None:
            self._connect()
            reopened = earlier if earlier and self._reopen(earlier) else None
            found.append(reopened or self._new_child(spec, target, setting, seed))

        self._background.submit(job)
        if not self._background.settle(self._patience()):
            self._background.fail("the tracking server does not answer")
        return found[0] if found else None

    def log_trials(
        self, run_id: str | None, before: list[Trial], batch: list[Trial], rate: Rate
    ) -> None:
        """Log a batch: one step per trial."""
        if run_id is None or not batch:
            return
        metrics = list(_metrics(before, batch, rate))
        self._background.submit(lambda: self._log_metrics(run_id, metrics))
        # Between batches nothing is measured, so this is the time to write.
        self._background.settle(1.0)

    def finish_spec(self, run_id: str | None, record: Record, files: Iterable[Path]) -> None:
        """Log the winner and end a spec's run."""
        if run_id is None:
            return
        names = list(files)

        def job() -> None:
            from mlflow.entities import Param, RunTag

            params = [Param(f"choice.{k}", _short(v)) for k, v in record.choices.items()]
            tags = {
                "record_id": record.record_id,
                "winner": "default" if record.is_default else "tuned",
                **{f"failures.{name}": str(n) for name, n in record.failures.items()},
            }
            winner = {"speedup": record.speedup, "winner_latency_us": record.median_us}
            winner |= {"default_latency_us": record.default_latency_us.median}
            self._client.log_batch(
                run_id, params=params, tags=[RunTag(k, _short(v)) for k, v in tags.items()]
            )
            self._log_metrics(run_id, [(k, v, record.trials) for k, v in winner.items()])
            for name in names:
                if name.exists():
                    self._client.log_artifact(run_id, str(name))
            self._end(run_id, "FINISHED")

        self._background.submit(job)
        self._background.settle(ANSWER_TIMEOUT_S)

    def close(self, status: str) -> None:
        """End what is open: ``FINISHED``, ``FAILED`` or ``KILLED``."""

        def job() -> None:
            for run_id in list(self._open):
                # The parent was opened first; children that finished are no longer in the list.
                self._end(run_id, status)

        if self._open and not self._background.failed:
            self._background.submit(job)
            if not self._background.settle(CLOSE_TIMEOUT_S):
                self._background.fail("the tracking server does not answer")

    def _patience(self) -> float:
        if self._client is not None:
            return ANSWER_TIMEOUT_S
        return SERVER_TIMEOUT_S if _database(self._uri) is None else DATABASE_TIMEOUT_S

    def _warn(self, why: str) -> None:
        shown = hide_secrets("", why.strip().splitlines()[0] if why.strip() else "no reason given")
        self._on_warning(f"MLflow: {shown}; tuning goes on without it")

    def _connect(self) -> None:
        if self._client is not None:
            return
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        database = _database(self._uri)
        if database is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
        # Two commands that make one new database at once would make its tables twice.
        lock = FileLock(f"{database}.lock", DATABASE_TIMEOUT_S) if database else nullcontext()
        with lock:
            client = MlflowClient(self._uri)
            found = client.get_experiment_by_name(name)
            if found is not None:
                self._experiment = found.experiment_id
            else:
                artifacts = None if database is None else database.parent / "mlartifacts"
                self._experiment = client.create_experiment(
                    name, artifact_location=artifacts.as_uri() if artifacts else None
                )
        self._client = client

    def _new_child(
        self, spec: AttentionSpec, target: TargetKey, setting: Setting, seed: int
    ) -> str:
        from mlflow.entities import Param

        if self._parent is None:
            self._parent = self._create("tune", {}, self._params)
        tags = {"mlflow.parentRunId": self._parent}
        params = {f"spec.{name}": value for name, value in asdict(spec).items()}
        params |= {f"setting.{name}": value for name, value in setting.as_dict().items()}
        params |= {"spec": str(spec), "target": str(target), "seed": seed}
        run_id = self._create(str(spec), tags, {})
        self._client.log_batch(run_id, params=[Param(k, _short(v)) for k, v in params.items()])
        return run_id

    def _create(self, name: str, tags: dict[str, str], params: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        run = self._client.create_run(self._experiment, tags=tags, run_name=name)
        run_id = str(run.info.run_id)
        self._open.append(run_id)
        self._client.log_batch(run_id, params=[Param(k, _short(v)) for k, v in params.items()])
        return run_id

    def _reopen(self, run_id: str) -> bool:
        """Set a run that was cut short, and its parent, to running again; False when it was not."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
        except MlflowException:
            return False  # of another server, or deleted
        if run.info.status == "FINISHED":
            return False  # it has its winner, which cannot change
        parent = run.data.tags.get("mlflow.parentRunId")
        for each in (parent, run_id):
            if each and each not in self._open:
                self._client.update_run(each, status="RUNNING")
                self._open.append(each)
        self._parent = self._parent or parent
        return True

    def _end(self, run_id: str, status: str) -> None:
        self._client.set_terminated(run_id, status)
        self._open.remove(run_id)

    def _log_metrics(self, run_id: str, metrics: list[tuple[str, float, int]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(name, value, now, step) for name, value, step in metrics]
        for begin in range(0, len(found), MAX_BATCH):
            self._client.log_batch(run_id, metrics=found[begin : begin + MAX_BATCH])


def _metrics(
    before: list[Trial], batch: list[Trial], rate: Rate
) -> Iterable[tuple[str, float, int]]:
    """Yield (name, value, step) of a batch; a step is a trial, counted from 1."""
    best = min((each.median_us for each in before), default=float("inf"))
    failures = Counter(each.reason for each in before if each.reason)
    for step, each in enumerate(batch, start=len(before) + 1):
        if each.reason:
            failures[each.reason] += 1
            yield f"failures.{each.reason}", float(failures[each.reason]), step
        else:
            yield "latency_us", each.median_us, step
        best = min(best, each.median_us)
        if best < float("inf"):
            name, value = rate(best)
            yield "best_latency_us", best, step
            yield f"best_{name}", value, step


def _short(value: Any) -> str:
    """Return a value as text that every server takes; the artifacts hold it whole."""
    text = str(value)
    return text if len(text) <= MAX_PARAM else text[: MAX_PARAM - 1] + "…"


def _database(uri: str) -> Path | None:
    """Return the file of an SQLite database, which gets its artifacts beside it."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]).absolute()
