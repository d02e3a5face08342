"""What ci/gpu_pack.sh does: a folder that ci/gpu.sh runs from, on another machine.

::

    site/        on Python's path there: tvmpaged with TVM's runtime libraries, tvm_ffi, ...
    bundle/      untuned kernels, with all that serving needs beside them
    candidates/  of `tvmpaged tune --export`
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement

from tvmpaged import tvm_libs
from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec

ROOT = Path(__file__).resolve().parent.parent
H200 = "cuda/sm_90/nvidia-h200"
#: Sizes of common models: (head_dim, query heads per K/V head); each with both block sizes.
SIZES, BLOCK_SIZES = ((64, 3), (128, 4), (128, 8)), (16, 64)
#: The wheel's requirements but for those that the other machine must have: torch, and its NumPy.
REQUIREMENTS = ("apache-tvm-ffi", "filelock", "packaging", "platformdirs", "rich", "typer")
#: Parts of tvm_ffi that nothing imports.
FOR_COMPILERS = ("3rdparty", "include", "src")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17")
#: The whole folder, so that it travels with the repository within 64 MiB.
MOST_BYTES = 56 << 20


def main() -> None:
    """Pack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default=H200)
    parser.add_argument("--python", default=this_python(), help="version on the other machine")
    parser.add_argument("--trials", type=int, default=12, help="candidates of each spec")
    parser.add_argument("--spec", action="append", help="instead of the common ones; repeatable")
    parser.add_argument("--time-limit", default="30m", help="of compiling candidates")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    specs = [AttentionSpec.parse(text) for text in arguments.spec or ()] or common_specs()
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "site").mkdir(parents=True)
    pack_sources(folder / "site")
    pack_libraries(folder / "site" / "tvmpaged" / "data" / "lib")
    pack_requirements(folder / "site", arguments.python)
    for name in FOR_COMPILERS:
        shutil.rmtree(folder / "site" / "tvm_ffi" / name, ignore_errors=True)
    target = ["--target", arguments.target]
    bundle = [*flags([*specs, *companions(specs)]), "--out", str(folder / "bundle")]
    tvmpaged("package", *target, *bundle, "--records", str(ROOT / "tuning_logs"))
    export = ["--export", str(folder / "candidates"), "--time-limit", arguments.time_limit]
    tvmpaged("tune", *target, *export, "--trials", str(arguments.trials), *flags(specs))
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB; there: bash ci/gpu.sh {folder} --out DIR")
    if size > MOST_BYTES:
        sys.exit(f"{folder} is over {MOST_BYTES >> 20} MiB: take fewer --trials")


def this_python() -> str:
    """Return this interpreter's version, such as ``3.11``."""
    return ".".join(platform.python_version_tuple()[:2])


def common_specs() -> list[AttentionSpec]:
    """Return decode and prefill of common models in bfloat16."""
    return [
        AttentionSpec.make(kernel, "bfloat16", *sizes, block_size)
        for kernel, sizes, block_size in product(ATTENTION_KERNELS, SIZES, BLOCK_SIZES)
    ]


def companions(specs: Iterable[AttentionSpec]) -> list[AttentionSpec]:
    """Return what serving needs beside attention: what writes, merges and copies."""
    found = []
    for spec in specs:
        found.append(
            AttentionSpec.make(
                "append_kv", spec.q_dtype, kv_dtype=spec.kv_dtype, layout=spec.layout
            )
        )
        found.append(AttentionSpec.make("merge", spec.out_dtype))
    return list(dict.fromkeys([*found, AttentionSpec.make("copy_blocks", "float32")]))


def flags(specs: Iterable[AttentionSpec]) -> list[str]:
    """Return specs as the command line takes them."""
    return [part for spec in specs for part in ("--spec", str(spec))]


def pack_sources(site: Path) -> None:
    """Copy the package as an installed one lies: runtime/ and schedules/ inside it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard", "tvmpaged", "runtime", "schedules"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            inside = name if name.startswith("tvmpaged/") else f"tvmpaged/{name}"
            copy(ROOT / name, site / inside)


def pack_libraries(folder: Path) -> None:
    """Copy TVM's runtime libraries, with their licence."""
    for name in (tvm_libs.RUNTIME, tvm_libs.RUNTIME_CUDA):
        copy(tvm_libs.find(name), folder / name)
    tvm = Path(str(distribution("apache-tvm").locate_file("tvm")))
    for name in ("LICENSE", "NOTICE"):
        copy(tvm / name, folder / name)
    (folder / "VERSION").write_text(f"{tvm_libs.runtime_version()}\n")


def pack_requirements(site: Path, python: str) -> None:
    """Install what is imported, for a version of Python; for this one from what is installed."""
    names = closure(REQUIREMENTS)
    if python == this_python():
        for name in names:
            package = distribution(name)
            for file in package.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    copy(Path(str(package.locate_file(file))), site / str(file))
        return
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--target", str(site), "--no-deps", "--no-compile", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python]
    for each in PLATFORMS:
        command += ["--platform", f"{each}_x86_64"]
    subprocess.run(
        [*command, *(f"{name}=={distribution(name).version}" for name in names)], check=True
    )


def closure(names: Iterable[str]) -> list[str]:
    """Return distributions with all that they need, as they are installed here."""
    found: dict[str, None] = {}
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found[name] = None
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                queue.append(needed.name)
    return list(found)


def copy(source: Path, destination: Path) -> None:
    """Copy a file."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)


def tvmpaged(*arguments: str) -> None:
    """Run one of our commands; its results go to stderr, beside its progress."""
    subprocess.run([sys.executable, "-m", "tvmpaged", *arguments], stdout=sys.stderr, check=True)


if __name__ == "__main__":
    main()
