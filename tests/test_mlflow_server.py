"""A real tracking server: what a login, a hang and a kill leave behind."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow_tools import Server, contents, forget_settings, log_folder, search, server
from tune_tools import SPEC, TARGET, FakeMachine

from tvmpaged import records
from tvmpaged.cli import app
from tvmpaged.mlflow_fetch import fetch
from tvmpaged.mlflow_sync import sync
from tvmpaged.tuning import mlflow_log, orphans
from tvmpaged.tuning.background import Background
from tvmpaged.tuning.log import read_searches
from tvmpaged.tuning.tracking import PARENT_TAG, Tracking


@pytest.fixture(autouse=True)
def own_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_settings(monkeypatch)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("server")) as made:
        yield made


def test_a_login_in_the_address_reaches_nothing_that_is_kept_or_printed(
    tmp_path: Path, real: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = real.uri.replace("://", "://me:hunter2@")
    warnings: list[str] = []
    run_id = search(tmp_path / "logged", uri, warnings=warnings)
    assert warnings == []
    assert run_id is not None
    search(tmp_path / "not", None)
    assert app.main(["mlflow-sync", str(tmp_path), "--mlflow-uri", uri, "--json"]) == 2
    for name in ("logged", "not"):
        assert app.main(["mlflow-sync", str(tmp_path / name), "--mlflow-uri", uri, "--json"]) == 0
    arguments = [str(tmp_path / "back"), "--mlflow-uri", uri, "--from-run", run_id]
    assert app.main(["mlflow-sync", *arguments, "--json"]) == 0
    out, err = capfd.readouterr()
    # Results alone stand on stdout, whatever a library would like to say there.
    decoder, index, printed = json.JSONDecoder(), 0, []
    while index < len(out):
        found, index = decoder.raw_decode(out, index)
        printed.append(found)
        index += 1
    assert [each["runs"][0]["state"] for each in printed[:2]] == ["complete", "uploaded"]
    assert "hunter2" not in out + err
    kept = [*tmp_path.rglob("*"), *real.folder.rglob("*")]
    texts = [each.read_bytes() for each in kept if each.is_file()]
    assert len(texts) > 10
    assert not any(b"hunter2" in text for text in texts)


def test_a_server_that_freezes_costs_the_search_nothing(
    tmp_path: Path, real: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_log, "ANSWER_TIMEOUT_S", 3.0)
    begin = time.monotonic()
    search(tmp_path / "alone", None)
    alone = time.monotonic() - begin
    machine, warnings = FakeMachine(tmp_path), []  # type: tuple[FakeMachine, list[str]]
    ended = []

    def fate(_choices: Any) -> None:
        ended.append(time.monotonic())
        if len(machine.measured) == 9:
            real.freeze()

    machine.fate = fate
    try:
        begin = time.monotonic()
        search(tmp_path / "logged", real.uri, machine, warnings)
        whole = time.monotonic() - begin
    finally:
        real.thaw()
    # All candidates were measured as if nothing were amiss, but for one moment of patience.
    assert ended[-1] - ended[0] < 2 * alone + mlflow_log.PATIENCE_S + 3.0
    assert whole < 2 * alone + 3.0 + mlflow_log.PATIENCE_S + 8.0
    assert len(warnings) == 1
    assert "no answer in time" in warnings[0]
    record = records.load(tmp_path / "logged", TARGET, SPEC)
    assert record is not None
    assert record.choices == records.load(tmp_path / "alone", TARGET, SPEC).choices  # type: ignore[union-attr]
    assert record.mlflow_run_id is not None
    # What it missed reaches it afterwards, in the run that it knows.
    (found,) = sync(tmp_path / "logged", real.uri)
    assert (found.run_id, found.state) == (record.mlflow_run_id, "uploaded")
    client = Tracking(real.uri).client
    held = contents(client, record.mlflow_run_id)
    assert held["status"] == "FINISHED"
    assert sum(1 for name, _ in held["metrics"] if name == "best_latency_us") == 24
    (found,) = fetch(tmp_path / "back", real.uri, [record.mlflow_run_id])
    assert found.files == ("trials.jsonl", "record.json")


def test_a_server_that_comes_late_names_the_run_while_it_is_searched(
    tmp_path: Path, real: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Background.settle
    monkeypatch.setattr(Background, "settle", lambda self, s: settle(self, min(s, 5.0)))
    machine = FakeMachine(tmp_path)

    def fate(_choices: Any) -> None:
        if len(machine.measured) == 1:
            real.freeze()
        if len(machine.measured) == 18:
            real.thaw()
            time.sleep(2)

    machine.fate = fate
    warnings: list[str] = []
    monkeypatch.setattr(mlflow_log.RunLog, "connect", lambda self: None)
    run_id = search(tmp_path, real.uri, machine, warnings)
    assert warnings == []
    assert run_id is not None
    (found,) = read_searches(log_folder(tmp_path) / "trials.jsonl")
    assert found.mlflow_run_id == run_id
    assert len(contents(Tracking(real.uri).client, run_id)["metrics"]) > 3 * 24


# --- runs that nobody writes any more ------------------------------------------------------------

CHILD = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from mlflow_tools import forget_settings, search
from tune_tools import FakeMachine
machine = FakeMachine(Path(sys.argv[1]))
def fate(_choices):
    if len(machine.measured) == 20:
        os.kill(os.getpid(), 9)
machine.fate = fate
search(Path(sys.argv[1]), sys.argv[3], machine)
"""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('orphans')}/mlflow.db"


def running(tracking: Tracking) -> set[str]:
    found = tracking.client.search_runs([tracking.experiment], "attributes.status = 'RUNNING'")
    return {each.info.run_id for each in found}


def test_what_a_kill_leaves_running_is_ended_by_resume(tmp_path: Path, database: str) -> None:
    tests = str(Path(__file__).parent)
    folder = tmp_path / "logs"
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), tests, database],
        capture_output=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr[-2000:]
    tracking = Tracking(database)
    left = running(tracking)
    assert len(left) == 2
    (cut,) = [each.mlflow_run_id for each in read_searches(log_folder(folder) / "trials.jsonl")]
    assert cut in left
    # Another command's run, killed before its log knew the name; one of a process that lives; one
    # of another machine.
    me = orphans.writer()
    gone = me.rsplit(" ", 1)[0] + " 1"
    other = "another-machine 1 1"
    ids = {
        tag: tracking.create_run("tune", {orphans.WRITER_TAG: tag}, {}) for tag in (me, gone, other)
    }
    # Without being asked nobody ends other commands' runs.
    search(tmp_path / "elsewhere", database)
    assert running(tracking) == {*left, *ids.values()}
    assert search(folder, database, resume=True) == cut
    assert running(tracking) == {ids[me], ids[other]}
    assert tracking.client.get_run(cut).info.status == "FINISHED"
    assert tracking.client.get_run(ids[gone]).info.status == "KILLED"
    steps = [step for name, step in contents(tracking.client, cut)["metrics"] if name[:4] == "best"]
    assert set(steps) == set(range(1, 25))


def test_where_nobody_knows_the_process_the_log_does(tmp_path: Path, database: str) -> None:
    """As in a container: each has a name of its own, and none of the processes is here."""
    tracking = Tracking(database)
    tag = {orphans.WRITER_TAG: "another-machine 17 4711"}
    parent, busy = (tracking.create_run("tune", tag, {}) for _ in range(2))
    mine, other, theirs = (
        tracking.create_run("decode", tag | {PARENT_TAG: above}, {})
        for above in (parent, busy, busy)
    )
    assert orphans.close_orphans(tracking, [mine, other]) == {mine, parent, other}
    assert running(tracking) == {busy, theirs}


def test_a_process_is_known_by_its_start_too() -> None:
    host, pid, started = orphans.writer().rsplit(" ", 2)
    assert orphans.is_alive(f"{host} {pid} {started}") is True
    assert orphans.is_alive(f"{host} {pid} {int(started) + 1}") is False
    assert orphans.is_alive(f"{host} 4194305 {started}") is False
    for strange in ("", "x", f"other {pid} {started}", f"{host} x {started}", "a b c d"):
        assert orphans.is_alive(strange) is None


def test_a_process_that_nobody_waited_for_is_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    tag = f"{orphans.writer().rsplit(' ', 2)[0]} {child.pid} {orphans._started(child.pid)}"
    try:
        assert orphans.is_alive(tag) is True
        child.kill()
        end = time.monotonic() + 10
        while orphans.is_alive(tag) and time.monotonic() < end:
            time.sleep(0.01)
        assert orphans.is_alive(tag) is False
    finally:
        child.kill()
        child.wait()
