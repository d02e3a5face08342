"""A real tracking server in a child process, and searches that are logged to one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tune_tools import SPEC, TARGET, FakeMachine, work

from tvmpaged import records
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.mlflow_log import RunLog
from tvmpaged.tuning.process import Answer

#: What ``mlflow server`` runs, without its supervisor.
_SERVER = """
import sys
from mlflow.server import app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), app, threaded=True)
"""


class Server:
    """A server with its database and its artifacts in a folder.

    Parameters
    ----------
    folder : Path
        Holds ``server.db`` and ``artifacts``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = os.environ | {
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.folder}/server.db",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": f"{self.folder}/artifacts",
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        self._child = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(self.port)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 120
        while time.monotonic() < end and self._child.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                return
            time.sleep(0.1)
        raise AssertionError("the server does not start")

    def freeze(self) -> None:
        """Let it take connections and answer none."""
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def search(
    folder: Path,
    uri: str | None,
    machine: FakeMachine | None = None,
    warnings: list[str] | None = None,
    *,
    connected: bool = True,
    params: Mapping[str, Any] | None = None,
    explained: Sequence[Path] = (),
    **settings: Any,
) -> str | None:
    """Run a search below `folder`, logged to `uri`; return the run's id, None when it gave up.

    Parameters
    ----------
    folder, uri, machine, settings
        What to search, and where it is logged, if at all.
    warnings : list of str, optional
        Grows by what a user would be told.
    connected : bool
        Whether it begins when the server has answered, for which workers' start gives it time.
    params : mapping, optional
        Of the command's run.
    explained : sequence of Path
        What is kept beside the record.
    """
    task = work(machine or FakeMachine(folder), folder, **{"trials": 24, **settings})
    task._explain = lambda record: list(explained)  # type: ignore[method-assign]
    if uri is None:
        task.run()
        return None
    told = warnings if warnings is not None else []
    runs = task.runs = RunLog(uri, told.append, params or {})
    runs.connect()
    if connected:
        runs._background.settle(60)
    try:
        record = task.run()
    except GivenUpError:
        runs.close("KILLED")
        return None
    runs.close("FINISHED")
    return record.mlflow_run_id


def log_folder(root: Path) -> Path:
    return records.folder(root, TARGET, SPEC)


def contents(client: Any, run_id: str) -> dict[str, Any]:
    """Return all that a run holds, as plain data."""
    run = client.get_run(run_id)
    metrics = {
        (name, each.step): each.value
        for name in run.data.metrics
        for each in client.get_metric_history(run_id, name)
    }
    return {
        "status": run.info.status,
        "name": run.info.run_name,
        "params": run.data.params,
        "metrics": metrics,
        "files": {each.path: each.file_size for each in client.list_artifacts(run_id)},
    }


def stop_after(machine: FakeMachine, count: int) -> FakeMachine:
    def fate(_choices: Any) -> Answer | None:
        machine.stop = len(machine.measured) >= count
        return Answer({}, "interrupted", "interrupted") if machine.stop else None

    machine.fate = fate
    return machine


def go_on(machine: FakeMachine) -> FakeMachine:
    machine.stop, machine.fate = False, lambda _choices: None
    return machine


def forget_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a developer's own settings of MLflow and of ours out of the environment."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "TVMPAGED_")):
            monkeypatch.delenv(name)
