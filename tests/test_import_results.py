"""Taking in what another machine measured: into its log, its record and its run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from import_tools import take_in
from offline_tools import (
    BEST,
    FATES,
    KEYS,
    SPEC,
    TARGET,
    edit,
    legal_choices,
    measure_with_fakes,
    measured_export,
    trials,
    write_export,
)

from tvmpaged import records
from tvmpaged.records import Record
from tvmpaged.sources import source_sha256
from tvmpaged.tuning.export_manifest import (
    EXPORT_NAME,
    RESULTS_NAME,
    encode,
)
from tvmpaged.tuning.import_results import import_spec, read_results
from tvmpaged.tuning.mlflow_log import SpecRun
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.trial import Trial, choices_key


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured_export(tmp_path_factory.mktemp("offline") / "export")


@pytest.fixture
def measured(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "export")


def test_a_record_holds_for_the_device_it_was_measured_on(measured: Path, tmp_path: Path) -> None:
    record = take_in(measured, tmp_path / "logs")
    found = records.load(tmp_path / "logs", TARGET, SPEC)
    assert found is not None
    assert found.record_id == record.record_id
    assert (record.device, record.num_threads) == ("A CPU", 77)
    assert choices_key(record.choices) == KEYS[BEST]
    assert record.choices == legal_choices(len(FATES))[BEST]
    assert not record.is_default
    assert record.latency_us.median == pytest.approx(400)
    assert record.default_latency_us.median == pytest.approx(500)
    assert record.speedup == pytest.approx(1.25)
    assert record.source_sha256 == source_sha256("cpu")
    assert record.roof_fraction == 0.5
    assert record.trials == len(FATES)
    assert record.failures == {"crash": 1, "wrong": 1, "run": 1, "compile": 1}


def test_every_trial_is_in_the_log_with_its_time_or_its_reason(
    measured: Path, tmp_path: Path
) -> None:
    take_in(measured, tmp_path / "logs")
    found = {each.key: each for each in trials(tmp_path / "logs")}
    assert list(found) == KEYS
    for key, fate in zip(KEYS, FATES, strict=True):
        if fate.startswith("ok"):
            assert found[key].median_us == pytest.approx(float(fate.split()[1]), rel=0.01)
        else:
            assert found[key].reason == {"error": "run", "": "compile"}.get(fate, fate)
            assert found[key].detail


def test_the_same_results_twice_change_nothing(measured: Path, tmp_path: Path) -> None:
    first = take_in(measured, tmp_path / "logs")
    before = trials(tmp_path / "logs")
    again = take_in(measured, tmp_path / "logs")
    assert trials(tmp_path / "logs") == before
    log = records.folder(tmp_path / "logs", TARGET, SPEC) / "trials.jsonl"
    assert log.read_text().count('"kind": "trial"') == len(FATES)
    assert replace(again, record_id="", created_at="") == replace(
        first, record_id="", created_at=""
    )


def test_a_trial_of_the_log_that_no_search_would_try_does_not_count(
    measured: Path, tmp_path: Path
) -> None:
    take_in(measured, tmp_path / "logs")
    log = records.folder(tmp_path / "logs", TARGET, SPEC) / "trials.jsonl"
    lines = log.read_text().splitlines()
    last = max(index for index, line in enumerate(lines) if '"kind": "trial"' in line)
    strange = json.loads(lines[last])
    strange["choices"]["lanes"] = 0
    log.write_text("\n".join([*lines[: last + 1], json.dumps(strange), *lines[last + 1 :], ""]))
    assert len(trials(tmp_path / "logs")) == len(FATES) + 1
    assert take_in(measured, tmp_path / "logs").trials == len(FATES)


def test_times_of_a_later_round_are_given_by_the_first_rounds_default(
    measured: Path, tmp_path: Path
) -> None:
    take_in(measured, tmp_path / "logs")
    later = tmp_path / "later"
    # The device is half as fast today; the new candidate is 1.6 times as fast as the default.
    export = write_export(later, ["ok 1000", "ok 900"])
    (part,) = export.specs
    new = replace(part.candidates[1], choices=legal_choices(len(FATES) + 1)[-1])
    specs = (replace(part, candidates=(part.candidates[0], new)),)
    (later / EXPORT_NAME).write_bytes(encode(replace(export, specs=specs)))
    library = later / new.library.file  # type: ignore[union-attr]
    assert library.read_text() == "ok 900"
    measure_with_fakes(later)
    edit(later / RESULTS_NAME, lambda data: data["device"].update(name="A CPU", num_threads=77))
    record = take_in(later, tmp_path / "logs")
    found = {each.key: each for each in trials(tmp_path / "logs")}
    assert len(found) == len(FATES) + 1 == record.trials
    assert found[KEYS[0]].median_us == pytest.approx(500)
    assert found[new.key].median_us == pytest.approx(450)
    assert record.latency_us.median == pytest.approx(900)


class SlowRuns:
    """A tracking server that names a run only to those who wait for it."""

    def __init__(self) -> None:
        self.run = SpecRun()
        self.trials: list[Trial] = []
        self.record: Record | None = None

    def start_spec(self, spec: Any, target: Any, setting: Setting, seed: int) -> SpecRun:
        assert (setting.device, seed) == ("A CPU", 0)
        return self.run

    def log_trials(self, run: SpecRun, before: Any, batch: list[Trial], rate: Any) -> None:
        self.trials += batch

    def settle(self) -> None:
        self.run.id = "run"

    def id_of(self, run: SpecRun) -> str | None:
        return run.id

    def finish_spec(self, run: SpecRun, record: Record, files: Any) -> None:
        self.record = record


def test_runs_are_logged_and_the_record_names_its_own(measured: Path, tmp_path: Path) -> None:
    runs: Any = SlowRuns()
    source, found = read_results(measured)
    record = import_spec(source.export.specs[0], source, found, tmp_path / "logs", runs)
    assert record.mlflow_run_id == "run"
    assert runs.record == record
    assert [each.key for each in runs.trials] == KEYS
