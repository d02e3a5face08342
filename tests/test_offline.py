"""A device without a compiler, tuned with real kernels: export, measure, import, package."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from offline_tools import (
    SPEC,
    TARGET,
    results,
)

from tvmpaged import records
from tvmpaged.bundle import read_manifest, trust
from tvmpaged.cli import app
from tvmpaged.package import package
from tvmpaged.tuning.export_manifest import (
    EXPORT_NAME,
    Export,
    encode,
    read_export,
)
from tvmpaged.tuning.trial import choices_key

ROOT = Path(__file__).parent.parent
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
