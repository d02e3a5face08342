"""Artifacts for GPUs, built without one: compiled for each arch, loadable, nothing left behind.

``TVMPAGED_TEST_SPECS=full`` takes every common spec for every arch (`ci/cuda.sh`).
"""

import os
import struct
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tvmpaged import build, schedules
from tvmpaged.bundle import read_manifest
from tvmpaged.compile_pool import Job, compile_all
from tvmpaged.cuda_child import build_here
from tvmpaged.nvcc import MISSING, compile_cuda, find_nvcc
from tvmpaged.package import base_specs, package
from tvmpaged.sm import LIMITS, Resources
from tvmpaged.spec import ATTENTION_KERNELS, DTYPES, AttentionSpec, TargetKey

NVCC = find_nvcc()
pytestmark = pytest.mark.skipif(NVCC is None, reason=MISSING)

ARCHS = [*(f"sm_{major}{minor}" for major, minor in LIMITS), "sm_90a"]
#: What models have: head sizes, and query heads per kv head.
HEAD_DIMS, GROUPS = (64, 80, 96, 128, 192, 256), (1, 4, 7, 8)
Case = tuple[AttentionSpec, str]


def target(arch: str) -> TargetKey:
    return TargetKey("cuda", arch, "a-gpu")


def attention_specs(*sizes: tuple[str, int, int]) -> list[AttentionSpec]:
    return [
        AttentionSpec.make(kernel, dtype, head_dim, group_size, 16)
        for dtype, head_dim, group_size in sizes
        for kernel in ATTENTION_KERNELS
    ]


def some_cases() -> list[Case]:
    sizes = (("bfloat16", 128, 8), ("float16", 64, 3), ("float32", 80, 7), ("bfloat16", 256, 4))
    some = attention_specs(*sizes)
    rest = [AttentionSpec.make(name, "bfloat16") for name in ("decode", "merge", "append_kv")]
    rest.append(AttentionSpec.make("copy_blocks", "float32"))
    return [(spec, ARCHS[index % len(ARCHS)]) for index, spec in enumerate([*some, *rest])]


def batches() -> dict[str, list[Case]]:
    """Return what one child compiles, by name; its start takes as long as several cases."""
    if os.environ.get("TVMPAGED_TEST_SPECS") != "full":
        return {"some": some_cases()}
    found = {arch: [(spec, arch) for spec in base_specs()] for arch in ARCHS}
    for dtype, head_dim in product(DTYPES, HEAD_DIMS):
        specs = attention_specs(*((dtype, head_dim, group) for group in GROUPS))
        found[f"{dtype} {head_dim}"] = list(product(specs, ARCHS))
    return found


def fault(spec: AttentionSpec, choices: dict[str, Any], taken: Resources | None) -> str:
    """Return what a kernel takes and should not; "" when all is as it should be."""
    assert taken is not None
    least, shared = 1, taken.shared_bytes
    if "isa" in choices:
        least = schedules.cuda_rules.least_registers(spec, choices)
        shared = schedules.cuda_rules.shared_bytes(spec, choices)
    if taken.spill_bytes or taken.stack_bytes:
        return f"not all is in registers: {taken}"
    if not least <= taken.registers <= 255:
        return f"the registers are not {least} to 255: {taken}"
    return "" if taken.shared_bytes == shared else f"the rules say {shared} bytes: {taken}"


@pytest.mark.parametrize("name", batches())
def test_the_defaults_compile_and_keep_all_in_registers(name: str) -> None:
    """In a child that lives on; all other tests here have one of each build, as users have."""
    jobs = [
        Job(spec, target(arch), schedules.default_choices(spec, target(arch)))
        for spec, arch in batches()[name]
    ]
    done = list(compile_all(jobs, 1, build_here))
    faults = [
        (each, each.failure or fault(each.job.spec, each.job.choices, each.resources))
        for each in done
    ]
    wrong = [f"{each.job.spec} {each.job.target.arch}: {what}" for each, what in faults if what]
    assert not wrong, "\n".join(wrong)
    assert len(done) == len(jobs)
    assert all(each.data for each in done)


@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [(128, {}), (128, {"stages": 3, "q_in": "shared"}), (80, {})],
    ids=str,
)
def test_a_decode_with_tensor_cores_compiles(
    head_dim: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    spec, sm_90 = attention_specs(("bfloat16", head_dim, 4))[0], target("sm_90")
    choices = schedules.cuda_choices.mma_choices(spec) | changes
    taken = build.build_artifact(spec, sm_90, choices, tmp_path / "kernel.so")
    assert not fault(spec, choices, taken)


LOAD = """
import sys, tempfile
from pathlib import Path
from tvmpaged.cuda_child import load_cuda
from tvmpaged.nvcc import find_nvcc
with tempfile.TemporaryDirectory() as folder:
    load_cuda(find_nvcc(), Path(folder))
import tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
print(module.get_function("decode") is not None, [each.kind for each in module.imports])
"""


def test_a_bundle_for_a_gpu_holds_what_each_kernel_takes_and_loads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    spec, h200 = attention_specs(("bfloat16", 128, 4))[0], TargetKey("cuda", "sm_90", "nvidia-h200")
    (done,) = package([spec], [h200], tmp_path / "bundle", records_dir=tmp_path)
    assert not done.failures
    assert not done.notes
    found = read_manifest(tmp_path / "bundle", h200)
    assert (found.sm_arch, found.cpu_features) == ("sm_90", ())
    assert found.built_with.toolkit is not None
    (artifact,) = found.artifacts
    assert artifact.choices == schedules.default_choices(spec, h200)
    assert artifact.resources is not None
    assert artifact.resources.registers > 64
    # The stand-in for the driver is gone: not in the bundle, not in a folder, not in this process.
    names = {each.name for each in (tmp_path / "bundle").rglob("*") if each.is_file()}
    assert names == {"manifest.json", ".lock", artifact.file}
    assert not list((tmp_path / "tmp").iterdir())
    assert "libcuda.so" not in Path("/proc/self/maps").read_text()
    library = tmp_path / "bundle" / str(h200) / artifact.file
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert "libcuda" not in needed.stdout
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(library)], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == ["True", "['cuda']"]


def test_an_unknown_arch_of_a_known_major_is_built_with_a_note(tmp_path: Path) -> None:
    spec, odd = AttentionSpec.make("copy_blocks", "float32"), target("sm_103")
    (done,) = package([spec], [odd], tmp_path / "bundle", records_dir=tmp_path)
    assert not done.failures
    assert done.notes == ("the limits of sm_103 are not known; those of sm_100 are taken",)


PTX, MACHINE_CODE = 1, 2


def code_in(library: bytes) -> set[int]:
    """Return the kinds of code in a library's fatbin: its entries follow each other."""
    begin = library.index(struct.pack("<I", 0xBA55ED50))
    _, _, header, size = struct.unpack_from("<IHHQ", library, begin)
    at, end, kinds = begin + header, begin + header + size, set[int]()
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        kinds.add(kind)
        at += header + size
    return kinds


@pytest.mark.parametrize(("ptx", "code"), [(True, "sm_90+ptx"), (False, "sm_90")])
def test_ptx_stands_beside_the_code_on_request(tmp_path: Path, ptx: bool, code: str) -> None:
    spec, options = AttentionSpec.make("copy_blocks", "float32"), {"records_dir": tmp_path}
    (done,) = package([spec], [target("sm_90")], tmp_path / "bundle", ptx=ptx, **options)
    found = read_manifest(tmp_path / "bundle", target("sm_90"))
    assert not done.failures
    assert found.sm_arch == code
    library = (done.folder / found.artifacts[0].file).read_bytes()
    assert code_in(library) == ({PTX, MACHINE_CODE} if ptx else {MACHINE_CODE})
    # What was built otherwise does not mix with it.
    (other,) = package([spec], [target("sm_90")], tmp_path / "bundle", ptx=not ptx, **options)
    assert [each.field for each in other.merge.kept] == ["sm_arch"]


def test_code_for_exactly_one_arch_has_no_ptx(tmp_path: Path) -> None:
    spec = AttentionSpec.make("copy_blocks", "float32")
    with pytest.raises(ValueError, match="no PTX for newer GPUs; with --ptx take sm_90"):
        package([spec], [target("sm_90a")], tmp_path / "bundle", records_dir=tmp_path, ptx=True)


def test_what_the_compiler_says_reaches_the_user() -> None:
    assert NVCC is not None
    with pytest.raises(ValueError, match=r"nvcc failed for sm_90:\n(.|\n)*no_such_type"):
        compile_cuda("no_such_type x;", "sm_90", NVCC)


def test_choices_that_cannot_fit_are_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    spec = attention_specs(("float32", 256, 8))[0]
    choices = schedules.default_choices(spec, target("sm_90"))
    choices |= {"row_tile": 8, "dim_threads": 8, "keys_per_step": 16}
    with pytest.raises(ValueError, match=r"a thread needs 5\d\d registers or more; it has 255"):
        build.build_artifact(spec, target("sm_90"), choices, tmp_path / "kernel.so")
