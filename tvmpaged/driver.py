"""The GPUs of this machine as the CUDA driver describes them, without toolkit or context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from uuid import UUID

DRIVER = "libcuda.so.1"

#: Fields of `Gpu` -> ``CUdevice_attribute`` of ``cuda.h``.
_ATTRIBUTES = {
    "major": 75,
    "minor": 76,
    "multiprocessors": 16,
    "l2_bytes": 38,
    "shared_per_sm": 81,
    "shared_per_block": 97,
    "threads_per_sm": 39,
    "blocks_per_sm": 106,
    "threads_per_block": 1,
    "registers_per_sm": 82,
}
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """One GPU, of those that ``CUDA_VISIBLE_DEVICES`` leaves.

    Parameters
    ----------
    index : int
        Its number, as in ``cuda:0``.
    name, uuid : str
        As ``nvidia-smi`` writes them.
    major, minor : int
        Compute capability.
    multiprocessors : int
        How many it has.
    l2_bytes : int
        Its second-level cache.
    shared_per_sm, shared_per_block, threads_per_sm, blocks_per_sm : int
        What a multiprocessor and a block may have; see `tvmpaged.sm.SmLimits`.
    threads_per_block, registers_per_sm : int
        Likewise.
    """

    index: int
    name: str
    uuid: str
    major: int
    minor: int
    multiprocessors: int
    l2_bytes: int
    shared_per_sm: int
    shared_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    threads_per_block: int
    registers_per_sm: int


@cache
def gpus(library: str = DRIVER) -> tuple[Gpu, ...]:
    """Return this machine's GPUs; none where there is no driver, or it finds none.

    Parameters
    ----------
    library : str
        The driver's library.
    """
    try:
        driver = ctypes.CDLL(library)
        count = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return ()
        return tuple(_describe(driver, index) for index in range(count.value))
    except (OSError, AttributeError):  # none, or the empty one that stands in for it in a compiler
        return ()


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, value = ctypes.c_int(), ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), index))
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver.cuDeviceGetName(name, _NAME_BYTES, device))
    uuid = ctypes.create_string_buffer(16)
    _check(driver.cuDeviceGetUuid_v2(uuid, device))
    found = {}
    for field, attribute in _ATTRIBUTES.items():
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        found[field] = value.value
    return Gpu(index=index, name=name.value.decode(), uuid=f"GPU-{UUID(bytes=uuid.raw)}", **found)


def _check(code: int) -> None:
    """Take a GPU that does not answer for one that is not there."""
    if code:
        raise OSError(f"the CUDA driver answered {code}")
