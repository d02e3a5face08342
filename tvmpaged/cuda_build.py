"""Building for CUDA where there is no GPU: a child process with a stand-in for the driver.

TVM makes a loadable artifact only where its CUDA runtime library can be loaded, and that one wants
the driver's. Building needs no function of it, so where there is no driver an empty library of its
name does. It lives in a temporary folder, for as long as the child does, and nowhere else: in this
process, in a wheel or in a bundle it would hide the real one.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvmpaged import schedules
from tvmpaged.nvcc import compile_cuda, cuda_runtime, require_nvcc
from tvmpaged.sm import Resources
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tvm_libs import RUNTIME_CUDA, find

DRIVER = "libcuda.so.1"


def build_cuda(
    spec: AttentionSpec, target: TargetKey, choices: dict[str, Any], path: Path
) -> Resources:
    """Compile one spec under one choice list into a shared library, in a child process.

    Parameters
    ----------
    spec, target, choices, path
        As of `tvmpaged.build.build_artifact`.

    Raises
    ------
    UserError
        When nvcc is missing; says what to install.
    ValueError
        When the choices cannot fit, or nvcc refuses the program.
    RuntimeError
        When the child failed; with what it said last.
    """
    reason = schedules.reject(spec, target, choices)
    if reason is not None:
        raise ValueError(f"choices for {spec} cannot be built: {reason}")
    with tempfile.TemporaryDirectory(prefix="tvmpaged-cuda-") as folder:
        request = {
            "spec": str(spec),
            "target": str(target),
            "choices": choices,
            "path": str(path),
            "nvcc": str(require_nvcc()),
            "folder": folder,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tvmpaged.cuda_build"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"building {spec} for {target} failed:\n{done.stderr.strip()[-4000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise ValueError(answer["error"])
    return Resources(**answer["resources"])


def load_cuda(nvcc: Path, folder: Path) -> None:
    """Load TVM's CUDA runtime; where there is no driver, after an empty one.

    Only for processes that end soon: what is loaded cannot be taken back.
    """
    try:
        ctypes.CDLL(DRIVER, ctypes.RTLD_GLOBAL)
    except OSError:
        stand_in = folder / DRIVER
        # A library that is loaded already is found by its soname; its path does not matter.
        command = ["gcc", "-shared", f"-Wl,-soname,{DRIVER}", "-x", "c", "/dev/null"]
        subprocess.run([*command, "-o", str(stand_in)], check=True)
        ctypes.CDLL(str(stand_in), ctypes.RTLD_GLOBAL)
    runtime = cuda_runtime(nvcc)
    if runtime is not None:
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    import tvm  # noqa: F401, its runtime library before that for CUDA

    ctypes.CDLL(str(find(RUNTIME_CUDA)), ctypes.RTLD_GLOBAL | os.RTLD_LAZY)


def _build(request: dict[str, Any]) -> dict[str, Any]:
    """Do the child's work."""
    nvcc = Path(request["nvcc"])
    load_cuda(nvcc, Path(request["folder"]))
    import tvm
    import tvm_ffi

    from tvmpaged.build import build_module, tvm_target

    spec, target = AttentionSpec.parse(request["spec"]), TargetKey.parse(request["target"])
    found: list[Resources] = []
    refused: list[ValueError] = []

    def compile_source(source: str) -> bytes:
        try:
            fatbin, resources = compile_cuda(source, target.arch, nvcc)
        except ValueError as error:  # TVM would bury it in its own
            refused.append(error)
            raise
        found.append(resources)
        return fatbin

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_source, override=True)
    module = build_module(spec, target, request["choices"])
    try:
        compiled = tvm.compile(module, target=tvm_target(target))
    except Exception:
        if refused:
            return {"error": str(refused[0])}
        raise
    compiled.export_library(request["path"])
    (resources,) = found
    return {"resources": asdict(resources)}


def main() -> None:
    """Read a request from stdin, build, and answer on stdout: ``python -m tvmpaged.cuda_build``."""
    print(json.dumps(_build(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
