"""Compiling for CUDA in a child process: it loads an empty driver where there is none.

As the child of `tvmpaged.cuda_build` it takes a request on stdin and answers on stdout, both JSON.
Compilers of `package` and `tune`, children themselves, call `build_here`.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmpaged.driver import DRIVER
from tvmpaged.nvcc import compile_cuda, cuda_runtime, require_nvcc
from tvmpaged.sm import Resources
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tvm_libs import RUNTIME_CUDA, find

if TYPE_CHECKING:
    import tvm


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


@contextmanager
def _dynamic_shared() -> Iterator[list[int]]:
    """Give a list of the shared memory that kernels compiled meanwhile take at their launch.

    ptxas does not see that memory: the host's part asks for it.
    """
    import tvm
    import tvm_ffi
    from tvm.s_tir.analysis import calculate_allocated_bytes

    name = "target.build.cuda"
    generate, found = tvm.get_global_func(name), list[int]()

    def watch(device: tvm.IRModule, target: tvm.target.Target) -> Any:
        scopes = calculate_allocated_bytes(device).values()
        found.extend(int(each.get("shared.dyn", 0)) for each in scopes)
        return generate(device, target)

    tvm_ffi.register_global_func(name, watch, override=True)
    try:
        yield found
    finally:
        tvm_ffi.register_global_func(name, generate, override=True)


@cache
def _prepared(nvcc: Path) -> None:
    """Load TVM's CUDA runtime once in this process."""
    with tempfile.TemporaryDirectory(prefix="tvmpaged-cuda-") as folder:
        load_cuda(nvcc, Path(folder))  # what is loaded stays when the file is gone


def compile_here(
    module: tvm.IRModule, target: TargetKey, *, ptx: bool = False
) -> tuple[tvm.runtime.Executable, Resources]:
    """Compile a scheduled program in this process, which is a child that does nothing else.

    Raises
    ------
    UserError
        When nvcc is missing; says what to install.
    ValueError
        When nvcc refuses the program.
    """
    nvcc = require_nvcc()
    _prepared(nvcc)
    import tvm
    import tvm_ffi

    from tvmpaged.build import GPU_PASSES_OFF, tvm_target

    found: list[Resources] = []
    refused: list[ValueError] = []

    def compile_source(source: str) -> bytes:
        try:
            fatbin, resources = compile_cuda(source, target.arch, nvcc, ptx=ptx)
        except ValueError as error:  # TVM would bury it in its own
            refused.append(error)
            raise
        found.append(resources)
        return fatbin

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_source, override=True)
    try:
        context = tvm.transform.PassContext(disabled_pass=GPU_PASSES_OFF)
        with _dynamic_shared() as dynamic_bytes, context:
            compiled = tvm.compile(module, target=tvm_target(target))
    except Exception:
        if refused:
            raise refused[0] from None
        raise
    (resources,) = found
    taken = replace(resources, shared_bytes=resources.shared_bytes + sum(dynamic_bytes))
    return compiled, taken


def build_here(
    spec: AttentionSpec,
    target: TargetKey,
    choices: dict[str, Any],
    path: Path,
    *,
    ptx: bool = False,
) -> Resources:
    """Compile one spec in this process into a shared library; as `compile_here`.

    Parameters
    ----------
    spec, target, choices, path, ptx
        As of `tvmpaged.build.build_artifact`.
    """
    from tvmpaged.build import build_module

    compiled, resources = compile_here(build_module(spec, target, choices), target, ptx=ptx)
    compiled.export_library(str(path))
    return resources


def main() -> None:
    """Read a request from stdin, build, and answer on stdout."""
    request = json.load(sys.stdin)
    spec, target = AttentionSpec.parse(request["spec"]), TargetKey.parse(request["target"])
    try:
        path, ptx = Path(request["path"]), request["ptx"]
        taken = build_here(spec, target, request["choices"], path, ptx=ptx)
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps({"resources": asdict(taken)}))


if __name__ == "__main__":
    main()
