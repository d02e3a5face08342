"""What the driver's program says of this machine's GPUs, and what they are called as targets."""

from __future__ import annotations

import shutil
import subprocess

from tvmpaged import driver
from tvmpaged.driver import Gpu
from tvmpaged.spec import TargetKey

#: Facts of a GPU that decide what a time on it is worth, by the driver's own names.
FACTS = (
    "name",
    "driver_version",
    "memory.total",
    "compute_cap",
    "pstate",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.limit",
    "persistence_mode",
)
_TIMEOUT_S = 60


def gpu_facts(*uuids: str) -> list[dict[str, str]]:
    """Return the facts of each GPU; none when there is no driver, or it does not answer.

    Parameters
    ----------
    uuids : str
        Of these alone; by default of all.
    """
    lines = _ask(f"--query-gpu={','.join(FACTS)}", *uuids)
    return [
        dict(zip(FACTS, (part.strip() for part in line.split(",")), strict=False)) for line in lines
    ]


def num_processes(uuid: str) -> int:
    """Return how many processes compute on a GPU, those of other containers too where told."""
    return sum(line.strip().isdecimal() for line in _ask("--query-compute-apps=pid", uuid))


def _ask(query: str, *uuids: str) -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    which = ["-i", ",".join(uuids)] if uuids else []
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader", *which],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def device_name(name: str) -> str:
    """Return a GPU's name as targets spell it: lower case, blanks as hyphens."""
    return name.lower().replace(" ", "-")


def target_of(gpu: Gpu) -> TargetKey:
    """Return a GPU as a target, such as ``cuda/sm_90/nvidia-h200``."""
    return TargetKey("cuda", f"sm_{gpu.major}{gpu.minor}", device_name(gpu.name))


def find_gpu(device: str = "cuda") -> Gpu:
    """Return the GPU that torch calls ``cuda:1``, say; ``cuda`` is the first.

    Raises
    ------
    ValueError
        When the text names none, or there is none of that number.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ValueError(f"device={device!r} is no GPU; such are cuda, cuda:0, cuda:1")
    found = driver.gpus()
    if not found:
        raise ValueError(
            f"device={device!r} is a GPU of this machine, and the CUDA driver finds none; to build "
            "for one that is elsewhere name its target, such as cuda/sm_90/nvidia-h200"
        )
    if int(number or 0) >= len(found):
        last = len(found) - 1
        raise ValueError(f"device={device!r} is not there; allowed: cuda:0 to cuda:{last}")
    return found[int(number or 0)]


def gpu_of(target: TargetKey) -> Gpu | None:
    """Return this machine's first GPU that a target names, or None."""
    return next((each for each in driver.gpus() if device_name(each.name) == target.device), None)


def native_gpu() -> TargetKey:
    """Return this machine's first GPU as a target.

    Raises
    ------
    ValueError
        When the driver finds none.
    """
    return target_of(find_gpu())
