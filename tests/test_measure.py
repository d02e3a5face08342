"""Measuring an export without a compiler: what is refused, recorded and never done twice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from offline_tools import (
    BEST,
    FATES,
    SPEC,
    TARGET,
    edit,
    fake_devices,
    journal,
    legal_choices,
    measure_with_fakes,
    results,
    write_export,
)

from tvmpaged import measure
from tvmpaged.bundle import Host, host_for
from tvmpaged.cli import app
from tvmpaged.errors import UserError
from tvmpaged.measure import Measurement
from tvmpaged.spec import TargetKey
from tvmpaged.tuning import log
from tvmpaged.tuning.export_manifest import EXPORT_NAME, JOURNAL_NAME, RESULTS_NAME
from tvmpaged.tuning.log import locked
from tvmpaged.tuning.task import CONFIRMATIONS
from tvmpaged.tuning.trial import choices_key

pytestmark = pytest.mark.runtime

KEYS = [choices_key(each) for each in legal_choices(len(FATES))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Measurement]:
    folder = tmp_path_factory.mktemp("measured") / "export"
    write_export(folder)
    return folder, measure_with_fakes(folder)


def test_the_best_that_is_right_wins_and_failures_keep_their_reasons(
    measured: tuple[Path, Measurement],
) -> None:
    (found,) = measured[1].specs
    assert found.result is not None
    assert choices_key(found.result.choices) == KEYS[BEST]
    assert found.result.speedup == pytest.approx(500 / 400)
    assert found.failures == {"crash": 1, "wrong": 1, "run": 1, "compile": 1}
    assert found.trials == len(FATES)


def test_an_odd_reply_is_its_candidates_failure_and_no_others(tmp_path: Path) -> None:
    write_export(tmp_path / "export", ["ok 500", "odd", "early", "ok 400", "ok 450"])
    (found,) = measure_with_fakes(tmp_path / "export").specs
    assert found.failures == {"crash": 2}
    assert found.result is not None
    assert choices_key(found.result.choices) == KEYS[3]
    assert found.result.speedup == pytest.approx(500 / 400)
    details = [each["detail"] for each in journal(tmp_path / "export") if each["reason"]]
    assert details == ["its answer is none: {}", "its answer is none: {'samples': [1]}"]


def test_results_hold_every_time_and_error_and_the_digest_of_what_was_loaded(
    measured: tuple[Path, Measurement],
) -> None:
    folder, found = measured
    data = results(folder)
    exported = json.loads((folder / EXPORT_NAME).read_bytes())["specs"][0]["candidates"]
    digests = {each["key"]: each["library"]["sha256"] for each in exported if each["library"]}
    passed = set()
    for answer in data["answers"]:
        assert answer["sha256s"] == [digests[key] for key in answer["keys"]]
        for key, sample in zip(answer["keys"], answer["reply"].get("samples", []), strict=False):
            assert len(sample["times_us"]) >= 5
            passed.add(key)
        for checks in answer["reply"].get("checks", []):
            assert all(each["error"] <= each["limit"] for each in checks)
    assert passed == {KEYS[index] for index, fate in enumerate(FATES) if fate.startswith("ok")}
    assert data["device"]["name"] == found.device.name
    assert data["device"]["num_threads"] >= 1
    assert data["measured_with"]["torch"]
    finals = [each["keys"] for each in data["answers"] if each["phase"] == "finalists"]
    assert finals == [[KEYS[0], KEYS[BEST], KEYS[7], KEYS[1]]]


def changed_byte(folder: Path) -> None:
    file = sorted(folder.glob("decode*.so"))[2]
    file.write_bytes(file.read_bytes() + b" ")


def link(folder: Path) -> None:
    file = sorted(folder.glob("decode*.so"))[2]
    file.rename(folder.parent / "elsewhere.so")
    file.symlink_to(folder.parent / "elsewhere.so")


def missing(folder: Path) -> None:
    sorted(folder.glob("decode*.so"))[2].unlink()


def writable(folder: Path) -> None:
    sorted(folder.glob("decode*.so"))[2].chmod(0o666)


def manifest(change: Any) -> Any:
    def spoil(folder: Path) -> None:
        edit(folder / EXPORT_NAME, lambda data: change(data, data["specs"][0]["candidates"][1]))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (changed_byte, r"\.so has sha256 [0-9a-f]{64}, its manifest says"),
        (link, "is a symbolic link"),
        (missing, "cannot be opened: No such file"),
        (writable, "may be written by group and others"),
        (manifest(lambda d, c: c["library"].update(file="../x.so")), "without folders"),
        (manifest(lambda d, c: c["library"].update(file="/tmp/x.so")), "without folders"),
        (manifest(lambda d, c: d.update(schema_version=99)), "has schema version 99"),
        (manifest(lambda d, c: d.update(more=1)), "unknown fields: more"),
        (manifest(lambda d, c: d.pop("seed")), "seed is missing"),
        (manifest(lambda d, c: c["choices"].update(lanes=1.5)), "must be an int or a str"),
        (manifest(lambda d, c: c["choices"].update(lanes=3)), "is not that of its choices"),
        (manifest(lambda d, c: c.update(library=None)), "neither a library nor why"),
        (manifest(lambda d, c: d["header"].update(target="cpu/../x")), "cannot be read"),
    ],
)
def test_what_is_not_as_it_was_exported_is_refused_before_anything_runs(
    tmp_path: Path, spoil: Any, said: str
) -> None:
    folder = tmp_path / "export"
    write_export(folder, FATES[:3])
    spoil(folder)
    with pytest.raises(UserError, match=said):
        measure_with_fakes(folder)
    assert not (folder / JOURNAL_NAME).exists()


def test_what_is_no_export_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tvmpaged tune --export DIR"):
        measure_with_fakes(tmp_path)


def test_an_export_for_another_machine_is_refused_by_name(tmp_path: Path) -> None:
    write_export(tmp_path / "export")
    here = host_for(TARGET)
    poor = Host(
        TargetKey("cpu", "x86-64-v3"), frozenset(), here.tvm_ffi_version, here.runtime_version
    )
    with pytest.raises(UserError, match=rf"exported for {TARGET} and cannot run here: needs a"):
        measure_with_fakes(tmp_path / "export", host=poor)
    old = Host(TARGET, here.cpu_flags, "0.0.1", here.runtime_version)
    with pytest.raises(UserError, match=r"found tvm_ffi 0\.0\.1"):
        measure_with_fakes(tmp_path / "export", host=old)


def test_a_second_run_measures_nothing_again(measured: tuple[Path, Measurement]) -> None:
    folder, first = measured
    before = (folder / JOURNAL_NAME).read_bytes()
    assert len(journal(folder)) == len(results(folder)["answers"]) > 0
    again = measure_with_fakes(folder)
    assert (folder / JOURNAL_NAME).read_bytes() == before
    assert again.specs[0].as_dict() == first.specs[0].as_dict()


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_torn_last_line_costs_that_answer_only(
    measured: tuple[Path, Measurement], tmp_path: Path, cut: int
) -> None:
    folder = copy(measured[0], tmp_path)
    file = folder / JOURNAL_NAME
    whole = journal(folder)
    file.write_bytes(file.read_bytes()[:-cut])
    assert measure_with_fakes(folder).specs[0].as_dict() == measured[1].specs[0].as_dict()
    assert journal(folder) == whole


def copy(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "export"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_an_answer_that_nobody_should_believe_is_measured_again(
    measured: tuple[Path, Measurement], tmp_path: Path
) -> None:
    folder = copy(measured[0], tmp_path)
    file = folder / JOURNAL_NAME
    first, *rest = file.read_text().splitlines()
    spoiled = [json.loads(each) for each in rest]
    lying = next(each for each in spoiled if each["keys"][-1:] == [KEYS[1]])
    lying["reply"]["samples"][-1] |= {"times_us": [1.0] * 6, "speedup": 500.0}
    del lying["reply"]["checks"]
    file.write_text("\n".join([first, *map(json.dumps, spoiled)]) + "\n")
    assert measure_with_fakes(folder).specs[0].as_dict() == measured[1].specs[0].as_dict()
    honest = {(each["phase"], *each["keys"]): each for each in results(measured[0])["answers"]}
    for each in results(folder)["answers"]:
        assert each == honest[each["phase"], *each["keys"]]


def test_answers_of_other_circumstances_do_not_count(
    measured: tuple[Path, Measurement], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(measured[0], tmp_path)
    count = len(journal(folder))
    monkeypatch.setenv("TVMPAGED_NUM_THREADS", "1")
    measure_with_fakes(folder)
    assert len(journal(folder)) == 2 * count
    assert results(folder)["device"]["num_threads"] == 1
    assert len(results(folder)["answers"]) == count
    measure_with_fakes(folder, resume=False)
    assert len(journal(folder)) == count


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from offline_tools import measure_with_fakes
measure_with_fakes(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_goes_on_where_it_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "export"
    write_export(folder, ["ok 500", *(f"slow {400 + 10 * index}" for index in range(10))])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(Path(__file__).parent)],
        stderr=subprocess.DEVNULL,
    )
    file, end = folder / JOURNAL_NAME, time.monotonic() + 60
    while not file.exists() or file.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < end
        time.sleep(0.02)
    child.send_signal(number)
    code = child.wait(30)
    assert code == -number
    assert not (folder / RESULTS_NAME).exists()
    kept = journal(folder)
    assert 4 <= len(kept) < 11
    (found,) = measure_with_fakes(folder).specs
    assert found.result is not None
    assert found.result.latency_us.median == pytest.approx(400)
    after = journal(folder)
    assert after[: len(kept)] == kept
    asked = Counter((each["phase"], *each["keys"]) for each in after)
    # Nothing twice, but for the one that took the lead.
    assert sorted(asked.values()) == [1] * (len(asked) - 1) + [1 + CONFIRMATIONS]


def test_two_measurers_do_not_write_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_export(tmp_path / "export", FATES[:2])
    monkeypatch.setattr(log, "LOCK_TIMEOUT_S", 0.1)
    with (
        locked(tmp_path / "export"),
        pytest.raises(UserError, match=f"being written by process {os.getpid()}"),
    ):
        measure_with_fakes(tmp_path / "export")


def test_a_time_limit_still_ends_in_results(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    write_export(folder, ["ok 500", *(f"slow {400 + index}" for index in range(60))])
    begin = time.monotonic()
    (found,) = measure_with_fakes(folder, time_limit_s=2.0).specs
    assert time.monotonic() - begin < 15
    assert found.result is not None
    assert 2 <= found.trials < 61
    assert results(folder)["answers"][-2]["phase"] == "finalists"


def test_a_spec_whose_default_fails_is_a_failure_and_not_a_silence(tmp_path: Path) -> None:
    write_export(tmp_path / "export", ["crash", "ok 300"])
    (found,) = measure_with_fakes(tmp_path / "export").specs
    assert found.result is None
    assert "the untuned default cannot be measured" in found.failure
    assert "SIGSEGV" in found.failure


def test_the_command_prints_json_alone_and_plain_lines_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "measuring_processes", fake_devices)
    write_export(tmp_path / "export", FATES[:3])
    assert app.main(["measure", "export", "--json"]) == 0
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert printed["schema_version"] == measure.SCHEMA_VERSION
    assert printed["specs"][0]["winner"]["choices"] == legal_choices(2)[1]
    assert all(line.startswith(str(SPEC)) for line in err.splitlines()), err
    assert app.main(["measure", "export", "--time-limit", "soon"]) == 2
    assert app.main(["measure", "nowhere"]) == 1
    assert "Traceback" not in capsys.readouterr().err
