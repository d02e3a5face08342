"""Exports: candidates for a machine that is elsewhere, whole or not there at all."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from import_tools import settings, take_in
from offline_tools import (
    BEST,
    FATES,
    KEYS,
    SPEC,
    TARGET,
    measured_export,
)
from tune_tools import FakeMachine

from tvmpaged import tune_offline
from tvmpaged.cli import app
from tvmpaged.errors import UserError
from tvmpaged.schedules import default_choices
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.export_manifest import (
    EXPORT_NAME,
    JOURNAL_NAME,
    RESULTS_NAME,
    read_export,
)
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.trial import Choices, choices_key
from tvmpaged.tuning.work import Settings

V3 = TargetKey("cpu", "x86-64-v3")


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return measured_export(tmp_path / "export")


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
    return settings(work_dir, num_kv_heads={SPEC: 3})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--export", "x", "--import-results", "y"), "give one of them"),
        (("--import-results", "y", "--dry-run"), "--dry-run"),
        (("--import-results", "y", "--group-size", "3", "--head-dim", "64"), "give none with it"),
        (("--export", "x", "--devices", "cuda:0"), "--devices measures here"),
        (("--import-results", "y", "--devices", "all"), "--devices measures here"),
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
