"""Tuning a device that is elsewhere: export, measure without a compiler, import, and again."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offline_tools import (
    BEST,
    FATES,
    SPEC,
    TARGET,
    edit,
    legal_choices,
    measure_with_fakes,
    results,
    write_export,
)
from tune_tools import FakeMachine

from tvmpaged import records, tune_offline
from tvmpaged.bundle import read_manifest, trust
from tvmpaged.cli import app
from tvmpaged.errors import UserError
from tvmpaged.package import package
from tvmpaged.records import Record
from tvmpaged.schedules import default_choices
from tvmpaged.sources import source_sha256
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.export_manifest import (
    EXPORT_NAME,
    JOURNAL_NAME,
    RESULTS_NAME,
    Export,
    encode,
    read_export,
)
from tvmpaged.tuning.import_results import import_spec, read_results
from tvmpaged.tuning.log import LOG_NAME, read_searches
from tvmpaged.tuning.mlflow_log import SpecRun
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.work import Settings

ROOT = Path(__file__).parent.parent
KEYS = [choices_key(each) for each in legal_choices(len(FATES))]
V3 = TargetKey("cpu", "x86-64-v3")


def settings(work_dir: Path, **more: Any) -> Settings:
    return Settings(**{"trials": 12, "work_dir": work_dir, "use_mlflow": False, **more})


def take_in(folder: Path, work_dir: Path) -> Record:
    """Import the results of a single spec."""
    (tuned,) = tune_offline.import_results(folder, settings(work_dir))
    assert tuned.record is not None, tuned.failure
    return tuned.record


def trials(work_dir: Path) -> list[Trial]:
    last = read_searches(records.folder(work_dir, TARGET, SPEC) / LOG_NAME)[-1]
    return list(last.trials.values())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export that was measured by a made-up device of another name."""
    folder = tmp_path_factory.mktemp("offline") / "export"
    write_export(folder)
    measure_with_fakes(folder)
    edit(folder / RESULTS_NAME, lambda data: data["device"].update(name="A CPU", num_threads=77))
    return folder


@pytest.fixture
def measured(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "export")


# --- import --------------------------------------------------------------------------------------


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


def answer(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes the first answer that says that a candidate beside the default passed."""

    def spoil(folder: Path) -> None:
        def each(data: Any) -> None:
            change(next(a for a in data["answers"] if a["keys"] == [KEYS[0], KEYS[1]]))

        edit(folder / RESULTS_NAME, each)

    return spoil


def sample(**changes: Any) -> Callable[[Path], None]:
    return answer(lambda a: a["reply"]["samples"][1].update(changes))


def check(value: Any) -> Callable[[Path], None]:
    return answer(lambda a: a["reply"]["checks"][1][3].update(error=value))


def roof(**changes: Any) -> Callable[[Path], None]:
    def change(data: Any) -> None:
        for each in data["answers"]:
            if each["phase"] == "roof":
                each["reply"]["roof"].update(changes)

    return lambda folder: edit(folder / RESULTS_NAME, change)


def whole(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / RESULTS_NAME, change)


def exported(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes the manifest, and makes the results say that they are of this one."""

    def spoil(folder: Path) -> None:
        edit(folder / EXPORT_NAME, change)
        digest = trust.sha256((folder / EXPORT_NAME).read_bytes())
        edit(folder / RESULTS_NAME, lambda data: data.update(export_sha256=digest))

    return spoil


def swap_choices(data: Any) -> None:
    first, second = data["specs"][0]["candidates"][:2]
    for name in ("key", "choices"):
        first[name], second[name] = second[name], first[name]


def choice(name: str, value: Any) -> Callable[[Path], None]:
    """Return what changes, or adds, an option of the last candidate."""

    def change(data: Any) -> None:
        last = data["specs"][0]["candidates"][-1]
        last["choices"][name] = value
        last["key"] = choices_key(last["choices"])

    return exported(change)


def pickled(folder: Path) -> None:
    """Write the same results as what runs code when it is read."""
    file = folder / RESULTS_NAME
    file.write_bytes(pickle.dumps(json.loads(file.read_bytes())))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (answer(lambda a: a["reply"].pop("samples")), "says that 2 candidates passed, and has no"),
        (answer(lambda a: a["reply"]["samples"].pop()), "has no times of each"),
        (sample(times_us=[]), "at least 5 times"),
        (sample(times_us=[400.0] * 4), "at least 5 times"),
        (sample(times_us=[450.0] * 5 + [-1.0]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + [0]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + [True]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + ["450"]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + [float("inf")]), "Infinity, which is no JSON"),
        (sample(times_us=[float("nan")] * 5), "NaN, which is no JSON"),
        (sample(speedup=9.0), "speedup=9 is not what its times say"),
        (sample(speedup=None), "speedup=None is no ratio"),
        (answer(lambda a: a["reply"]["samples"][0].update(speedup=1.01)), "speed-up is not 1"),
        (sample(disturbed=-1), "disturbed=-1"),
        (answer(lambda a: a["reply"].pop("checks")), "has no errors of each"),
        (answer(lambda a: a["reply"]["checks"][1].pop()), "not those of the checks"),
        (check(1.1e-5), "its error 1.1e-05 of 'sequence 2"),
        (check(-1.0), "its error -1.0"),
        (check(None), "its error None"),
        (check(float("nan")), "NaN, which is no JSON"),
        (answer(lambda a: a["sha256s"].reverse()), "another sha256 than what was exported"),
        (answer(lambda a: a.update(keys=["0" * 16])), "candidates that are not in the export"),
        (answer(lambda a: a.update(keys=[], sha256s=[])), "not in the export, or none"),
        (answer(lambda a: a.update(phase="last")), "phase 'last' is not known"),
        (roof(value=0), "no roof above 0"),
        (roof(fraction=-0.5), "fraction=-0.5 is none"),
        (roof(name="evil"), "its roof is not name='gb_per_s'"),
        (roof(name=["gb_per_s"]), "its roof is not name='gb_per_s'"),
        (roof(extra=1), "its roof is not name='gb_per_s'"),
        (answer(lambda a: a.update(spec="decode")), "its spec is not in the export"),
        (answer(lambda a: a.update(reason="tired")), "reason='tired' is not known"),
        (answer(lambda a: a.update(reason="interrupted")), "says nothing"),
        (answer(lambda a: a["reply"].update(wrong="")), "fails without saying why"),
        (whole(lambda d: d.update(schema_version=1)), "schema version 1"),
        (whole(lambda d: d.pop("device")), "device is missing"),
        (whole(lambda d: d["device"].update(num_threads=0)), "names no device, or no threads"),
        (whole(lambda d: d["device"]["caches_bytes"].update(L1="x")), "caches_bytes.L1='x' must"),
        (whole(lambda d: d["device"].update(caches_bytes={"L1": True})), "caches_bytes.L1=True"),
        (whole(lambda d: d["device"].update(rotation_bytes=-5)), "rotation_bytes=-5 must be"),
        (whole(lambda d: d.update(export_sha256="0" * 64)), "is of another export"),
        (exported(lambda d: d.update(source_sha256="0" * 64)), "other kernel sources.*again"),
        (exported(swap_choices), "first candidate is not the untuned default"),
        (choice("lanes", 0), "candidate [0-9a-f]{16}: lanes=0 is not in the space"),
        (choice("prefetch_keys", 10**9), "prefetch_keys=1000000000 is not in the space"),
        (choice("step", "sideways"), "step='sideways' is not in the space"),
        (choice("speed", 9), "its options are not those of the space"),
        (choice("dot_unroll", 3), "candidate [0-9a-f]{16}: dot_unroll=3 does not divide 8"),
        (lambda folder: (folder / RESULTS_NAME).unlink(), "run tvmpaged measure .* to its end"),
        (lambda folder: (folder / EXPORT_NAME).unlink(), "it is no export"),
        (lambda folder: os.truncate(folder / RESULTS_NAME, 1000), "is no JSON"),
        (pickled, "is no JSON"),
    ],
)
def test_what_is_not_credible_is_refused_and_leaves_no_trace(
    measured: Path, tmp_path: Path, spoil: Any, said: str
) -> None:
    spoil(measured)
    with pytest.raises(UserError, match=said) as refusal:
        tune_offline.import_results(measured, settings(tmp_path / "logs"))
    assert str(measured) in str(refusal.value)
    assert not (tmp_path / "logs").exists()


def test_a_hint_is_a_command_whatever_the_folder_is_called(tmp_path: Path) -> None:
    write_export(tmp_path / "cand é 1", FATES[:2])
    with pytest.raises(UserError, match=r"tvmpaged measure '.*/cand é 1' on"):
        read_results(tmp_path / "cand é 1")


@pytest.mark.parametrize("phase", ["search", "finalists"])
def test_results_that_lack_a_round_make_no_record(
    measured: Path, tmp_path: Path, phase: str
) -> None:
    def cut(data: Any) -> None:
        lost = next(each for each in data["answers"] if each["phase"] == phase)
        data["answers"].remove(lost)

    edit(measured / RESULTS_NAME, cut)
    (tuned,) = tune_offline.import_results(measured, settings(tmp_path / "logs"))
    assert tuned.record is None
    assert f"the results lack the {phase} round" in tuned.failure
    assert not (tmp_path / "logs").exists()


# --- export --------------------------------------------------------------------------------------


class FakeCompiler(FakeMachine):
    """Compiles choices to files that hold them."""

    @contextmanager
    def opened(self, *args: Any, **options: Any) -> Iterator["FakeCompiler"]:
        yield self

    def start(self) -> None:
        pass

    def path(self, spec: AttentionSpec, key: str) -> Path:
        return self.folder / str(spec) / f"{key}.so"

    def compile(self, spec: Any, target: Any, choices: Sequence[Choices]) -> list[Answer]:
        for each in choices:
            path = self.path(spec, choices_key(each))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{spec} {target} {each}")
        return super().compile(spec, target, choices)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    made = FakeCompiler(tmp_path / "machine")
    monkeypatch.setattr(tune_offline, "open_machine", made.opened)
    return made


def test_an_export_leads_with_the_default_and_names_each_file_by_its_digest(
    compiler: FakeCompiler, tmp_path: Path
) -> None:
    specs = [SPEC, AttentionSpec.make("prefill", "bfloat16", 128, 4, 16)]
    found = tune_offline.export(specs, V3, tmp_path / "x", settings(tmp_path / "logs"))
    assert [(each.spec, each.candidates, each.failures) for each in found] == [
        (spec, 12, 0) for spec in specs
    ]
    source = read_export(tmp_path / "x")
    assert source.export.header.target == V3
    assert "avx2" in source.export.header.cpu_features
    for each in source.export.specs:
        assert each.candidates[0].choices == default_choices(each.spec, V3)
    libraries = list(source.export.libraries())
    assert {file.name for file in (tmp_path / "x").iterdir()} == {
        EXPORT_NAME, *(each.file for each in libraries)
    }  # fmt: skip
    for each in libraries:
        assert len(source.read(each)) == each.size_bytes
    assert not list(tmp_path.glob(".x*"))


def test_what_does_not_compile_is_exported_with_its_reason(
    compiler: FakeCompiler, tmp_path: Path
) -> None:
    compiler.broken = lambda choices: choices.get("prefetch_keys") == 0
    (found,) = tune_offline.export([SPEC], TARGET, tmp_path / "x", settings(tmp_path / "logs"))
    assert found.failures >= 1
    assert found.candidates + found.failures == 12
    (part,) = read_export(tmp_path / "x").export.specs
    assert {each.reason for each in part.candidates if each.library is None} == {"compile"}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (TargetKey("cpu", "pentium99"), "target=cpu/pentium99 is not known"),
        (TargetKey("cuda", "sm_75", "tesla-t4"), "arch='sm_75' is not supported"),
    ],
)
def test_a_target_that_cannot_be_built_for_is_refused_by_name(
    compiler: FakeCompiler, tmp_path: Path, target: TargetKey, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        tune_offline.export([SPEC], target, tmp_path / "x", settings(tmp_path / "logs"))


def test_only_an_export_without_results_is_replaced(
    compiler: FakeCompiler, measured: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter.tex").write_text("years of work")
    for folder, said in ((mine, "is no export"), (measured, "holds results; take them in")):
        before = sorted(folder.iterdir())
        with pytest.raises(UserError, match=said):
            tune_offline.export([SPEC], TARGET, folder, settings(tmp_path / "logs"))
        assert sorted(folder.iterdir()) == before
    for name in (RESULTS_NAME, JOURNAL_NAME):
        with pytest.raises(UserError, match="holds results"):
            tune_offline.export([SPEC], TARGET, measured, settings(tmp_path / "logs"))
        (measured / name).unlink()
    tune_offline.export([SPEC], TARGET, measured, settings(tmp_path / "logs"))
    assert len(read_export(measured).export.specs[0].candidates) == 12
    assert sorted(each.name for each in tmp_path.iterdir()) == ["export", "machine", "thesis"]


@pytest.mark.parametrize("stop", ["signal", "full disk"])
def test_an_export_that_is_cut_short_leaves_no_folder(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    count, real = [0], os.fsync

    def full(descriptor: int) -> None:
        count[0] += 1
        if count[0] > 5:
            raise OSError(28, "No space left on device")
        real(descriptor)

    def interrupted(spec: Any, target: Any, choices: Sequence[Choices]) -> list[Answer]:
        return [Answer({}, "interrupted", "interrupted") for _ in choices]

    if stop == "signal":
        monkeypatch.setattr(compiler, "compile", interrupted)
        assert tune_offline.export([SPEC], TARGET, tmp_path / "x", settings(tmp_path)) == []
    else:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            tune_offline.export([SPEC], TARGET, tmp_path / "x", settings(tmp_path))
    assert {each.name for each in tmp_path.iterdir()} <= {"machine"}


def test_the_next_export_goes_on_from_what_was_taken_in(
    compiler: FakeCompiler, measured: Path, tmp_path: Path
) -> None:
    record = take_in(measured, tmp_path / "logs")
    (found,) = tune_offline.export([SPEC], TARGET, tmp_path / "x", with_heads(tmp_path / "logs"))
    assert found.known_trials == len(FATES)
    (part,) = read_export(tmp_path / "x").export.specs
    keys = [each.key for each in part.candidates]
    # The default, and the best so far once more; nothing else that is known.
    assert keys[:4] == [KEYS[0], KEYS[BEST], KEYS[7], KEYS[1]]
    assert not set(keys[4:]) & set(KEYS)
    assert keys[1] == choices_key(record.choices)
    # Of other workloads nothing is known.
    (other,) = tune_offline.export([SPEC], TARGET, tmp_path / "y", settings(tmp_path / "logs"))
    assert other.known_trials == 0


def with_heads(work_dir: Path) -> Settings:
    return settings(work_dir, num_kv_heads={3: 3})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--export", "x", "--import-results", "y"), "give one of them"),
        (("--import-results", "y", "--dry-run"), "--dry-run"),
        (("--import-results", "y", "--group-size", "3", "--head-dim", "64"), "give none with it"),
        (("--export", "x"), "no spec is given"),
    ],
)
def test_flags_that_contradict_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["tune", *flags]) == 2
    assert said in capsys.readouterr().err


# --- the whole way, with real kernels ------------------------------------------------------------

FLAGS = "--num-qo-heads 9 --num-kv-heads 3 --head-dim 64 --dtype float32 --kernel decode".split()
C_SOURCE = (
    "int __tvm_ffi_decode(void *self, const void *args, int count, void *result) {{ {} return 0; }}"
)
#: Position in the export -> what takes the candidate's place.
PLANTED = {1: "*(volatile int *)0 = 1;", 2: ""}


def measure_without_compiler(folder: Path) -> Any:
    """Run the command where the compiler cannot be imported; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tvmpaged", "measure", folder, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "ci" / "no_tvm")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def plant(folder: Path) -> Export:
    """Put libraries that crash and that are wrong in the place of exported candidates."""
    export = read_export(folder).export
    (part,) = export.specs
    candidates = list(part.candidates)
    for index, body in PLANTED.items():
        old = candidates[index].library
        assert old is not None
        source = folder.parent / f"{index}.c"
        source.write_text(C_SOURCE.format(body))
        (folder / old.file).unlink()
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / old.file, source], check=True)
        data = (folder / old.file).read_bytes()
        library = replace(old, sha256=trust.sha256(data), size_bytes=len(data))
        candidates[index] = replace(candidates[index], library=library)
    planted = replace(export, specs=(replace(part, candidates=tuple(candidates)),))
    (folder / EXPORT_NAME).write_bytes(encode(planted))
    return planted


def test_a_device_without_compiler_is_tuned_from_export_to_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert app.main(["tune", *FLAGS, "--trials", "4", "--export", "candidates"]) == 0
    assert "tvmpaged measure candidates" in capsys.readouterr().err
    export = plant(tmp_path / "candidates")
    (printed,) = measure_without_compiler(tmp_path / "candidates")["specs"]
    assert printed["failures"] == {"crash": 1, "wrong": 1}
    assert printed["trials"] == 4
    asked = {
        each["keys"][-1]: each
        for each in results(tmp_path / "candidates")["answers"]
        if each["phase"] == "search"
    }
    keys = [each.key for each in export.specs[0].candidates]
    assert "SIGSEGV" in asked[keys[1]]["detail"]
    assert "rows of out hold NaN" in asked[keys[2]]["reply"]["wrong"]
    assert app.main(["tune", "--import-results", "candidates", "--no-mlflow", "--json"]) == 0
    imported = json.loads(capsys.readouterr().out)
    record = records.load(tmp_path / "tuning_logs", TARGET, SPEC)
    assert record is not None
    assert imported["specs"][0]["record"]["record_id"] == record.record_id
    assert record.choices == printed["winner"]["choices"]
    assert choices_key(record.choices) in (keys[0], keys[3])
    assert record.latency_us.median == printed["winner"]["latency_us"]["median"]
    (packaged,) = package(
        [SPEC], [TARGET], tmp_path / "bundle", records_dir=tmp_path / "tuning_logs"
    )
    assert not packaged.failures
    artifact = read_manifest(tmp_path / "bundle", TARGET).find(SPEC)
    winner = export.specs[0].find(choices_key(record.choices))
    assert artifact is not None
    assert artifact.record_id == record.record_id
    # The very bytes that were measured.
    assert winner is not None
    assert winner.library is not None
    assert artifact.sha256 == winner.library.sha256
