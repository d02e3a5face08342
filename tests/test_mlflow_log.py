"""What the search writes to MLflow, and in which run."""

import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from mlflow_tools import forget_settings, go_on, search, stop_after
from tune_tools import SPEC, TARGET, FakeMachine

from tvmpaged import records
from tvmpaged.tune import run_log
from tvmpaged.tuning.log import read_searches
from tvmpaged.tuning.mlflow_log import RunLog
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.tracking import (
    MAX_PARAM,
    spec_params,
)
from tvmpaged.tuning.work import Settings
from tvmpaged.tuning.workload import Workload


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_settings(monkeypatch)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of one database: to make its tables takes seconds."""
    return tmp_path_factory.mktemp("mlflow") / "runs" / "mlflow.db"


@pytest.fixture
def client(database: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{database}")


def test_a_run_holds_all_that_a_person_looks_for(
    tmp_path: Path, database: Path, client: Any
) -> None:
    def fate(choices: dict[str, Any]) -> Answer | None:
        crash = choices["split_length"] > 1024
        return Answer({}, "crash", "SIGSEGV") if crash else None

    warnings: list[str] = []
    (tmp_path / "winner.py").write_text("# the program")
    run_id = search(
        tmp_path,
        f"sqlite:///{database}",
        FakeMachine(tmp_path, fate),
        warnings,
        connected=False,
        params={"trials": 24, "specs": "x" * 10_000},
        explained=[tmp_path / "winner.py"],
    )
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
    machine, uri = stop_after(FakeMachine(tmp_path), 12), f"sqlite:///{database}"
    assert search(tmp_path, uri, machine, connected=False) is None
    log = records.folder(tmp_path, TARGET, SPEC) / "trials.jsonl"
    (cut,) = [each.mlflow_run_id for each in read_searches(log)]
    # Another machine finds its trials there.
    assert {each.path for each in client.list_artifacts(cut)} == {"trials.jsonl"}
    assert client.get_run(cut).info.status == "KILLED"
    # As kill -9 would have left it.
    client.update_run(cut, status="RUNNING")

    warnings: list[str] = []
    assert search(tmp_path, uri, go_on(machine), warnings, connected=False, resume=True) == cut
    assert warnings == []
    run = client.get_run(cut)
    assert run.info.status == "FINISHED"
    assert client.get_run(run.data.tags["mlflow.parentRunId"]).info.status == "FINISHED"
    steps = [each.step for each in client.get_metric_history(cut, "best_latency_us")]
    assert sorted(steps) == list(range(1, 25))
    # It has its winner now, so the next one gets a run of its own.
    assert search(tmp_path, uri, machine, warnings, connected=False, resume=True) != cut
    assert warnings == []


def test_the_experiment_is_named_by_the_environment(
    tmp_path: Path, database: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    run_id = search(tmp_path, f"sqlite:///{database}", connected=False)
    found = client.get_experiment(client.get_run(run_id).info.experiment_id)
    assert found.name == "mine"


def test_two_commands_may_start_on_one_new_database(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    warnings: list[str] = []
    threads = [
        threading.Thread(
            target=search,
            args=(tmp_path / name, uri, None, warnings),
            kwargs={"connected": False},
        )
        for name in "ab"
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert warnings == []
    with sqlite3.connect(tmp_path / "new/mlflow.db") as database:
        (count,) = database.execute("select count(*) from runs").fetchone()
    assert count == 4


def test_a_login_is_in_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@server")
    runs = run_log([SPEC], TARGET, Settings(), lambda _: None)
    assert runs is not None
    setting = Setting.here(Workload.representative(SPEC)).as_dict()
    assert "hunter2" not in f"{runs._params} {spec_params(SPEC, TARGET, setting, 0)}"


def test_a_run_that_has_its_winner_is_not_opened_again(database: Path) -> None:
    def opened(earlier: str | None) -> str | None:
        runs = RunLog(f"sqlite:///{database}", lambda _: None, {})
        setting = Setting.here(Workload.representative(SPEC))
        run = runs.start_spec(SPEC, TARGET, setting, 0, earlier=earlier)
        runs.close("FINISHED")
        return run.id

    finished = opened(None)
    assert finished is not None
    assert opened(finished) not in (None, finished)
