"""From a spec to a library: every spec builds for every target, and the same spec to the same."""

import ast
import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tvmpaged import build, schedules, sources
from tvmpaged.cpu import MICROARCHITECTURES, native_target
from tvmpaged.package import base_specs
from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec, TargetKey

TARGETS = [TargetKey("cpu", name) for name in MICROARCHITECTURES]
SPEC = AttentionSpec.make("decode", "float32", head_dim=64, group_size=3, block_size=16)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_default_choices_fit_every_spec(target: TargetKey) -> None:
    specs = [
        AttentionSpec.make(kernel, dtype, head_dim, group_size, 16)
        for kernel in ATTENTION_KERNELS
        for dtype in ("float32", "bfloat16")
        for head_dim in (*range(8, 257, 8), 512)
        for group_size in (*range(1, 81), 96, 128, 255, 256)
    ]
    for spec in specs + base_specs():
        reason = schedules.reject(spec, target, schedules.default_choices(spec, target))
        assert reason is None, f"{spec}: {reason}"


def test_an_artifact_is_a_library_with_the_specs_symbol(tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    choices = schedules.default_choices(SPEC, native_target())
    build.build_artifact(SPEC, native_target(), choices, path)
    symbols = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout
    assert f"__tvm_ffi_{build.symbol_name(SPEC)}" in symbols
    assert ctypes.CDLL(str(path))


@pytest.mark.parametrize("arch", ["x86-64-v3", "znver4"])
def test_builds_for_a_machine_that_is_not_this_one(arch: str, tmp_path: Path) -> None:
    for kernel in ATTENTION_KERNELS:
        spec = AttentionSpec.make(kernel, "bfloat16", head_dim=80, group_size=7, block_size=7)
        target, path = TargetKey("cpu", arch), tmp_path / f"{kernel}.so"
        build.build_artifact(spec, target, schedules.default_choices(spec, target), path)
        assert path.stat().st_size > 0


def test_choices_that_do_not_fit_are_refused_with_the_rule() -> None:
    choices = {**schedules.default_choices(SPEC, native_target()), "row_tile": 7}
    with pytest.raises(ValueError, match=r"row_tile=7 is more than the group's 3 rows"):
        build.build_module(SPEC, native_target(), choices)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TargetKey("cpu", "pentium99"), "LLVM knows no CPU 'pentium99'"),
        (TargetKey("cuda", "sm_75", "tesla-t4"), "'sm_75' is not supported"),
        (TargetKey("cuda", "hopper", "nvidia-h200"), "no sm architecture; such are sm_80"),
    ],
)
def test_unknown_targets_are_refused_by_name(target: TargetKey, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build.tvm_target(target)


def test_the_source_hash_is_the_same_in_every_process() -> None:
    code = "from tvmpaged.build import source_sha256; print(source_sha256('cpu'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == build.source_sha256("cpu")


#: What building imports, and what no byte of an artifact hangs on.
NEUTRAL = {"errors.py", "sources.py", "tvm_libs.py", "gpu.py", "driver.py"}
#: Where the ways part: these name parts for every kind, and use those of one.
FORKS = {"build.py", "kernels/attention.py", "schedules/__init__.py"}
KINDS = ("cpu", "cuda")


def hashed(kind: str) -> dict[str, Path]:
    """Return the files of a kind's hash, by their name in the package."""
    return {name.removeprefix("tvmpaged/"): file for name, file in sources._files(kind)}


def imported(file: Path) -> set[str]:
    """Return the modules of this package that a file names in its imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {each for each in found if each.startswith("tvmpaged.")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_source_hash_covers_all_that_building_imports(kind: str) -> None:
    """Whatever a hashed file imports is hashed, except another kind's parts where ways part."""
    files, every = hashed(kind), {name for each in KINDS for name in hashed(each)}
    for name, file in files.items():
        modules = {each.removeprefix("tvmpaged.").replace(".", "/") for each in imported(file)}
        for module in modules:
            wanted = {f"{module}.py", f"{module}/__init__.py"}
            exists = any((sources._PACKAGE / each).exists() for each in wanted)
            known = files.keys() | NEUTRAL | (every if name in FORKS else set())
            assert not exists or wanted & known, f"{name} imports {module}"
    assert {"spec.py", "kernels/tile.py"} <= files.keys()


def test_every_kernel_and_schedule_is_hashed_of_its_own_kind() -> None:
    folders = {"kernels": sources._PACKAGE / "kernels", "schedules": sources._schedules()}
    for folder, place in folders.items():
        for file in place.rglob("*.py"):
            name = f"{folder}/{file.relative_to(place)}"
            kinds = [kind for kind in KINDS if name in hashed(kind)]
            mine = [kind for kind in KINDS if f"/{kind}" in name]
            assert kinds == (mine or [*KINDS]), name


def test_the_source_hash_follows_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that decides a kind's code counts, for that kind alone."""
    before = [build.source_sha256(kind) for kind in KINDS]
    for file in sources._PACKAGE.rglob("*.py"):
        place = tmp_path / sources._PACKAGE.name / file.relative_to(sources._PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path / sources._PACKAGE.name)
    assert [build.source_sha256(kind) for kind in KINDS] == before
    for name, changed in {
        "spec.py": [True, True],
        "kernels/tile.py": [True, True],
        "kernels/cpu/step_rows.py": [True, False],
        "kernels/cuda/walk_warps.py": [False, True],
        "nvcc.py": [False, True],
        "cpu.py": [True, False],
        "tune.py": [False, False],
    }.items():
        known = [build.source_sha256(kind) for kind in KINDS]
        with (sources._PACKAGE / name).open("a") as file:
            file.write("\n")
        now = [build.source_sha256(kind) for kind in KINDS]
        assert [a != b for a, b in zip(known, now, strict=True)] == changed, name
