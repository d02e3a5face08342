"""A real tracking server in a child process, and searches that are logged to one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tune_tools import SPEC, TARGET, FakeMachine, work

from tvmpaged import records
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.mlflow_log import RunLog

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
    **settings: Any,
) -> str | None:
    """Run a search below `folder`, logged to `uri`; return the run's id, None when it gave up."""
    task = work(machine or FakeMachine(folder), folder, **{"trials": 24, **settings})
    task._explain = lambda record: []  # type: ignore[method-assign]
    if uri is None:
        task.run()
        return None
    runs = task.runs = RunLog(uri, (warnings if warnings is not None else []).append, {})
    runs.connect()
    runs._background.settle(60)  # as the workers' start gives it time
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
