"""From a spec to a library: every spec builds for every target, and the same spec to the same."""

import ast
import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from tvmpaged import build, kernels, schedules, sources
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
    code = "from tvmpaged.build import source_sha256; print(source_sha256())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == build.source_sha256()


#: What building imports, and what no byte of an artifact hangs on.
NEUTRAL = {"errors.py", "sources.py", "tvm_libs.py", "gpu.py", "driver.py"}


def imported(file: Path) -> set[str]:
    """Return the modules of this package that a file names in its imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {each for each in found if each.startswith("tvmpaged.")}


def test_the_source_hash_covers_all_that_building_imports() -> None:
    package, schedules_folder = sources._PACKAGE, sources._schedules()
    left = [package / "build.py", package / "cuda_build.py", package / "cuda_child.py"]
    left += [*(package / "kernels").glob("*.py"), *schedules_folder.glob("*.py")]
    seen: set[Path] = set()
    while left:
        file = left.pop()
        if file in seen:
            continue
        seen.add(file)
        names = {each.removeprefix("tvmpaged.").replace(".", "/") for each in imported(file)}
        left += [each for each in (package / f"{name}.py" for name in names) if each.exists()]
    loose = {each.name for each in seen if each.parent == package}
    assert loose - NEUTRAL <= set(sources._SOURCES)
    assert {"cpu.py", "sm.py"} <= loose  # the walk finds what it should


def test_the_source_hash_follows_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that decides the code counts: a changed byte makes another hash."""
    before = build.source_sha256()
    for name in sources._SOURCES:
        if name.endswith(".py"):
            (tmp_path / name).write_bytes((sources._PACKAGE / name).read_bytes())
    (tmp_path / "kernels").mkdir()
    for file in Path(kernels.__file__).parent.glob("*.py"):
        (tmp_path / "kernels" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(sources, "_PACKAGE", tmp_path)
    assert build.source_sha256() == before
    for name in ("spec.py", "worklist.py", "build.py", "nvcc.py", "sm.py", "kernels/tile.py"):
        known = build.source_sha256()
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert build.source_sha256() != known, name
    assert build.source_sha256() != before
