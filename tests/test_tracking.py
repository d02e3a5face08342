"""A tracking server: where it is, how a new database is made, and what is said when it fails."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from mlflow_tools import forget_settings

from tvmpaged.errors import UserError
from tvmpaged.tuning.tracking import (
    MAX_BATCH,
    Tracking,
    answering,
    connect,
    tracking_uri,
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_settings(monkeypatch)


def stand_in(uri: str) -> Any:
    """Return what looks like MLflow's client to who connects, and makes a database as it does."""
    Path(uri.removeprefix("sqlite:///")).touch()
    return SimpleNamespace(
        search_experiments=lambda max_results: [],
        get_experiment_by_name=lambda _name: SimpleNamespace(experiment_id="1"),
    )


def test_one_command_at_a_time_makes_a_databases_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = threading.Event()

    def client(uri: str) -> Any:
        made.set()
        return stand_in(uri)

    monkeypatch.setattr("mlflow.tracking.MlflowClient", client)
    second = threading.Thread(target=Tracking, args=(f"sqlite:///{tmp_path}/mlflow.db",))
    with FileLock(tmp_path / "mlflow.db.lock"):
        second.start()
        assert not made.wait(1.0)
    second.join()
    assert made.is_set()


KILLED_AT_A_STATEMENT = """
import os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from tvmpaged.tuning.tracking import Tracking
left = int(sys.argv[2])
@event.listens_for(Engine, "before_cursor_execute")
def count(*_):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
Tracking(sys.argv[1])
"""


def test_a_kill_among_a_databases_tables_spoils_none(tmp_path: Path) -> None:
    """MLflow cannot go on with tables that were half made, nor can any later command."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    command = [sys.executable, "-c", KILLED_AT_A_STATEMENT, uri, "250"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (half,) = tmp_path.glob(".mlflow.db.new-*/mlflow.db")
    assert half.stat().st_size > 0
    assert Tracking(uri).experiment
    assert not half.parent.exists()
    assert (tmp_path / "mlflow.db").exists()


def test_who_connects_reports_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mlflow.tracking.MlflowClient", stand_in)
    Tracking(f"sqlite:///{tmp_path}/mlflow.db")
    assert (os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"]) == ("true", "true")


def test_more_points_than_a_server_takes_at_once_all_reach_it() -> None:
    sent: list[list[Any]] = []
    client = SimpleNamespace(log_batch=lambda _run, metrics: sent.append(metrics))
    tracking: Any = SimpleNamespace(client=client)
    Tracking.log(tracking, "run", points=[("us", float(step), step) for step in range(250)])
    assert [len(each) for each in sent] == [MAX_BATCH, MAX_BATCH, 50]
    assert [each.step for batch in sent for each in batch] == list(range(250))


def test_the_flag_wins_over_the_environment_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tracking_uri(None) == "sqlite:///mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    assert tracking_uri(None) == "http://server"
    assert tracking_uri("sqlite:///other.db") == "sqlite:///other.db"


def test_a_login_is_not_repeated_to_who_names_a_folder() -> None:
    with pytest.raises(ValueError, match="plain folder") as refusal:
        tracking_uri("file://me:hunter2@host/mlruns")
    assert "hunter2" not in str(refusal.value)


def test_a_login_in_what_a_server_says_is_not_repeated() -> None:
    from mlflow.exceptions import MlflowException

    refused = pytest.raises(UserError, match=r"request to http://\*\*\*@server/api failed")
    with refused as refusal, answering("http://me:hunter2@server"):
        raise MlflowException("request to http://me:hunter2@server/api failed")
    assert "hunter2" not in str(refusal.value)


def test_run_it_again_is_said_only_where_that_may_help(tmp_path: Path) -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

    (tmp_path / "broken.db").write_bytes(b"no database at all" * 99)
    for uri in (f"sqlite:///{tmp_path}/broken.db", "foo://server"):
        with pytest.raises(UserError, match="does not answer") as refusal:
            connect(uri)
        assert "run the same" not in str(refusal.value)
    with pytest.raises(UserError, match="not found") as refusal, answering("http://server"):
        raise MlflowException("Run with id=abc not found", RESOURCE_DOES_NOT_EXIST)
    assert "run the same" not in str(refusal.value)
    with pytest.raises(UserError, match="run the same command again"), answering("http://server"):
        raise MlflowException("API request to http://server failed")


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:///tmp/mlruns"])
def test_a_plain_folder_is_refused_with_what_to_use(uri: str) -> None:
    with pytest.raises(ValueError, match=r"sqlite:///.*mlruns/mlflow\.db"):
        tracking_uri(uri)
