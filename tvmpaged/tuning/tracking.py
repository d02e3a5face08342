"""A tracking server: where it is, and what a search looks like there."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.trial import Trial

DEFAULT_URI = "sqlite:///mlflow.db"
EXPERIMENT = "tvmpaged"
#: How long another command may take to make a new database's tables.
DATABASE_TIMEOUT_S = 90.0
#: What every tracking server takes.
MAX_PARAM, MAX_BATCH = 500, 100
#: Microseconds -> (metric's name, value).
Rate = Callable[[float], tuple[str, float]]
#: (name, value, step) of a metric; a step is a trial, counted from 1.
Point = tuple[str, float, int]
PARENT_TAG = "mlflow.parentRunId"
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


def database(uri: str) -> Path | None:
    """Return the file of an SQLite database, which gets its artifacts beside it."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]).absolute()


class Tracking:
    """A connection to a server, and our experiment there.

    Parameters
    ----------
    uri : str
        From `tracking_uri`. Connecting makes a database that is not there, and the experiment:
        the one that MLFLOW_EXPERIMENT_NAME names, else ours.
    """

    def __init__(self, uri: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        file = database(uri)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        # Two commands that make one new database at once would make its tables twice.
        with FileLock(f"{file}.lock", DATABASE_TIMEOUT_S) if file else nullcontext():
            self.client: Any = MlflowClient(uri)
            self.experiment = self._experiment(file)

    def _experiment(self, file: Path | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        artifacts = None if file is None else (file.parent / "mlartifacts").as_uri()
        return str(self.client.create_experiment(name, artifact_location=artifacts))

    def create_run(self, name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> str:
        """Open a run and return its id."""
        run = self.client.create_run(self.experiment, tags=dict(tags), run_name=name)
        run_id = str(run.info.run_id)
        self.log(run_id, params=params)
        return run_id

    def log(
        self,
        run_id: str,
        *,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        points: Iterable[Point] = (),
    ) -> None:
        """Write what a run is about, and what was measured."""
        from mlflow.entities import Metric, Param, RunTag

        found = [Param(name, short(value)) for name, value in (params or {}).items()]
        marks = [RunTag(name, short(value)) for name, value in (tags or {}).items()]
        if found or marks:
            self.client.log_batch(run_id, params=found, tags=marks)
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value, step in points]
        for begin in range(0, len(metrics), MAX_BATCH):
            self.client.log_batch(run_id, metrics=metrics[begin : begin + MAX_BATCH])


def short(value: Any) -> str:
    """Return a value as text that every server takes; the artifacts hold it whole."""
    text = str(value)
    return text if len(text) <= MAX_PARAM else text[: MAX_PARAM - 1] + "…"


def spec_params(
    spec: AttentionSpec, target: TargetKey, setting: Setting, seed: int
) -> dict[str, Any]:
    """Return the parameters of one spec's run."""
    params = {f"spec.{name}": value for name, value in asdict(spec).items()}
    params |= {f"setting.{name}": value for name, value in setting.as_dict().items()}
    return params | {"spec": str(spec), "target": str(target), "seed": seed}


def winner_params(record: Record) -> dict[str, Any]:
    """Return the winner's options."""
    return {f"choice.{name}": value for name, value in record.choices.items()}


def winner_tags(record: Record) -> dict[str, str]:
    """Return what a finished search is found by."""
    return {
        "record_id": record.record_id,
        "winner": "default" if record.is_default else "tuned",
        **{f"failures.{name}": str(count) for name, count in record.failures.items()},
    }


def winner_points(record: Record) -> list[Point]:
    """Return what the winner was measured at."""
    values = {
        "speedup": record.speedup,
        "winner_latency_us": record.median_us,
        "default_latency_us": record.default_latency_us.median,
    }
    return [(name, value, record.trials) for name, value in values.items()]


def trial_points(before: list[Trial], batch: list[Trial], rate: Rate) -> Iterator[Point]:
    """Yield what a batch adds to a run that holds the trials before it."""
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
