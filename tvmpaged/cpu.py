"""Which CPU this is, without a compiler.

A virtual machine may hide its model number, and a name derived from it is then wrong in both
directions (a Sapphire Rapids guest that calls itself Rocket Lake). So the microarchitecture is
the richest one in `MICROARCHITECTURES` whose features this machine all has. The table holds, for
each name, the features LLVM turns on for ``-mcpu=<name>`` that change the code it emits; a test
compares it with LLVM itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from tvmpaged.spec import TargetKey

_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
_ICELAKE = _V4 | frozenset(
    "avx512ifma avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq "
    "gfni vaes vpclmulqdq sha_ni".split()
)
_SAPPHIRE = _ICELAKE | frozenset(
    "avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_bf16 amx_int8".split()
)

#: LLVM's name -> the kernel's names (/proc/cpuinfo) of the features its code needs; richest first.
MICROARCHITECTURES: dict[str, frozenset[str]] = {
    "graniterapids": _SAPPHIRE | {"amx_fp16"},
    "sapphirerapids": _SAPPHIRE,
    "znver5": _ICELAKE | {"avx512_bf16", "avx_vnni", "avx512_vp2intersect", "clzero", "sse4a"},
    "znver4": _ICELAKE | {"avx512_bf16", "clzero", "sse4a"},
    "icelake-server": _ICELAKE,
    "skylake-avx512": _V4 | {"aes", "adx"},
    "x86-64-v4": _V4,
    "x86-64-v3": _V3,
}


@cache
def cpu_flags() -> frozenset[str]:
    """Return this machine's CPU features by the names of ``/proc/cpuinfo``.

    Those of AMX are among them only where the system lets this process use it: Linux keeps no room
    for tile registers until it is asked, and an instruction before that ends the process.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            flags = frozenset(line.split(":", 1)[1].split())
            amx = frozenset(name for name in flags if name.startswith("amx_"))
            return flags if not amx or _ask_for_tiles() else flags - amx
    return frozenset()


def _ask_for_tiles() -> bool:
    """Ask Linux for the tile registers' state (its Documentation/arch/x86/xstate.rst)."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(arch_prctl, request_permission, tile_data) == 0)


def cpu_model() -> str:
    """Return the CPU's own name, such as ``Intel(R) Xeon(R) Processor``."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def detect_microarchitecture(flags: frozenset[str]) -> str:
    """Return the richest microarchitecture whose features all are in `flags`.

    Raises
    ------
    ValueError
        When not even x86-64-v3 (AVX2) fits.
    """
    for name, needed in MICROARCHITECTURES.items():
        if needed <= flags:
            return name
    missing = sorted(_V3 - flags)
    raise ValueError(f"this CPU lacks {', '.join(missing)}; x86-64-v3 (AVX2) is the least needed")


def native_target() -> TargetKey:
    """Return this machine's CPU as a target, such as ``cpu/sapphirerapids``."""
    return TargetKey("cpu", detect_microarchitecture(cpu_flags()))


def num_threads() -> int:
    """Return the threads kernels use: ``TVMPAGED_NUM_THREADS``, else the usable cores.

    Raises
    ------
    ValueError
        When the variable is no positive integer.
    """
    text = os.environ.get("TVMPAGED_NUM_THREADS", "").strip()
    if not text:
        return len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"TVMPAGED_NUM_THREADS={text!r} must be a positive integer")
    return int(text)
