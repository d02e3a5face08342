"""Everything a bug report needs, gathered without importing anything heavy.

Facts that only a heavy or fragile piece knows (LLVM, the GPU's driver) are asked of a child
process, so that the report comes also where that piece is what is broken.
"""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tvmpaged import cpu, tvm_libs
from tvmpaged.bundle import BundleError, search
from tvmpaged.gpu import gpu_facts

SCHEMA_VERSION = 1

PACKAGES = (
    "tvmpaged",
    "torch",
    "numpy",
    "apache-tvm",
    "apache-tvm-ffi",
    "transformers",
    "gguf",
    "accelerate",
    "xgboost",
    "mlflow",
    "ml_dtypes",
    "cryptography",
    "typer",
    "vllm",
)

#: Variables of others that change how kernels run.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "MLFLOW_TRACKING_URI",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "TVM_BIND_THREADS",
    "TVM_NUM_THREADS",
    "TVM_THREAD_POOL_SPIN_COUNT",
)
_SECRET_NAME = re.compile(r"KEY|PASSWORD|SECRET|TOKEN|CREDENTIAL", re.IGNORECASE)
#: Up to the last @: a password that nobody escaped may hold an @ or a slash of its own.
_URL_LOGIN = re.compile(r"(?<=://)[^\s'\"<>]*@")
_URL_QUERY = re.compile(r"(?<=[?&])([^=&\s]+)=[^&\s]*")

_CHILD_TIMEOUT_S = 60


def collect() -> dict[str, Any]:
    """Return the report: sections of plain data, ready for JSON."""
    return {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "tvmpaged": str(Path(__file__).parent),
        },
        "os": {
            "system": platform.platform(),
            "name": _os_name(),
            "libc": " ".join(platform.libc_ver()),
        },
        "cpu": _cpu(),
        "packages": {name: _version(name) for name in PACKAGES},
        "libraries": {
            tvm_libs.RUNTIME: _first_file(tvm_libs.RUNTIME),
            tvm_libs.RUNTIME_CUDA: _first_file(tvm_libs.RUNTIME_CUDA),
            "version": tvm_libs.runtime_version(),
        },
        "environment": environment(os.environ.items()),
        "bundles": _bundles(),
        "gpus": gpu_facts(),
    }


def environment(variables: Any) -> dict[str, str]:
    """Return the variables that matter, without secrets.

    Parameters
    ----------
    variables : iterable of (name, value)
        Such as ``os.environ.items()``.
    """
    return {
        name: hide_secrets(name, value)
        for name, value in sorted(variables)
        if name.startswith("TVMPAGED_") or name in _VARIABLES
    }


def hide_secrets(name: str, value: str) -> str:
    """Cut what nobody may paste into a bug report: logins and queries of URLs, keys, tokens."""
    if _SECRET_NAME.search(name):
        return "***"
    return _URL_QUERY.sub(r"\1=***", _URL_LOGIN.sub("***@", value))


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _cpu() -> dict[str, Any]:
    flags = cpu.cpu_flags()
    try:
        microarchitecture = cpu.detect_microarchitecture(flags)
    except ValueError as error:
        microarchitecture = str(error)
    try:
        threads: int | str = cpu.num_threads()
    except ValueError as error:
        threads = str(error)
    known = frozenset().union(*cpu.MICROARCHITECTURES.values())
    return {
        "model": cpu.cpu_model(),
        "microarchitecture": microarchitecture,
        "llvm_name": _llvm_name(),
        "flags": sorted(flags & known),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "kernel_threads": threads,
        "caches": _caches(),
    }


def _caches() -> dict[str, str]:
    found: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = (
                (index / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        found[f"L{level} {kind.lower()}"] = size
    return found


def _llvm_name() -> str | None:
    code = "from tvm.target import codegen; print(codegen.llvm_get_system_cpu())"
    lines = _ask([sys.executable, "-c", code])
    return lines[-1] if lines else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_file(name: str) -> str | None:
    try:
        return str(tvm_libs.find(name))
    except FileNotFoundError:
        return None


def _bundles() -> list[dict[str, str]]:
    """Return the search path's folders in its order, and what is wrong with each."""
    try:
        folders = search()
    except BundleError as error:
        return [{"from": "search path", "path": "", "state": str(error)}]
    return [
        {"from": each.source, "path": str(each.path), "state": each.problem or "usable"}
        for each in folders
    ]


def _ask(command: list[str]) -> list[str]:
    """Return the lines a child process printed; none when it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()
