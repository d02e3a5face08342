"""What the search writes to MLflow, and that no tracking server can hurt it."""

import json
import os
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from tune_tools import SPEC, TARGET, FakeMachine, work

from tvmpaged import records, schedules
from tvmpaged.errors import UserError
from tvmpaged.tune import run_log
from tvmpaged.tuning import mlflow_log
from tvmpaged.tuning.background import QUEUE_SIZE, Background
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import read_searches
from tvmpaged.tuning.mlflow_log import RunLog, SpecRun
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.tracking import (
    MAX_BATCH,
    MAX_PARAM,
    Tracking,
    answering,
    connect,
    spec_params,
    tracking_uri,
)
from tvmpaged.tuning.trial import Trial
from tvmpaged.tuning.work import Settings
from tvmpaged.tuning.workload import Workload

PARAMS = {"trials": 24, "specs": "x" * 10_000}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of one database: to make its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow") / "runs" / "mlflow.db"


@pytest.fixture
def client(database: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{database}")


def search(
    folder: Path, uri: str, warnings: list[str], machine: FakeMachine | None = None, **settings: Any
) -> str | None:
    """Run a search that logs to `uri`; return its run's id."""
    runs = RunLog(uri, warnings.append, PARAMS)
    runs.connect()
    task = work(machine or FakeMachine(folder), folder, trials=24, **settings)
    task.runs = runs
    monkey_explain = [folder / "winner.py"]
    task._explain = lambda record: monkey_explain  # type: ignore[method-assign]
    folder.mkdir(parents=True, exist_ok=True)
    monkey_explain[0].write_text("# the program")
    try:
        record = task.run()
    except GivenUpError:
        runs.close("KILLED")
        return None
    runs.close("FINISHED")
    return record.mlflow_run_id


def test_a_run_holds_all_that_a_person_looks_for(
    tmp_path: Path, database: Path, client: Any
) -> None:
    def fate(choices: dict[str, Any]) -> Answer | None:
        crash = choices["lanes"] == 8
        return Answer({}, "crash", "SIGSEGV") if crash else None

    warnings: list[str] = []
    run_id = search(tmp_path, f"sqlite:///{database}", warnings, FakeMachine(tmp_path, fate))
    assert warnings == []
    record = records.load(tmp_path, TARGET, SPEC)
    assert record is not None
    assert record.mlflow_run_id == run_id

    run = client.get_run(run_id)
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert (run.info.status, parent.info.status) == ("FINISHED", "FINISHED")
    assert run.info.run_name == str(SPEC)
    assert parent.data.params["trials"] == "24"
    assert len(parent.data.params["specs"]) == MAX_PARAM

    params = run.data.params
    assert params["spec.head_dim"] == "64"
    assert params["spec.kernel"] == "decode"
    assert params["target"] == str(TARGET)
    assert params["setting.num_threads"] == str(record.num_threads)
    assert {k: params[f"choice.{k}"] for k in record.choices} == {
        k: str(v) for k, v in record.choices.items()
    }
    best = client.get_metric_history(run_id, "best_latency_us")
    values = [each.value for each in sorted(best, key=lambda each: each.step)]
    assert values == sorted(values, reverse=True)
    assert [each.step for each in best] == list(range(1, 25))
    rates = client.get_metric_history(run_id, "best_gb_per_s")
    assert len(rates) == len(best)
    failures = client.get_metric_history(run_id, "failures.crash")
    assert max(each.value for each in failures) == record.failures["crash"] > 0
    assert run.data.tags["failures.crash"] == str(record.failures["crash"])
    assert run.data.tags["record_id"] == record.record_id
    assert run.data.metrics["speedup"] == record.speedup

    names = {each.path for each in client.list_artifacts(run_id)}
    assert names == {"record.json", "trials.jsonl", "summary.md", "winner.py"}
    assert (database.parent / "mlartifacts").is_dir()
    # The logs come back whole from the run.
    copy = Path(client.download_artifacts(run_id, "record.json"))
    assert records.Record.from_dict(json.loads(copy.read_text())) == record


def test_a_search_that_was_cut_short_goes_on_in_its_run(
    tmp_path: Path, database: Path, client: Any
) -> None:
    machine = FakeMachine(tmp_path)

    def stop(_choices: Any) -> Answer | None:
        machine.stop = len(machine.measured) >= 12
        return Answer({}, "interrupted", "interrupted") if machine.stop else None

    machine.fate, uri = stop, f"sqlite:///{database}"
    assert search(tmp_path, uri, [], machine) is None
    log = records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl"
    (cut,) = [each.mlflow_run_id for each in read_searches(log)]
    # Another machine finds its trials there.
    assert {each.path for each in client.list_artifacts(cut)} == {"trials.jsonl"}
    assert client.get_run(cut).info.status == "KILLED"
    # As kill -9 would have left it.
    client.update_run(cut, status="RUNNING")

    machine.stop, machine.fate = False, lambda _choices: None
    warnings: list[str] = []
    assert search(tmp_path, uri, warnings, machine, resume=True) == cut
    assert warnings == []
    run = client.get_run(cut)
    assert run.info.status == "FINISHED"
    assert client.get_run(run.data.tags["mlflow.parentRunId"]).info.status == "FINISHED"
    steps = [each.step for each in client.get_metric_history(cut, "best_latency_us")]
    assert sorted(steps) == list(range(1, 25))
    # It has its winner now, so the next one gets a run of its own.
    assert search(tmp_path, uri, warnings, machine, resume=True) != cut
    assert warnings == []


def test_the_experiment_is_named_by_the_environment(
    tmp_path: Path, database: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    run_id = search(tmp_path, f"sqlite:///{database}", [])
    found = client.get_experiment(client.get_run(run_id).info.experiment_id)
    assert found.name == "mine"


def test_two_commands_may_start_on_one_new_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    warnings: list[str] = []
    threads = [
        threading.Thread(target=search, args=(tmp_path / name, uri, warnings)) for name in "ab"
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert warnings == []
    with sqlite3.connect(tmp_path / "new/mlflow.db") as database:
        (count,) = database.execute("select count(*) from runs").fetchone()
    assert count == 4


def test_one_command_at_a_time_makes_a_databases_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = SimpleNamespace(experiment_id="1")
    made = threading.Event()

    def client(_uri: str) -> Any:
        made.set()
        return SimpleNamespace(get_experiment_by_name=lambda _name: experiment)

    monkeypatch.setattr("mlflow.tracking.MlflowClient", client)
    second = threading.Thread(target=Tracking, args=(f"sqlite:///{tmp_path}/mlflow.db",))
    with FileLock(tmp_path / "mlflow.db.lock"):
        second.start()
        assert not made.wait(1.0)
    second.join()
    assert made.is_set()


def test_who_connects_reports_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    experiment = SimpleNamespace(experiment_id="1")
    client = SimpleNamespace(get_experiment_by_name=lambda _name: experiment)
    monkeypatch.setattr("mlflow.tracking.MlflowClient", lambda _uri: client)
    Tracking(f"sqlite:///{tmp_path}/mlflow.db")
    assert (os.environ["MLFLOW_DISABLE_TELEMETRY"], os.environ["DO_NOT_TRACK"]) == ("true", "true")


# --- servers that fail ---------------------------------------------------------------------------


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
    search(tmp_path, f"sqlite:///{tmp_path}/mlflow.db", warnings)
    check_unhurt(tmp_path, warnings)
    assert "pip install 'tvmpaged[tune]'" in warnings[0]
    assert "mlflow-sync" not in warnings[0]


def test_a_server_that_hangs_costs_a_bounded_time_and_one_warning(
    tmp_path: Path, silent_server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_log, "SERVER_TIMEOUT_S", 1.0)
    warnings: list[str] = []
    begin = time.monotonic()
    search(tmp_path, f"http://me:secret@127.0.0.1:{silent_server}", warnings)
    assert time.monotonic() - begin < 30
    check_unhurt(tmp_path, warnings)
    assert "no answer in time" in warnings[0]


def test_a_login_in_the_address_reaches_nothing_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warnings: list[str] = []
    search(tmp_path, "http://me:hunter2@127.0.0.1:9", warnings)
    check_unhurt(tmp_path, warnings)
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any("hunter2" in text for text in [*warnings, *written])


def test_a_login_is_in_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@server")
    runs = run_log([SPEC], TARGET, Settings(), lambda _: None)
    assert runs is not None
    setting = Setting.here(Workload.representative(SPEC)).as_dict()
    assert "hunter2" not in f"{runs._params} {spec_params(SPEC, TARGET, setting, 0)}"


def test_a_broken_database_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database")
    warnings: list[str] = []
    search(tmp_path / "logs", f"sqlite:///{tmp_path}/mlflow.db", warnings)
    check_unhurt(tmp_path / "logs", warnings)


def test_a_missing_mlflow_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    warnings: list[str] = []
    search(tmp_path, f"sqlite:///{tmp_path}/mlflow.db", warnings)
    check_unhurt(tmp_path, warnings)


def test_a_server_that_dies_in_between_is_one_warning(tmp_path: Path, database: Path) -> None:
    warnings: list[str] = []
    machine = FakeMachine(tmp_path)
    runs = RunLog(f"sqlite:///{database}", warnings.append, PARAMS)

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
        RunLog(f"sqlite:///{tmp_path}/mlflow.db", lambda _: None, PARAMS),
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
    runs, gate = RunLog("http://server", lambda _: None, PARAMS), threading.Event()
    server: Any = SimpleNamespace(log=lambda *_run, **_what: gate.wait(30))
    runs._tracking = server
    begin = time.monotonic()
    runs.log_trials(SpecRun("run"), [], [Trial({}, reason="crash")], lambda us: ("rate", us))
    assert time.monotonic() - begin < 5
    runs._background.fail("enough")
    gate.set()


def test_a_run_that_has_its_winner_is_not_opened_again(database: Path) -> None:
    def opened(earlier: str | None) -> str | None:
        runs = RunLog(f"sqlite:///{database}", lambda _: None, PARAMS)
        setting = Setting.here(Workload.representative(SPEC))
        run = runs.start_spec(SPEC, TARGET, setting, 0, earlier=earlier)
        runs.close("FINISHED")
        return run.id

    finished = opened(None)
    assert finished is not None
    assert opened(finished) not in (None, finished)


def test_more_points_than_a_server_takes_at_once_all_reach_it() -> None:
    sent: list[list[Any]] = []
    client = SimpleNamespace(log_batch=lambda _run, metrics: sent.append(metrics))
    tracking: Any = SimpleNamespace(client=client)
    Tracking.log(tracking, "run", points=[("us", float(step), step) for step in range(250)])
    assert [len(each) for each in sent] == [MAX_BATCH, MAX_BATCH, 50]
    assert [each.step for batch in sent for each in batch] == list(range(250))


# --- where runs go -------------------------------------------------------------------------------


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
