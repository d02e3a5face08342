"""CUDA architectures by their sm names: their spelling, which runs what, and their limits.

Limits of a GPU at hand come from its driver; the table serves builds for a GPU that is not here.
It is from NVIDIA's CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tvmpaged import driver
from tvmpaged.driver import Gpu

WARP_SIZE = 32
#: The mask that names all threads of a warp: a shuffle under it waits for those that a condition
#: has held up.
ALL_LANES = 0xFFFFFFFF
#: Follows the arch of a folder's code where PTX is beside it, which newer drivers compile.
WITH_PTX = "+ptx"
#: What a kernel may have without asking for more when it is launched.
STATIC_SHARED_BYTES = 48 * 1024
_KIB = 1024
_ARCH = re.compile(r"sm_(?P<major>\d+)(?P<minor>\d)(?P<suffix>[af]?)")


@dataclass(frozen=True)
class SmArch:
    """An architecture's name in parts: ``sm_90a`` is major 9, minor 0, suffix ``a``.

    Parameters
    ----------
    major, minor : int
        Compute capability.
    suffix : str
        ``a``: code for exactly this one; ``f``: for its family; or empty.
    """

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> SmArch | None:
        """Return the parts of a name such as ``sm_90``; None when it is none."""
        match = _ARCH.fullmatch(text)
        if match is None:
            return None
        return cls(int(match["major"]), int(match["minor"]), match["suffix"])

    def __str__(self) -> str:
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def number(self) -> str:
        """What follows ``sm_`` and ``compute_``."""
        return f"{self.major}{self.minor}{self.suffix}"


def runs_on(code: str, gpu: str) -> tuple[bool, int]:
    """Return whether device code runs on an arch, and how far it is from it (less is better).

    Code runs on later minors of its major; that for exactly one arch (``a``) only there. PTX runs
    on everything later, compiled by the driver when it is loaded.

    Parameters
    ----------
    code : str
        What was built, such as ``sm_90``, ``sm_90a`` or ``sm_90+ptx``.
    gpu : str
        What it is to run on, such as ``sm_103``.
    """
    built, here = SmArch.parse(code.removesuffix(WITH_PTX)), SmArch.parse(gpu)
    if built is None or here is None:
        return False, 0
    there, mine = (built.major, built.minor), (here.major, here.minor)
    if built.suffix == "a":
        return there == mine, 0
    if built.major == here.major and built.minor <= here.minor:
        return True, here.minor - built.minor
    return code.endswith(WITH_PTX) and there < mine, 10 * (here.major - built.major)


@dataclass(frozen=True)
class SmLimits:
    """What one multiprocessor has.

    Parameters
    ----------
    shared_per_sm, shared_per_block : int
        Bytes of shared memory, of all blocks and of the largest one.
    threads_per_sm, blocks_per_sm : int
        Resident at a time.
    threads_per_block, registers_per_sm, registers_per_thread : int
        The same everywhere so far.
    """

    shared_per_sm: int
    shared_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    threads_per_block: int = 1024
    registers_per_sm: int = 65536
    registers_per_thread: int = 255


LIMITS: dict[tuple[int, int], SmLimits] = {
    (8, 0): SmLimits(164 * _KIB, 163 * _KIB, 2048, 32),
    (8, 6): SmLimits(100 * _KIB, 99 * _KIB, 1536, 16),
    (8, 9): SmLimits(100 * _KIB, 99 * _KIB, 1536, 24),
    (9, 0): SmLimits(228 * _KIB, 227 * _KIB, 2048, 32),
    (10, 0): SmLimits(228 * _KIB, 227 * _KIB, 2048, 32),
    (12, 0): SmLimits(100 * _KIB, 99 * _KIB, 1536, 24),
}


def limits(arch: str, here: Sequence[Gpu] | None = None) -> tuple[SmLimits, str]:
    """Return an architecture's limits, and a warning when they are guessed.

    An unknown minor has the least of what those of its major have.

    Parameters
    ----------
    arch : str
        Such as ``sm_90`` or ``sm_90a``.
    here : sequence of Gpu, optional
        GPUs whose driver was asked; by default those of this machine.

    Raises
    ------
    ValueError
        When the name is none, or nothing of its major is known.
    """
    parts = SmArch.parse(arch)
    known = ", ".join(f"sm_{major}{minor}" for major, minor in LIMITS)
    if parts is None:
        raise ValueError(f"arch={arch!r} is no sm architecture; such are {known}, sm_90a")
    for gpu in driver.gpus() if here is None else here:
        if (gpu.major, gpu.minor) == (parts.major, parts.minor):
            return _limits_of(gpu), ""
    exact = LIMITS.get((parts.major, parts.minor))
    if exact is not None:
        return exact, ""
    of_major = {key: each for key, each in LIMITS.items() if key[0] == parts.major}
    if not of_major:
        raise ValueError(f"arch={arch!r} is not supported; allowed: {known}, and their majors")
    least = {
        field.name: min(getattr(each, field.name) for each in of_major.values())
        for field in fields(SmLimits)
    }
    names = ", ".join(f"sm_{major}{minor}" for major, minor in of_major)
    return SmLimits(**least), f"the limits of {arch} are not known; those of {names} are taken"


def _limits_of(gpu: Gpu) -> SmLimits:
    """Return what a GPU's driver says; the registers of a thread it does not say."""
    asked = {field.name for field in fields(SmLimits)} - {"registers_per_thread"}
    return SmLimits(**{name: getattr(gpu, name) for name in asked})


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on its device, as ptxas says.

    Parameters
    ----------
    registers : int
        Of each thread.
    shared_bytes : int
        Static shared memory of a block.
    spill_bytes : int
        Stored and loaded by a thread because registers did not suffice.
    stack_bytes : int
        Of a thread: arrays that no registers hold.
    """

    registers: int
    shared_bytes: int
    spill_bytes: int
    stack_bytes: int


def occupancy(limits: SmLimits, threads: int, taken: Resources) -> float:
    """Return the share of a multiprocessor's threads that can be resident under a kernel.

    Parameters
    ----------
    limits : SmLimits
        Of the architecture.
    threads : int
        Of one block.
    taken : Resources
        By the kernel.
    """
    warps = -(-threads // WARP_SIZE)
    # Registers are given out to warps in units of 256; a block also takes 1 KiB of shared memory.
    per_warp = -(-max(taken.registers, 1) * WARP_SIZE // 256) * 256
    blocks = min(
        limits.blocks_per_sm,
        limits.threads_per_sm // (warps * WARP_SIZE),
        limits.registers_per_sm // (per_warp * warps),
        limits.shared_per_sm // (taken.shared_bytes + _KIB),
    )
    return blocks * warps * WARP_SIZE / limits.threads_per_sm
