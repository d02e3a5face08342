"""What candidates are measured on: its facts, the processes that have it, and who else is there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmpaged import driver
from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.driver import Gpu
from tvmpaged.errors import UserError
from tvmpaged.gpu import find_gpu, gpu_facts, num_processes, target_of
from tvmpaged.spec import TargetKey
from tvmpaged.tuning.process import Process

_MIB = 1 << 20
#: Bounds of what is read before the same K and V are read again: a large model's K and V of one
#: step are not in the caches when their layer's turn comes, and a pool costs memory and time.
MIN_ROTATION_BYTES = 64 * _MIB
MAX_ROTATION_BYTES = 256 * _MIB
#: Names every GPU of the target.
ALL = "all"
#: Tells a measuring process where its tensors are to lie.
DEVICE_VARIABLE = "TVMPAGED_MEASURE_ON"
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
        Threads of a kernel; of a GPU its multiprocessors.
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
    def here(cls, target: TargetKey, gpus: Sequence[Gpu] = ()) -> Device:
        """Return what is measured on: some GPUs of one kind, or this machine's CPU."""
        if target.kind == "cuda":
            first = gpus[0]
            caches = {"L2": (first.l2_bytes, first.multiprocessors)}
            name, threads = first.name, first.multiprocessors
        else:
            caches, name, threads = cpu_caches(), cpu_model(), num_threads()
        return cls(
            name=name,
            num_threads=threads,
            caches_bytes={name: size for name, (size, _) in caches.items()},
            rotation_bytes=rotation_bytes(caches, threads),
        )


def find_gpus(target: TargetKey, devices: Sequence[str] = ()) -> tuple[Gpu, ...]:
    """Return the GPUs to measure a target on; none for a CPU.

    Parameters
    ----------
    target : TargetKey
        What candidates are built for.
    devices : sequence of str
        Such as ``cuda:0``, or ``all`` that are of the target; by default the first.

    Raises
    ------
    ValueError
        When one is not there, named twice, or is not of the target; of ``all``, when none is.
    """
    if target.kind != "cuda":
        if devices:
            raise ValueError(f"devices={','.join(devices)} are GPUs, and target={target} is none")
        return ()
    if ALL in devices:
        return _find_all(target, devices)
    found = tuple(find_gpu(each) for each in devices or ("cuda",))
    for each in found:
        if not _is_of(target, each):
            raise ValueError(f"cuda:{each.index} is {target_of(each)}, not target={target}")
    if len({each.uuid for each in found}) < len(found):
        raise ValueError(f"devices={','.join(devices)} name one GPU twice")
    return found


def _find_all(target: TargetKey, devices: Sequence[str]) -> tuple[Gpu, ...]:
    if len(devices) > 1:
        raise ValueError(f"devices={','.join(devices)}: {ALL} are named alone")
    found = tuple(each for each in driver.gpus() if _is_of(target, each))
    if not found:
        here = ", ".join(str(target_of(each)) for each in driver.gpus()) or "none"
        raise ValueError(f"devices={ALL} of target={target}, and this machine's GPUs are: {here}")
    return found


def _is_of(target: TargetKey, gpu: Gpu) -> bool:
    # Code for exactly one arch, as sm_90a is, runs on that arch as its plain name does.
    found = target_of(gpu)
    return (target.arch.rstrip("af"), target.device) == (found.arch, found.device)


class Watch:
    """Who else computes on the GPUs that are measured on, and what state those are in.

    Made before any process of ours is there: whoever computes then is somebody else.

    Parameters
    ----------
    gpus : sequence of Gpu
        None for a CPU.
    allow_busy : bool
        Whether to measure beside others.

    Raises
    ------
    UserError
        When others compute there and that was not allowed.
    """

    def __init__(self, gpus: Sequence[Gpu] = (), *, allow_busy: bool = False) -> None:
        self.gpus = tuple(gpus)
        counts = [num_processes(each.uuid) for each in gpus]
        self._others = sum(counts)
        busy = [each for each, count in zip(gpus, counts, strict=True) if count]
        if busy and not allow_busy:
            names = ", ".join(f"cuda:{each.index} ({each.name})" for each in busy)
            raise UserError(
                f"other processes compute on {names} (nvidia-smi names them), so times there say "
                "little; end them, take another GPU, or measure all the same with --allow-busy"
            )

    def state(self) -> dict[str, str] | None:
        """Return the first GPU's facts now, and how many other processes were seen.

        None for a CPU, or when the driver's program does not answer. One process of ours is on each
        GPU; by number, because a container may see others' process ids than its own.
        """
        facts = gpu_facts(*(each.uuid for each in self.gpus[:1])) if self.gpus else []
        if not facts:
            return None
        now = sum(num_processes(each.uuid) for each in self.gpus) - len(self.gpus)
        return facts[0] | {"other_processes": str(max(self._others, now))}


def measuring_process(device: str = "cpu", memory_bytes: int | None = None) -> Process:
    """Return the process that checks and times candidates on a device of this machine.

    Parameters
    ----------
    device : str
        ``cpu``, or one of its GPUs such as ``cuda:0``.
    memory_bytes : int, optional
        Data it may hold; by default half of this machine's memory. A GPU's process has no such
        limit, for the driver reserves more than it takes.
    """
    # As serving sets TVM's pool up: what is measured is what will run.
    pool = {
        "TVM_NUM_THREADS": str(num_threads()),
        "TVM_BIND_THREADS": "0",
        "TVM_THREAD_POOL_SPIN_COUNT": "20000",
        # Of torch, which fills tensors there, and takes more threads for a roof alone.
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "20000",
        DEVICE_VARIABLE: device,
    }
    limit = (memory_bytes or memory_total() // 2) if device == "cpu" else None
    return Process("tvmpaged.tuning.measure_worker", pool, limit)


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
