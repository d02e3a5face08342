"""NVIDIA's compiler: where it is, and device code made by it, with what each kernel takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from tvmpaged.errors import UserError
from tvmpaged.sm import Resources, SmArch

#: Folders of toolkits: of the system, and below site-packages those of pip's packages.
_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
_PACKAGES = "nvidia/cu13"
_RUNTIME = "libcudart.so.13"
_LIBRARY_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib")

MISSING = (
    "nvcc, NVIDIA's compiler, is missing: install a CUDA 13 toolkit, or into this environment "
    "pip install 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'"
)


def find_nvcc() -> Path | None:
    """Return nvcc: the one on the path, of a system's toolkit, or of pip's package; or None."""
    found = shutil.which("nvcc")
    places = [Path(found)] if found else []
    places += [Path(toolkit) / "bin/nvcc" for toolkit in _TOOLKITS]
    site = Path(sysconfig.get_path("purelib"))
    places.append(site / _PACKAGES / "bin/nvcc")
    return next((place for place in places if place.is_file()), None)


def require_nvcc() -> Path:
    """Return nvcc.

    Raises
    ------
    UserError
        Saying what to install.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise UserError(MISSING)
    return nvcc


def cuda_runtime(nvcc: Path) -> Path | None:
    """Return the CUDA runtime library that belongs to a compiler, if it lies in its toolkit."""
    roots = [each.parent.parent for each in (nvcc, nvcc.resolve())]
    for root in (*roots, *map(Path, _TOOLKITS)):
        for folder in _LIBRARY_FOLDERS:
            if (root / folder / _RUNTIME).is_file():
                return root / folder / _RUNTIME
    return None


#: ptxas keeps a few bytes outside registers where that makes room for one more block on a
#: multiprocessor. Told that one block is enough, it does not.
_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\)")


def compile_cuda(
    source: str, arch: str, nvcc: Path, *, ptx: bool = False
) -> tuple[bytes, Resources]:
    """Compile CUDA source that holds one kernel into a fatbin; nothing spilled where that can be.

    Parameters
    ----------
    source : str
        CUDA C++.
    arch : str
        Such as ``sm_90`` or ``sm_90a``.
    nvcc : Path
        The compiler.
    ptx : bool
        Whether the fatbin also holds PTX, for newer architectures.

    Returns
    -------
    fatbin : bytes
        For the driver.
    resources : Resources
        What the kernel takes.

    Raises
    ------
    ValueError
        When the arch is none, or the compiler refuses the source.
    """
    parts = SmArch.parse(arch)
    if parts is None:
        raise ValueError(f"arch={arch!r} is no sm architecture")
    wanted = f"[{arch},compute_{parts.number}]" if ptx else arch
    code = f"arch=compute_{parts.number},code={wanted}"
    found = _compile(source, code, nvcc, arch)
    if not found[1].spill_bytes:
        return found
    again = _compile(_BOUNDS.sub(r"__launch_bounds__(\1, 1)", source), code, nvcc, arch)
    return min(found, again, key=lambda each: each[1].spill_bytes)


def _compile(source: str, code: str, nvcc: Path, arch: str) -> tuple[bytes, Resources]:
    with tempfile.TemporaryDirectory(prefix="tvmpaged-nvcc-") as folder:
        file, binary = Path(folder) / "kernel.cu", Path(folder) / "kernel.fatbin"
        file.write_text(source, encoding="utf-8")
        # No fast math: sums, divisions and denormals are those of the reference.
        command = [str(nvcc), "--fatbin", "-O3", "-Xptxas", "-v", "-std=c++17", "-gencode", code]
        done = subprocess.run(
            [*command, "-o", str(binary), str(file)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ValueError(f"nvcc failed for {arch}:\n{done.stderr.strip()}")
        return binary.read_bytes(), read_resources(done.stderr)


_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def read_resources(text: str) -> Resources:
    """Read what ``ptxas -v`` says of one kernel.

    Raises
    ------
    ValueError
        When it says nothing, or speaks of several.
    """
    registers, frames = _REGISTERS.findall(text), _FRAME.findall(text)
    if len(registers) != 1 or len(frames) != 1:
        raise ValueError(f"ptxas speaks of {len(registers)} kernels, not of one:\n{text.strip()}")
    stack, stores, loads = map(int, frames[0])
    shared = _SHARED.search(text)
    return Resources(
        registers=int(registers[0]),
        shared_bytes=int(shared[1]) if shared else 0,
        spill_bytes=stores + loads,
        stack_bytes=stack,
    )
