"""What the driver says of this machine's GPUs, without a library that needs one."""

from __future__ import annotations

import shutil
import subprocess

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


def gpus() -> list[dict[str, str]]:
    """Return the facts of each GPU; none when there is no driver, or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(FACTS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        dict(zip(FACTS, (part.strip() for part in line.split(",")), strict=False))
        for line in done.stdout.strip().splitlines()
    ]


def native_gpu() -> TargetKey:
    """Return this machine's first GPU as a target, such as ``cuda/sm_90/nvidia-h200``.

    Raises
    ------
    ValueError
        When the driver finds none.
    """
    found = gpus()
    if not found:
        raise ValueError(
            "target='cuda' is this machine's GPU, and the driver (nvidia-smi) finds none; name the "
            "one to build for, such as cuda/sm_90/nvidia-h200"
        )
    arch = "sm_" + found[0]["compute_cap"].replace(".", "")
    return TargetKey("cuda", arch, device_name(found[0]["name"]))


def device_name(name: str) -> str:
    """Return a GPU's name as targets spell it: lower case, blanks as hyphens."""
    return name.lower().replace(" ", "-")


def gpu_state(target: TargetKey) -> dict[str, str] | None:
    """Return the facts of the GPU that a target names; None for a CPU, or when it is not here."""
    if target.kind != "cuda":
        return None
    found = [each for each in gpus() if device_name(each["name"]) == target.device]
    return found[0] if found else None
