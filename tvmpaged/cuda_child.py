"""The child of `tvmpaged.cuda_build`: loads an empty driver where there is none, and compiles.

A request on stdin, an answer on stdout, both JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tvmpaged.nvcc import compile_cuda, cuda_runtime
from tvmpaged.sm import Resources
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tvm_libs import RUNTIME_CUDA, find

DRIVER = "libcuda.so.1"


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
    """Read a request from stdin, build, and answer on stdout."""
    print(json.dumps(_build(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
