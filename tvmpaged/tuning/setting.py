"""What a measured time holds for: sources, compiler, machine and workload."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from tvmpaged.cpu import native_target
from tvmpaged.sources import source_sha256
from tvmpaged.spec import TargetKey
from tvmpaged.tuning.device import Device
from tvmpaged.tuning.workload import Workload


@dataclass(frozen=True)
class Setting:
    """Times under one setting compare; others do not.

    Parameters
    ----------
    source_sha256 : str
        Of kernel and schedule sources.
    tvm, tvm_ffi : str
        Versions it was compiled with.
    device : str
        The device's own name.
    num_threads : int
        Threads of a kernel; of a GPU its multiprocessors.
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
    def here(
        cls, workload: Workload, target: TargetKey | None = None, device: Device | None = None
    ) -> Setting:
        """Return the setting of a target and its device here; by default this machine's CPU."""
        target = target or native_target()
        device = device or Device.here(target)
        versions = version("apache-tvm"), version("apache-tvm-ffi")
        return cls.of(device, source_sha256(target.kind), *versions, workload)

    @classmethod
    def of(
        cls, device: Device, source_sha256: str, tvm: str, tvm_ffi: str, workload: Workload
    ) -> Setting:
        """Return the setting of programs that were built so and measured there."""
        return cls(
            source_sha256=source_sha256,
            tvm=tvm,
            tvm_ffi=tvm_ffi,
            device=device.name,
            num_threads=device.num_threads,
            caches_bytes=device.caches_bytes,
            rotation_bytes=device.rotation_bytes,
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
