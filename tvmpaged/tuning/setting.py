"""What a measured time holds for: sources, compiler, machine and workload."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.sources import source_sha256
from tvmpaged.tuning.workload import Workload

_MIB = 1 << 20
#: Bounds of what is read before the same K and V are read again: a large model's K and V of one
#: step are not in the caches when their layer's turn comes, and a pool costs memory and time.
MIN_ROTATION_BYTES = 64 * _MIB
MAX_ROTATION_BYTES = 256 * _MIB
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": _MIB, "G": 1 << 30}


@dataclass(frozen=True)
class Setting:
    """Times under one setting compare; others do not.

    Parameters
    ----------
    source_sha256 : str
        Of kernel and schedule sources.
    tvm, tvm_ffi : str
        Versions.
    device : str
        The CPU's own name.
    num_threads : int
        Threads of a kernel.
    caches_bytes : dict
        Cache -> bytes, as one core sees them.
    rotation_bytes : int
        K and V read before the same are read again.
    workload : Workload
        What was measured on.
    """

    source_sha256: str
    tvm: str
    tvm_ffi: str
    device: str
    num_threads: int
    caches_bytes: dict[str, int]
    rotation_bytes: int
    workload: Workload

    @classmethod
    def here(cls, workload: Workload) -> Setting:
        """Return this machine's setting."""
        caches = cpu_caches()
        return cls(
            source_sha256=source_sha256(),
            tvm=version("apache-tvm"),
            tvm_ffi=version("apache-tvm-ffi"),
            device=cpu_model(),
            num_threads=num_threads(),
            caches_bytes={name: size for name, (size, _) in caches.items()},
            rotation_bytes=rotation_bytes(caches, num_threads()),
            workload=workload,
        )

    @property
    def key(self) -> str:
        """A short name that any change changes."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def cpu_caches(folder: Path = _CACHES) -> dict[str, tuple[int, int]]:
    """Return the data caches of one core: name -> (bytes, cores that share it)."""
    found = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size, shared = (
                (index / name).read_text().strip()
                for name in ("level", "type", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        if kind != "Instruction":
            size_bytes = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
            found[f"L{level}"] = (size_bytes, _count(shared))
    return found


def _count(cores: str) -> int:
    """Count a list such as ``0-3,8``."""
    ranges = [part.partition("-") for part in cores.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges) or 1


def rotation_bytes(caches: dict[str, tuple[int, int]], threads: int) -> int:
    """Return the bytes of K and V to rotate through: the threads' share of the last level twice."""
    if not caches:
        return MIN_ROTATION_BYTES
    size, shared = caches[max(caches)]
    share = size * min(threads, shared) // shared
    return min(MAX_ROTATION_BYTES, max(MIN_ROTATION_BYTES, 2 * share))
