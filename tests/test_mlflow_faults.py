"""No tracking server can hurt a search: it fails, hangs or dies, and costs one warning."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow_tools import forget_settings, search
from tune_tools import SPEC, TARGET, FakeMachine, work

from tvmpaged import records, schedules
from tvmpaged.tuning import mlflow_log
from tvmpaged.tuning.background import QUEUE_SIZE, Background
from tvmpaged.tuning.mlflow_log import RunLog, SpecRun
from tvmpaged.tuning.trial import Trial


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_settings(monkeypatch)


@pytest.fixture
def silent_server() -> Iterator[int]:
    """Yield the port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def take() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for each in held:
            each.close()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of one database: to make its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow") / "runs" / "mlflow.db"


def check_unhurt(folder: Path, warnings: list[str]) -> None:
    record = records.load(folder, TARGET, SPEC)
    assert record is not None
    assert record.mlflow_run_id is None
    assert record.trials == 24
    assert len(warnings) == 1, warnings
    assert "tuning goes on without it" in warnings[0]


def test_without_mlflow_the_one_warning_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    warnings: list[str] = []
    search(tmp_path, f"sqlite:///{tmp_path}/mlflow.db", None, warnings, connected=False)
    check_unhurt(tmp_path, warnings)
    assert "pip install 'tvmpaged[tune]'" in warnings[0]
    assert "mlflow-sync" not in warnings[0]


def test_a_server_that_hangs_costs_a_bounded_time_and_one_warning(
    tmp_path: Path, silent_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_log, "SERVER_TIMEOUT_S", 1.0)
    warnings: list[str] = []
    begin = time.monotonic()
    search(tmp_path, f"http://me:secret@127.0.0.1:{silent_server}", None, warnings, connected=False)
    assert time.monotonic() - begin < 30
    check_unhurt(tmp_path, warnings)
    assert "no answer in time" in warnings[0]


def test_a_login_in_the_address_reaches_nothing_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warnings: list[str] = []
    search(tmp_path, "http://me:hunter2@127.0.0.1:9", None, warnings, connected=False)
    check_unhurt(tmp_path, warnings)
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any("hunter2" in text for text in [*warnings, *written])


def test_a_broken_database_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database")
    warnings: list[str] = []
    search(tmp_path / "logs", f"sqlite:///{tmp_path}/mlflow.db", None, warnings, connected=False)
    check_unhurt(tmp_path / "logs", warnings)


def test_a_missing_mlflow_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    warnings: list[str] = []
    search(tmp_path, f"sqlite:///{tmp_path}/mlflow.db", None, warnings, connected=False)
    check_unhurt(tmp_path, warnings)


def test_a_server_that_dies_in_between_is_one_warning(tmp_path: Path, database: Path) -> None:
    warnings: list[str] = []
    machine = FakeMachine(tmp_path)
    runs = RunLog(f"sqlite:///{database}", warnings.append, {})
    runs.connect()
    runs.settle()

    def die(_choices: Any) -> None:
        if len(machine.measured) == 12:
            runs._tracking.client = object()  # type: ignore[union-attr]

    machine.fate = die
    task = work(machine, tmp_path, trials=24)
    task.runs = runs
    task._explain = lambda record: []  # type: ignore[method-assign]
    record = task.run()
    runs.close("FINISHED")
    assert record.trials == 24
    assert record.choices in [record.choices, schedules.default_choices(SPEC, TARGET)]
    assert len(warnings) == 1


def test_no_batch_waits_for_a_server_that_is_behind(tmp_path: Path) -> None:
    runs, gate = (
        RunLog(f"sqlite:///{tmp_path}/mlflow.db", lambda _: None, {}),
        threading.Event(),
    )
    runs._background.submit(lambda: gate.wait(30))
    begin = time.monotonic()
    for _ in range(5):
        runs.log_trials(SpecRun("run"), [], [Trial({}, reason="crash")], lambda us: ("rate", us))
    assert time.monotonic() - begin < mlflow_log.PATIENCE_S
    runs._background.fail("enough")
    gate.set()


def test_the_search_waits_but_a_moment_for_a_server_that_was_in_time_before() -> None:
    runs, gate = RunLog("http://server", lambda _: None, {}), threading.Event()
    server: Any = SimpleNamespace(log=lambda *_run, **_what: gate.wait(30))
    runs._tracking = server
    begin = time.monotonic()
    runs.log_trials(SpecRun("run"), [], [Trial({}, reason="crash")], lambda us: ("rate", us))
    assert time.monotonic() - begin < 5
    runs._background.fail("enough")
    gate.set()


def test_jobs_are_done_in_order_and_a_full_queue_ends_it() -> None:
    failures: list[str] = []
    background, done, gate = Background(failures.append), [], threading.Event()
    background.submit(lambda: done.append(1))
    background.submit(lambda: done.append(2))
    assert background.settle(5)
    assert done == [1, 2]
    background.submit(lambda: gate.wait(10) and None)
    for _ in range(QUEUE_SIZE + 2):
        background.submit(lambda: done.append(3))
    assert background.failed
    assert len(failures) == 1
    assert not background.settle(0.1)
    gate.set()
