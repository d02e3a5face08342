"""A GPU that is elsewhere: candidates compiled here, measured there, taken in here."""

import json
from collections import Counter
from pathlib import Path

import pytest
from gpu_tools import H200_TARGET, Program, gpu, gpus_here
from offline_tools import (
    BEST,
    FATES,
    SPEC,
    journal,
    legal_choices,
    measure_with_fakes,
    write_export,
)

from tvmpaged import measure, nvcc, records, tune_offline
from tvmpaged.cli import app
from tvmpaged.errors import UserError
from tvmpaged.freshness import CURRENT, ELSEWHERE
from tvmpaged.nvcc import MISSING, find_nvcc
from tvmpaged.recorded import note_on, state_of
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.export_manifest import RESULTS_NAME, read_export
from tvmpaged.tuning.starts import default_start
from tvmpaged.tuning.task import CONFIRMATIONS
from tvmpaged.tuning.work import Settings


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Program.write(tmp_path / "bin")


@pytest.fixture
def measured(tmp_path: Path, program: Program) -> Path:
    """An export that two made-up GPUs have measured."""
    folder = tmp_path / "export"
    write_export(folder, FATES, H200_TARGET)
    with gpus_here(gpu(), gpu(1)):
        found = measure_with_fakes(folder, devices=["cuda:1", "cuda:0"])
    assert found.device.name == "NVIDIA H200"
    return folder


def test_times_of_a_gpu_become_its_record(measured: Path, tmp_path: Path) -> None:
    settings = Settings(work_dir=tmp_path / "logs", use_mlflow=False)
    (found,) = tune_offline.import_results(measured, settings)
    record = found.record
    assert record is not None
    assert record.target == H200_TARGET
    assert record.choices == legal_choices(len(FATES), SPEC, H200_TARGET)[BEST]
    assert (record.device, record.num_threads) == ("NVIDIA H200", 132)
    assert record.caches_bytes == {"L2": 60 << 20}
    assert record.gpu is not None
    assert (record.gpu["clocks.sm"], record.gpu["pstate"]) == ("1980 MHz", "P0")
    assert record.gpu["other_processes"] == "0"
    kept = records.load(tmp_path / "logs", H200_TARGET, SPEC)
    assert kept is not None
    assert (kept.record_id, kept.gpu) == (record.record_id, record.gpu)
    folder = records.folder(tmp_path / "logs", H200_TARGET, SPEC)
    page = (folder / "summary.md").read_text()
    assert "NVIDIA H200 with 132 multiprocessors" in page
    assert "pstate P0" in page
    assert state_of(record) == ELSEWHERE
    assert note_on(record).endswith("with 132 multiprocessors; no such GPU is here")
    with gpus_here(gpu()):
        assert state_of(record) == CURRENT


def test_facts_that_are_no_text_are_not_believed(measured: Path) -> None:
    data = json.loads((measured / RESULTS_NAME).read_bytes())
    data["gpu"]["pstate"] = 0
    (measured / RESULTS_NAME).write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"results\.gpu\.pstate must be of type str"):
        tune_offline.import_results(measured, Settings(work_dir=measured / "logs"))


def test_all_is_asked_once_whichever_gpu_answers(measured: Path) -> None:
    """But for those that took the lead: who did hangs on which GPU was first."""
    asked = Counter((each["phase"], *each["keys"]) for each in journal(measured))
    assert set(asked.values()) <= {1, 1 + CONFIRMATIONS}
    assert all(each[0] == "search" for each, times in asked.items() if times > 1)


def test_a_gpu_that_is_not_here_or_busy_or_another_is_refused(
    tmp_path: Path, program: Program
) -> None:
    write_export(tmp_path / "export", FATES, H200_TARGET)
    with gpus_here(), pytest.raises(ValueError, match="the CUDA driver finds none"):
        measure.measure(tmp_path / "export")
    with gpus_here(gpu(0, "NVIDIA L4", (8, 9))), pytest.raises(ValueError, match="cuda:0 is cuda"):
        measure.measure(tmp_path / "export")
    program.computes(7)
    with gpus_here(gpu()), pytest.raises(UserError, match="other processes compute on cuda:0"):
        measure.measure(tmp_path / "export")
    with gpus_here(gpu()):
        found = measure_with_fakes(tmp_path / "export", allow_busy=True)
    data = json.loads(found.path.read_bytes())
    assert data["gpu"]["other_processes"] == "1"


@pytest.mark.skipif(find_nvcc() is None, reason=MISSING)
def test_candidates_for_a_gpu_are_compiled_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spec, odd = AttentionSpec.make("decode", "bfloat16", 64, 3, 16), "cuda/sm_103/nvidia-gb300"
    arguments = ["--target", odd, "--spec", str(spec), "--trials", "3", "--export", "x"]
    assert app.main(["tune", *arguments]) == 0
    assert "the limits of sm_103 are not known; those of sm_100" in capsys.readouterr().err
    source = read_export(tmp_path / "x")
    (found,) = source.export.specs
    assert source.export.header.sm_arch == "sm_103"
    assert found.workload.seq_lens[0] > 1024
    assert len(found.candidates) == 3
    assert found.candidates[0].choices == default_start(spec, TargetKey.parse(odd))
    for each in source.export.libraries():
        assert b"decode_kernel" in source.read(each) or b"merge_kernel" in source.read(each)


def test_without_nvcc_an_export_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: None)
    with pytest.raises(UserError, match="nvcc, NVIDIA's compiler, is missing: install"):
        tune_offline.export([SPEC], H200_TARGET, tmp_path / "x", Settings(work_dir=tmp_path))
    assert not (tmp_path / "x").exists()
