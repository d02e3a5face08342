"""What candidates are measured on: its facts, and the process that has it to itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.spec import TargetKey
from tvmpaged.tuning.process import Process

_MIB = 1 << 20
#: Bounds of what is read before the same K and V are read again: a large model's K and V of one
#: step are not in the caches when their layer's turn comes, and a pool costs memory and time.
MIN_ROTATION_BYTES = 64 * _MIB
MAX_ROTATION_BYTES = 256 * _MIB
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": _MIB, "G": 1 << 30}


@dataclass(frozen=True)
class Device:
    """What times hold for, besides the program and its workload.

    Parameters
    ----------
    name : str
        The device's own name.
    num_threads : int
        Threads of a kernel.
    caches_bytes : dict
        Cache -> bytes, as one core sees them.
    rotation_bytes : int
        K and V read before the same are read again.
    """

    name: str
    num_threads: int
    caches_bytes: dict[str, int]
    rotation_bytes: int

    @classmethod
    def here(cls, target: TargetKey) -> Device:
        """Return this machine's device of a target's kind.

        Raises
        ------
        ValueError
            When nothing can be measured on that kind yet.
        """
        check_kind(target)
        caches = cpu_caches()
        return cls(
            name=cpu_model(),
            num_threads=num_threads(),
            caches_bytes={name: size for name, (size, _) in caches.items()},
            rotation_bytes=rotation_bytes(caches, num_threads()),
        )


def check_kind(target: TargetKey) -> None:
    """Refuse a target that nothing can be measured for yet.

    Raises
    ------
    ValueError
        Naming it.
    """
    if target.kind != "cpu":
        raise ValueError(f"target={target} cannot be measured yet; allowed: cpu/<name>")


def measuring_process(target: TargetKey, memory_bytes: int | None = None) -> Process:
    """Return the process that checks and times candidates for a target on this machine.

    Parameters
    ----------
    target : TargetKey
        Its kind decides which process.
    memory_bytes : int, optional
        Data it may hold; by default half of this machine's memory.
    """
    check_kind(target)
    # As serving sets TVM's pool up: what is measured is what will run.
    pool = {
        "TVM_NUM_THREADS": str(num_threads()),
        "TVM_BIND_THREADS": "0",
        "TVM_THREAD_POOL_SPIN_COUNT": "20000",
        # Of torch, which fills tensors there, and takes more threads for a roof alone.
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "20000",
    }
    return Process("tvmpaged.tuning.measure_worker", pool, memory_bytes or memory_total() // 2)


def memory_total() -> int:
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
