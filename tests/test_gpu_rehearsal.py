"""ci/gpu.sh from end to end on artifacts for this CPU: packed, carried, run, and taken home."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from tvmpaged import PagedAttention, records
from tvmpaged.cli import app
from tvmpaged.cpu import native_target
from tvmpaged.spec import AttentionSpec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SPECS = [AttentionSpec.make(kernel, "float32", 64, 3, 16) for kernel in ("decode", "prefill")]


def bash(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False, **more
    )


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that the first of this run's test processes makes for all."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder.with_suffix(".new"))
            folder.with_suffix(".new").rename(folder)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        flags = [part for spec in SPECS for part in ("--spec", str(spec))]
        done = bash("ci/gpu_pack.sh", folder, "--target", native_target(), "--trials", "3", *flags)
        assert done.returncode == 0, done.stderr
        assert "bash ci/gpu.sh" in done.stdout

    return once(tmp_path_factory, "gpu_pack", make)


@pytest.fixture(scope="module")
def ran(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a machine without compiler made of it: others may even write what was carried."""

    def make(out: Path) -> None:
        carried = out.with_name("gpu_carried")
        shutil.copytree(packed, carried)
        for file in carried.rglob("*"):
            file.chmod(0o777)
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(out.parent),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT / "ci" / "no_tvm"),
        }
        flags = ["--out", out, "--device", "cpu", "--minutes", "4"]
        done = bash("ci/gpu.sh", carried, *flags, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (out / "table.txt").read_text() in done.stdout

    return once(tmp_path_factory, "gpu_ran", make)


def step(out: Path, name: str) -> dict[str, Any]:
    report = json.loads((out / "report.json").read_text())
    (found,) = [each for each in report["steps"] if each["name"] == name]
    return dict(found)


def test_a_pack_runs_by_what_is_in_it(packed: Path) -> None:
    for name in ("libtvm_runtime.so", "libtvm_runtime_cuda.so", "VERSION", "NOTICE"):
        assert (packed / "site" / "tvmpaged" / "data" / "lib" / name).is_file()
    for name in ("tvm_ffi", "typer", "platformdirs", "tvmpaged/runtime", "tvmpaged/schedules"):
        assert (packed / "site" / name).is_dir()
    assert not list(packed.rglob("__pycache__"))
    for name in ("torch", "numpy", "tvm", "mlflow"):
        assert not (packed / "site" / name).exists()


def test_kernels_are_right_before_they_are_fast(ran: Path) -> None:
    report = json.loads((ran / "report.json").read_text())
    names = [each["name"] for each in report["steps"]]
    assert names[:3] == ["environment", "edges against float64", "steps against torch in float32"]
    assert names[-1] == "measure"
    where = step(ran, "environment")["result"]["python"]["tvmpaged"]
    assert where.endswith("gpu_carried/site/tvmpaged")
    numbers = step(ran, "edges against float64")["result"]
    assert (numbers["failed"], numbers["ok"] > 0) == (0, True)
    checks = step(ran, "steps against torch in float32")["result"]["checks"]
    for what in ("prefill", "copy_blocks", "merge_states", "another stream", "one graph"):
        assert any(what in each["what"] for each in checks)
    assert all(each["error"] <= each["limit"] for each in checks)


def test_rows_have_roof_torch_and_error(ran: Path) -> None:
    rows = [
        row
        for name in ("bench decode 2 x 256", "bench prefill 1 x 128")
        for row in step(ran, name)["result"]["rows"]
    ]
    assert [row["spec"] for row in rows] == [str(spec) for spec in SPECS]
    for row in rows:
        assert row["kind"] in ("default", "tuned")  # as tuning_logs has a record, or none
        assert 0 < row["error"] < 1e-5
        assert row["torch_ratio"] > 0
        assert row["roof_fraction"] > 0
        assert row["target"] == str(native_target())
    table = (ran / "table.txt").read_text()
    assert all(table.count(str(spec)) == 2 for spec in SPECS)


def test_results_are_taken_home(
    packed: Path, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export = tmp_path / "candidates"
    shutil.copytree(packed / "candidates", export)
    shutil.copy(ran / "results.json", export)
    assert app.main(["tune", "--import-results", str(export), "--no-mlflow"]) == 0
    for spec in SPECS:
        record = records.load(tmp_path / "tuning_logs", native_target(), spec)
        assert record is not None
        assert record.trials == 3


def load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_step_that_breaks_hangs_or_comes_too_late_leaves_the_others(tmp_path: Path) -> None:
    run = load("gpu_run")
    steps = [
        run.Step("wrong", python("import sys; print('[1, 2]'); sys.exit('why')"), 60),
        run.Step("hangs", python("import time; time.sleep(60)"), 0.5),
        run.Step("right", python("print('{\"rows\": []}')"), 60),
        run.Step("not here", python("import sys; sys.exit(3)"), 60, failure=9),
        run.Step("found", python("import sys; sys.exit(9)"), 60, failure=9),
        run.Step("none", ["no-such-program"], 60),
    ]
    for each in steps:
        each.run(60)
    steps.append(run.Step("late", python(""), 60))
    steps[-1].run(0.5)
    assert [each.passed for each in steps] == [False, False, True, True, False, False, False]
    assert (steps[0].result, steps[0].said.strip()) == ([1, 2], "why")
    assert "timed out" in steps[1].said
    assert steps[2].result == {"rows": []}
    assert "no time was left" in steps[6].said


def scaled(run: Any) -> Any:
    def wrong(self: PagedAttention, *arguments: Any, out: Any = None, **more: Any) -> Any:
        found = run(self, *arguments, out=out, **more)
        (found[0] if isinstance(found, tuple) else found).mul_(1.001)
        return found

    return wrong


def forgotten(_call: Any) -> Any:
    return lambda *_arguments, **_more: None


def kept(plan: Any) -> Any:
    """Plan every step as the first one of its memory was."""

    def wrong(self: PagedAttention, *arguments: Any, into: Any = None, **more: Any) -> Any:
        return into or plan(self, *arguments, **more)

    return wrong


@pytest.mark.parametrize(
    ("method", "fault", "seen"),
    [
        ("run", scaled, ("prefill", "decode", "another stream", "one graph")),
        ("copy_blocks", forgotten, ("copy_blocks",)),
        ("plan", kept, ("one graph",)),
    ],
)
def test_a_wrong_step_is_seen(
    packed: Path, method: str, fault: Any, seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("gpu_step")
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(packed / "bundle"))
    steps = module.Steps(SPECS[0], str(packed / "bundle"), "cpu")
    monkeypatch.setattr(PagedAttention, method, fault(getattr(PagedAttention, method)))
    checks = [
        *module.prefill(steps),
        *module.copies_and_merge(steps),
        *module.decode(steps, module.SMALL_LONGEST, module.SMALL_STEPS),
    ]
    failed = [each.what for each in checks if not each.passed]
    assert failed
    assert all(any(word in what for what in failed) for word in seen)
    if fault is not scaled:
        assert all(any(word in what for word in seen) for what in failed)


def test_on_a_gpu_the_same_steps_are_taken_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load("gpu_run")
    monkeypatch.setattr(shutil, "which", lambda name: f"/opt/{name}")
    steps = list(run.Run(tmp_path, tmp_path, "cuda:1", 480.0, allow_busy=True).plan(tmp_path))
    named = {each.name: each.command for each in steps}
    sanitizer = named["compute-sanitizer"]
    assert sanitizer[0] == "/opt/compute-sanitizer"
    assert sanitizer[-1] == "--small"
    for name, command in named.items():
        on_gpu = "--devices" if name == "measure" else "--device"
        if name != "environment":
            assert command[command.index(on_gpu) + 1] == "cuda:1"
        assert ("--allow-busy" in command) == name.startswith(("bench", "measure"))
    kernels = [each.split()[1] for each in named if each.startswith("bench")]
    assert set(kernels) == {"decode", "prefill"}


def test_the_common_specs_are_those_of_common_models() -> None:
    pack = load("gpu_pack")
    specs = pack.common_specs()
    assert len(specs) == 12
    assert {(each.head_dim, each.group_size) for each in specs} == {(64, 3), (128, 4), (128, 8)}
    assert {each.block_size for each in specs} == {16, 64}
    kinds = {each.kernel for each in pack.companions(specs)}
    assert kinds == {"append_kv", "merge", "copy_blocks"}
