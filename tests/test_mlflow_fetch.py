"""A lost folder comes back from its run, checked before anything is written."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow_tools import forget_settings, go_on, log_folder, search, stop_after
from record_tools import edited, make_record
from tune_tools import SPEC, TARGET, FakeMachine, work

from tvmpaged import mlflow_fetch, records
from tvmpaged.errors import UserError
from tvmpaged.mlflow_fetch import check_log, fetch
from tvmpaged.mlflow_sync import sync
from tvmpaged.package import package
from tvmpaged.records import Record
from tvmpaged.tuning.log import read_searches
from tvmpaged.tuning.tracking import Tracking


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
