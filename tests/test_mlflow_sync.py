"""What was missed reaches the server once; what was lost here comes back, checked."""

import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow_tools import contents, log_folder, search
from record_tools import edited, make_record
from tune_tools import SPEC, TARGET, FakeMachine, work

from tvmpaged import mlflow_fetch, mlflow_sync, records
from tvmpaged.cli import app
from tvmpaged.errors import UserError
from tvmpaged.mlflow_fetch import check_log, fetch
from tvmpaged.mlflow_sync import Synced, sync
from tvmpaged.package import package
from tvmpaged.records import Record
from tvmpaged.tuning import log as trial_log
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import open_log, read_searches
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.tracking import Tracking

NOTHING = {"params": 0, "tags": 0, "metrics": 0, "files": 0}


@pytest.fixture(autouse=True)
def own_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up times are always the same, so all tests' searches are one search to the server."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "TVMPAGED_")):
            monkeypatch.delenv(name)
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


def stop_after(machine: FakeMachine, count: int) -> FakeMachine:
    def fate(_choices: Any) -> Answer | None:
        machine.stop = len(machine.measured) >= count
        return Answer({}, "interrupted", "interrupted") if machine.stop else None

    machine.fate = fate
    return machine


def go_on(machine: FakeMachine) -> FakeMachine:
    machine.stop, machine.fate = False, lambda _choices: None
    return machine


# --- to the server -------------------------------------------------------------------------------


def test_what_was_searched_without_a_server_is_there_as_if_it_had_been_logged(
    tmp_path: Path, uri: str, client: Any
) -> None:
    def fate(choices: dict[str, Any]) -> Answer | None:
        return Answer({}, "crash", "SIGSEGV") if choices["lanes"] == 8 else None

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


# --- from the server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, uri: str) -> tuple[Path, str]:
    """Return the folder and the run's id of a search that was logged."""
    folder = tmp_path_factory.mktemp("logged")
    run_id = search(folder, uri)
    assert run_id is not None
    return folder, run_id


@pytest.mark.parametrize("which", ["spec", "command"])
def test_a_lost_folder_is_rebuilt_from_its_run(
    tmp_path: Path, uri: str, client: Any, logged: tuple[Path, str], which: str
) -> None:
    before, run_id = logged
    parent = client.get_run(run_id).data.tags["mlflow.parentRunId"]
    (found,) = fetch(tmp_path, uri, [run_id if which == "spec" else parent])
    assert (found.run_id, found.failure) == (run_id, "")
    for name in ("trials.jsonl", "record.json", "summary.md"):
        assert (log_folder(tmp_path) / name).read_text().splitlines()[:3] == (
            log_folder(before) / name
        ).read_text().splitlines()[:3]
    assert (log_folder(tmp_path) / "record.json").read_bytes() == (
        log_folder(before) / "record.json"
    ).read_bytes()
    # It is a log like any other: the search goes on where it was.
    machine = FakeMachine(tmp_path)
    record = work(machine, tmp_path, trials=24, resume=True).run()
    assert record.choices == records.load(before, TARGET, SPEC).choices  # type: ignore[union-attr]
    assert len(machine.measured) == 3  # the finalists
    # What has gone on since is kept.
    (again,) = fetch(tmp_path, uri, [run_id])
    assert (again.files, again.unchanged) == ((), ("trials.jsonl", "record.json"))
    assert records.load(tmp_path, TARGET, SPEC).record_id == record.record_id  # type: ignore[union-attr]


def build_from_choices(spec: Any, target: Any, choices: dict[str, Any], path: Path) -> None:
    """Stand for the compiler: what is built depends on what it is given, and on nothing else."""
    path.write_bytes(b"\x7fELF" + json.dumps([str(spec), str(target), choices]).encode())


def test_package_builds_the_same_kernel_from_it(
    tmp_path: Path, uri: str, logged: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What stands for the compiler makes nothing that runs.
    monkeypatch.setattr("tvmpaged.package.try_out", lambda *_: ({}, ""))
    before, run_id = logged
    fetch(tmp_path / "logs", uri, [run_id])
    taken, unchanged = (
        package(
            [SPEC],
            [TARGET],
            tmp_path / "bundle",
            records_dir=folder,
            compile_with=build_from_choices,
        )[0].merge
        for folder in (before, tmp_path / "logs")
    )
    assert [each.kind for each in taken.taken] == ["tuned"]
    # The same choices, sources, record and tools: the same artifact.
    assert (unchanged.taken, unchanged.unchanged) == ((), taken.taken)


def test_what_was_cut_short_comes_back_without_a_record(
    tmp_path: Path, uri: str, client: Any
) -> None:
    machine = stop_after(FakeMachine(tmp_path), 12)
    search(tmp_path / "one", uri, machine)
    (cut,) = sync(tmp_path / "one", uri)
    assert cut.run_id is not None
    (found,) = fetch(tmp_path / "two", uri, [cut.run_id])
    assert found.files == ("trials.jsonl",)
    go_on(machine).measured.clear()
    (search_there,) = read_searches(log_folder(tmp_path / "two") / "trials.jsonl")
    record = work(machine, tmp_path / "two", trials=24, resume=True).run()
    assert record.trials == 24
    assert len(machine.measured) == 24 - len(search_there.trials) + 3


def test_what_is_here_and_differs_is_never_replaced(
    tmp_path: Path, uri: str, logged: tuple[Path, str]
) -> None:
    search(tmp_path, None, seed=1)
    held = {each: each.read_bytes() for each in log_folder(tmp_path).iterdir()}
    (found,) = fetch(tmp_path, uri, [logged[1]])
    assert "trials.jsonl is here already and differs" in found.failure
    held.pop(log_folder(tmp_path) / ".lock")
    assert all(each.read_bytes() == data for each, data in held.items())


def test_a_run_of_no_spec_and_no_run_at_all_are_told(tmp_path: Path, uri: str, client: Any) -> None:
    other = client.create_run("0").info.run_id
    (found,) = fetch(tmp_path, uri, [other])
    assert "it is the run of no spec" in found.failure
    with pytest.raises(UserError, match="not found"):
        fetch(tmp_path, uri, ["0" * 32])
    assert list(tmp_path.iterdir()) == []


class Stranger:
    """A server's client that sends what it likes."""

    def __init__(self, files: dict[str, bytes], params: dict[str, str], size: int = 10) -> None:
        self.files = files
        self.size = size
        self.run = SimpleNamespace(
            info=SimpleNamespace(run_id="r", experiment_id="1"),
            data=SimpleNamespace(params=params, tags={}),
        )

    def get_run(self, run_id: str) -> Any:
        return self.run

    def search_runs(self, *args: Any) -> list[Any]:
        return []

    def list_artifacts(self, run_id: str) -> list[Any]:
        return [
            SimpleNamespace(path=name, is_dir=False, file_size=self.size) for name in self.files
        ]

    def download_artifacts(self, run_id: str, path: str, folder: str) -> None:
        if self.files[path] == b"a link":
            (Path(folder) / path).symlink_to("/etc/passwd")
        else:
            (Path(folder) / path).write_bytes(self.files[path])


PARAMS = {"spec": str(SPEC), "target": str(TARGET)}
RECORD = make_record(target=TARGET)


def as_bytes(record: Record, **changes: Any) -> bytes:
    return json.dumps(edited(record, **changes)).encode()


@pytest.mark.parametrize(
    ("files", "params", "said"),
    [
        ({"../record.json": b""}, {}, "leaves its folder"),
        ({"/etc/cron.d/x": b""}, {}, "leaves its folder"),
        ({"a/../../trials.jsonl": b""}, {}, "leaves its folder"),
        ({"..\\record.json": b""}, {}, "leaves its folder"),
        ({"record.json": b"a link"}, {}, "sent no file"),
        ({"record.json": b"{"}, {}, "is no record"),
        ({"record.json": b"\x80\x04K\x01."}, {}, "is no record"),
        ({"record.json": as_bytes(RECORD, schema_version=99)}, {}, "schema version 99"),
        ({"record.json": as_bytes(RECORD, choices={"lanes": ["x"]})}, {}, "neither numbers nor"),
        ({"record.json": as_bytes(make_record())}, {"target": "cpu/znver5"}, "is the record of"),
        ({"trials.jsonl": b"\x80\x04K\x01."}, {}, "holds no run"),
        ({"winner.py": b"import os"}, {}, "neither log nor record"),
        ({"record.json": as_bytes(RECORD)}, {"spec": "../../x"}, "cannot be read"),
        ({"record.json": as_bytes(RECORD)}, {"target": "cpu/../../x"}, "cannot be read"),
        ({"record.json": as_bytes(RECORD)}, {"target": "cpu/.."}, "cannot be read"),
    ],
)
def test_what_a_stranger_sends_is_checked_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, bytes],
    params: dict[str, str],
    said: str,
) -> None:
    server = SimpleNamespace(client=Stranger(files, PARAMS | params))
    monkeypatch.setattr(mlflow_fetch, "connect", lambda uri, create: server)
    (found,) = fetch(tmp_path / "a/b/c", "http://server", ["r"])
    assert said in found.failure
    assert found.files == ()
    assert list(tmp_path.iterdir()) == []


def test_what_a_stranger_sends_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Stranger({"record.json": as_bytes(RECORD)}, PARAMS, mlflow_fetch.MAX_BYTES + 1)
    monkeypatch.setattr(mlflow_fetch, "connect", lambda u, create: SimpleNamespace(client=client))
    (found,) = fetch(tmp_path, "http://server", ["r"])
    assert "bytes; allowed" in found.failure


def test_a_record_of_other_sources_is_shown_as_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvmpaged.show import show_records

    client = Stranger({"record.json": as_bytes(RECORD)}, PARAMS)
    monkeypatch.setattr(mlflow_fetch, "connect", lambda u, create: SimpleNamespace(client=client))
    (found,) = fetch(tmp_path, "http://server", ["r"])
    assert found.files == ("record.json",)
    ((row,), _) = show_records(tmp_path)
    assert row.state == "stale"


@pytest.fixture
def lines(tmp_path: Path) -> list[dict[str, Any]]:
    search(tmp_path, None, trials=8)
    text = (log_folder(tmp_path) / "trials.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_log_is_checked_line_by_line(lines: list[dict[str, Any]]) -> None:
    def check(changed: list[Any], tail: str = "") -> None:
        check_log(("\n".join(map(json.dumps, changed)) + tail).encode())

    check(lines)
    check(lines, '\n{"kind": "tri')  # torn
    check([*lines, {"kind": "a word of a later version"}])
    lines = [each for each in lines if each["kind"] != "roof"]
    first, trial = lines[0], lines[1]
    for number, wrong, said in [
        (1, first | {"schema_version": 2}, "schema version 2"),
        (1, first | {"setting": first["setting"] | {"num_threads": 99}}, "not the one"),
        (1, {name: each for name, each in first.items() if name != "setting"}, "'setting'"),
        (2, trial | {"reason": "bad weather"}, "either"),
        (2, {"kind": "trial", "choices": {}, "reason": "bad weather"}, "bad weather"),
        (2, trial | {"choices": 3}, "line 2"),
        (2, trial | {"latency_us": {"median": 1}}, "line 2"),
        (2, [1], "line 2"),
    ]:
        changed: list[Any] = list(lines)
        changed[number - 1] = wrong
        with pytest.raises(ValueError, match=said):
            check(changed)
    with pytest.raises(ValueError, match="holds no run"):
        check(lines[1:])


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
