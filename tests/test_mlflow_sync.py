"""What a tracking server missed reaches it afterwards, once."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mlflow_tools import contents, forget_settings, go_on, log_folder, search, stop_after
from tune_tools import SPEC, TARGET, FakeMachine

from tvmpaged import mlflow_sync
from tvmpaged.cli import app
from tvmpaged.mlflow_sync import Synced, sync
from tvmpaged.tuning import log as trial_log
from tvmpaged.tuning import orphans
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import open_log
from tvmpaged.tuning.orphans import WRITER_TAG
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.tracking import PARENT_TAG, Tracking

NOTHING = {"params": 0, "tags": 0, "metrics": 0, "files": 0}


@pytest.fixture(autouse=True)
def own_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up times are always the same, so all tests' searches are one search to the server."""
    forget_settings(monkeypatch)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('sync')}/mlflow.db"


@pytest.fixture(scope="module")
def client(uri: str) -> Any:
    return Tracking(uri).client


def num_runs(client: Any) -> int:
    experiment = client.get_experiment_by_name(os.environ["MLFLOW_EXPERIMENT_NAME"]).experiment_id
    return len(client.search_runs([experiment]))


def sync_one(root: Path, uri: str, **settings: Any) -> Synced:
    (found,) = sync(root, uri, **settings)
    return found


def test_what_was_searched_without_a_server_is_there_as_if_it_had_been_logged(
    tmp_path: Path, uri: str, client: Any
) -> None:
    def fate(choices: dict[str, Any]) -> Answer | None:
        return Answer({}, "crash", "SIGSEGV") if choices["split_length"] > 1024 else None

    logged = search(tmp_path / "logged", uri, FakeMachine(tmp_path, fate))
    search(tmp_path / "not", None, FakeMachine(tmp_path, fate))
    assert logged is not None
    found = sync_one(tmp_path / "not", uri)
    assert (found.state, found.spec, found.target) == ("uploaded", str(SPEC), str(TARGET))
    assert found.run_id is not None
    first, second = contents(client, logged), contents(client, found.run_id)
    first["files"] = {
        name: size for name, size in first["files"].items() if name in second["files"]
    }
    sizes = [{**each["files"], "trials.jsonl": 0, "record.json": 0} for each in (first, second)]
    assert sizes[0] == sizes[1]
    assert {**first, "files": 0} == {**second, "files": 0}
    # And the one that was logged as it ran lacks nothing.
    assert sync_one(tmp_path / "logged", uri) == Synced(
        str(TARGET), str(SPEC), logged, "complete", NOTHING
    )


def test_a_second_time_nothing_is_sent(tmp_path: Path, uri: str, client: Any) -> None:
    search(tmp_path, None)
    first = sync_one(tmp_path, uri)
    assert first.run_id is not None
    count, held = num_runs(client), contents(client, first.run_id)
    again = sync_one(tmp_path, uri)
    assert again == Synced(str(TARGET), str(SPEC), first.run_id, "complete", NOTHING)
    assert (num_runs(client), contents(client, first.run_id)) == (count, held)


def test_a_run_that_a_server_lost_sight_of_is_completed(
    tmp_path: Path, uri: str, client: Any
) -> None:
    machine = stop_after(FakeMachine(tmp_path), 12)
    assert search(tmp_path, uri, machine) is None
    cut = sync_one(tmp_path, uri)
    assert cut.state == "complete"
    assert cut.run_id is not None
    assert contents(client, cut.run_id)["status"] == "KILLED"
    # It goes on without the server.
    search(tmp_path, None, go_on(machine), resume=True)
    found = sync_one(tmp_path, uri)
    assert (found.run_id, found.state) == (cut.run_id, "uploaded")
    held = contents(client, cut.run_id)
    assert held["status"] == "FINISHED"
    assert [step for name, step in held["metrics"] if name == "best_latency_us"] == [*range(1, 25)]
    assert set(held["files"]) == {"record.json", "summary.md", "trials.jsonl"}
    log = log_folder(tmp_path) / "trials.jsonl"
    assert held["files"]["trials.jsonl"] == log.stat().st_size
    assert sync_one(tmp_path, uri).state == "complete"


def test_a_search_that_was_cut_short_for_good_is_uploaded_too(
    tmp_path: Path, uri: str, client: Any
) -> None:
    with pytest.raises(GivenUpError):
        search(tmp_path, None, stop_after(FakeMachine(tmp_path), 12))
    found = sync_one(tmp_path, uri)
    assert found.run_id is not None
    assert contents(client, found.run_id)["status"] == "KILLED"
    assert set(contents(client, found.run_id)["files"]) == {"trials.jsonl"}
    assert sync_one(tmp_path, uri).added == NOTHING
    # Two searches under one roof: this one came to its end.
    search(tmp_path, None)
    states = [each.state for each in sync(tmp_path, uri)]
    assert states == ["complete", "uploaded"]


def test_an_upload_that_is_killed_goes_on_in_its_run(
    tmp_path: Path, uri: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(tmp_path, None)
    real = Tracking.log

    def log(self: Tracking, run_id: str, **what: Any) -> None:
        real(self, run_id, **what)
        if what.get("points"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tracking, "log", log)
        with pytest.raises(KeyboardInterrupt):
            sync(tmp_path, uri)
    count = num_runs(client)
    found = sync_one(tmp_path, uri)
    assert found.state == "uploaded"
    assert found.added == NOTHING | {"files": 3}
    assert num_runs(client) == count
    assert sync_one(tmp_path, uri).state == "complete"


def test_runs_of_a_command_that_lost_sight_of_the_server_are_ended(
    tmp_path: Path, uri: str, client: Any
) -> None:
    """It ended its own search in the log, and nothing on the server that was away."""
    server = Tracking(uri)
    me = orphans.writer()
    tags = {WRITER_TAG: me.rsplit(" ", 1)[0] + " 1"}
    done, cut, mine = (
        server.create_run("tune", each, {}) for each in (tags, tags, {WRITER_TAG: me})
    )
    search(tmp_path, None)
    log = log_folder(tmp_path) / "trials.jsonl"
    child = server.create_run(str(SPEC), tags | {PARENT_TAG: done}, {"spec": str(SPEC)})
    server.create_run(str(SPEC), tags | {PARENT_TAG: cut}, {})
    with open_log(log.parent) as held:
        held.track(child)
    assert sync_one(tmp_path, uri, dry_run=True).run_id == child
    assert client.get_run(done).info.status == "RUNNING"
    assert sync_one(tmp_path, uri).state == "uploaded"
    states = [client.get_run(each).info.status for each in (child, done, cut, mine)]
    assert states == ["FINISHED", "FINISHED", "KILLED", "RUNNING"]


def test_a_dry_run_writes_nothing(tmp_path: Path, uri: str, client: Any) -> None:
    search(tmp_path / "logs", None)
    count = len(client.search_experiments())
    found = sync_one(tmp_path / "logs", uri, dry_run=True)
    assert (found.state, found.run_id) == ("missing", None)
    assert found.added["files"] == 3
    assert len(client.search_experiments()) == count
    new = f"sqlite:///{tmp_path}/new/mlflow.db"
    assert sync_one(tmp_path / "logs", new, dry_run=True).state == "missing"
    assert not (tmp_path / "new").exists()


def test_a_run_that_somebody_deleted_stays_away(tmp_path: Path, uri: str, client: Any) -> None:
    search(tmp_path, None)
    logged = search(tmp_path, uri)
    client.delete_run(logged)
    states = {each.run_id: each.state for each in sync(tmp_path, uri)}
    assert states[logged] == "deleted"


def test_a_record_whose_log_is_gone_is_uploaded(tmp_path: Path, uri: str, client: Any) -> None:
    search(tmp_path, None)
    (log_folder(tmp_path) / "trials.jsonl").unlink()
    found = sync_one(tmp_path, uri)
    assert found.run_id is not None
    assert set(contents(client, found.run_id)["files"]) == {"record.json", "summary.md"}
    assert sync_one(tmp_path, uri).state == "complete"


def test_a_log_that_is_being_written_is_left_alone(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search(tmp_path, None)
    monkeypatch.setattr(trial_log, "LOCK_TIMEOUT_S", 0.1)
    with open_log(log_folder(tmp_path)):
        found = sync_one(tmp_path, uri)
    assert found.state == "failed"
    assert f"process {os.getpid()}" in found.failure


def run_cli(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = app.main(["mlflow-sync", *map(str, argv)])
    return code, *capsys.readouterr()


def test_a_server_that_is_down_is_told_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    search(tmp_path, None)
    before = {each: each.read_bytes() for each in log_folder(tmp_path).iterdir()}
    code, out, err = run_cli(capsys, tmp_path, "--mlflow-uri", "http://me:hunter2@127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "127.0.0.1:9 does not answer as it should: [Errno 111] Connection refused" in err
    assert "hunter2" not in err
    assert {each: each.read_bytes() for each in log_folder(tmp_path).iterdir()} == before


def test_the_command_prints_what_it_did(
    tmp_path: Path, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    search(tmp_path / "logs", None)
    code, out, _ = run_cli(capsys, tmp_path / "logs", "--mlflow-uri", uri, "--json")
    assert code == 0
    (run,) = json.loads(out)["runs"]
    assert run["state"] == "uploaded"
    code, out, err = run_cli(capsys, tmp_path / "logs", "--mlflow-uri", uri)
    assert "\tcomplete\t-\t" in out
    assert f"sync 1/1 {SPEC}" in err
    code, out, _ = run_cli(
        capsys, tmp_path / "new", "--mlflow-uri", uri, "--from-run", run["run_id"], "--json"
    )
    assert code == 0
    assert json.loads(out)["runs"][0]["files"] == ["trials.jsonl", "record.json"]


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--mlflow-uri", "sqlite:///none.db"), 1, "is no folder"),
        (("--mlflow-uri", "mlruns"), 2, "plain folder"),
        (("--dry-run", "--from-run", "1"), 2, "give one of the two"),
        (("--mlflow-uri", "sqlite:///none.db", "--from-run", "1"), 1, "is no database"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = run_cli(capsys, "logs", *flags)
    assert (found, out) == (code, "")
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_names_no_spec_is_told(tmp_path: Path, uri: str) -> None:
    (tmp_path / "cpu/x86-64-v3/other").mkdir(parents=True)
    (tmp_path / "cpu/x86-64-v3/other/trials.jsonl").touch()
    with pytest.raises(ValueError, match="spec='other'"):
        sync(tmp_path, uri)


def test_the_name_of_a_search_does_not_change_when_it_goes_on(tmp_path: Path) -> None:
    from tvmpaged.tuning.searches import folder_searches, search_key

    keys = []
    machine = FakeMachine(tmp_path)
    for count in (9, 17, 1000):
        with suppress(GivenUpError):
            search(tmp_path, None, stop_after(machine, count), resume=True)
        ((found, _),) = folder_searches(log_folder(tmp_path), TARGET, SPEC)
        keys.append(search_key(TARGET, SPEC, found))
        machine.stop = False
    assert len(set(keys)) == 1
    assert mlflow_sync.SEARCH_TAG == "tvmpaged.search"
