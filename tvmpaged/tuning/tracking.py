"""A tracking server: where it is, and what a search looks like there."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from tvmpaged.env import hide_secrets
from tvmpaged.errors import UserError
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
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
#: What MLflow calls a server that is away, and one that is too busy.
_PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")


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
        folder, shown = parts.path or uri, hide_secrets("", uri)
        raise ValueError(
            f"mlflow uri {shown!r} is a plain folder, which MLflow keeps no runs in any more; "
            f"write --mlflow-uri {_SQLITE}{folder.rstrip('/')}/mlflow.db"
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
    create : bool
        Whether to make that experiment; without it `experiment` is then empty.
    """

    def __init__(self, uri: str, *, create: bool = True) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        # On stdout stand results alone; and the address it would print holds the login.
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        file = database(uri)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        # Two commands that make one new database at once would make its tables twice.
        with FileLock(f"{file}.lock", DATABASE_TIMEOUT_S) if file else nullcontext():
            if file is not None and not file.exists():
                _make_database(file)
            self.client: Any = MlflowClient(uri)
            self.experiment = self._experiment(file, create)

    def _experiment(self, file: Path | None, create: bool) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        if not create:
            return ""
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


def _make_database(file: Path) -> None:
    """Make a database's tables; killed half-way through them, none could be opened ever after."""
    from mlflow.tracking import MlflowClient

    prefix = f".{file.name}.new-"
    for left in file.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)  # of a command that was killed
    # MLflow keeps a connection for each name it has ever seen, so no name comes twice.
    with tempfile.TemporaryDirectory(prefix=prefix, dir=file.parent) as folder:
        new = Path(folder) / file.name
        MlflowClient(f"{_SQLITE}{new}").search_experiments(max_results=1)
        new.rename(file)


def short(value: Any) -> str:
    """Return a value as text that every server takes; the artifacts hold it whole."""
    text = str(value)
    return text if len(text) <= MAX_PARAM else text[: MAX_PARAM - 1] + "…"


def spec_params(
    spec: AttentionSpec, target: TargetKey, setting: Mapping[str, Any], seed: int
) -> dict[str, Any]:
    """Return the parameters of one spec's run; the setting is plain data."""
    params = {f"spec.{name}": value for name, value in asdict(spec).items()}
    for name, value in setting.items():
        # One spelling, whether it was read from a log or not.
        is_plain = isinstance(value, int | str)
        params[f"setting.{name}"] = value if is_plain else json.dumps(value, sort_keys=True)
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
        "roof_gb_per_s": record.roof_gb_per_s,
        "roof_gflop_per_s": record.roof_gflop_per_s,
        "roof_fraction": record.roof_fraction,
    }
    known = {name: value for name, value in values.items() if value is not None}
    return [(name, value, record.trials) for name, value in known.items()]


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


def connect(uri: str, *, create: bool = True) -> Tracking:
    """Connect to a server for a command that can do nothing without it.

    Raises
    ------
    UserError
        When it does not answer.
    """
    # MLflow's own patience is that of a service: seven times two minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    with answering(uri):
        return Tracking(uri, create=create)


@contextmanager
def answering(uri: str) -> Iterator[None]:
    """Turn a server's failure into what a user should read, without the address's login."""
    import requests
    import sqlalchemy
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError) as error:
        again = "; nothing here is lost, run the same command again" if _may_pass(error) else ""
        raise UserError(
            f"mlflow at {hide_secrets('', uri)} does not answer as it should: "
            f"{_reason(error)}{again}"
        ) from error


def _may_pass(error: Exception) -> bool:
    """Whether the same call may go well later; a broken database or an unknown run stays so."""
    import requests
    import sqlalchemy

    code = getattr(error, "error_code", None)
    return code in _PASSING or isinstance(
        error, requests.RequestException | sqlalchemy.exc.OperationalError
    )


def _reason(error: Exception) -> str:
    """Return the one line of an error that tells, without a login."""
    text = hide_secrets("", str(error).strip() or type(error).__name__)
    cause = re.search(r"(\[Errno [^'\"]+|Read timed out|Name or service not known)", text)
    return cause[0].rstrip(")") if cause else text.splitlines()[0][:300]
