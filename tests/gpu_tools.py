"""A CUDA driver and its nvidia-smi that say what a test wants, where there is no GPU."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tvmpaged import driver
from tvmpaged.driver import _ATTRIBUTES, Gpu
from tvmpaged.spec import TargetKey

H200_TARGET = TargetKey("cuda", "sm_90", "nvidia-h200")
H200 = "NVIDIA H200, 595.58, 143771 MiB, 9.0, P0, 1980 MHz, 1980 MHz, 3201 MHz, 700.00 W, Enabled"


def gpu(index: int = 0, name: str = "NVIDIA H200", sm: tuple[int, int] = (9, 0)) -> Gpu:
    """Return a GPU as a driver would describe it."""
    return Gpu(
        index=index,
        name=name,
        uuid=f"GPU-{index:08x}-0000-0000-0000-000000000000",
        major=sm[0],
        minor=sm[1],
        multiprocessors=132,
        l2_bytes=60 << 20,
        shared_per_sm=228 << 10,
        shared_per_block=227 << 10,
        threads_per_sm=2048,
        blocks_per_sm=32,
        threads_per_block=1024,
        registers_per_sm=65536,
    )


def build_driver(path: Path, gpus: Sequence[Gpu]) -> Path:
    """Compile a library that answers as the CUDA driver would."""
    attributes = "".join(
        f"    if (device == {each.index} && attribute == {code}) *value = {getattr(each, name)};\n"
        for each in gpus
        for name, code in _ATTRIBUTES.items()
    )
    names = ", ".join(f'"{each.name}"' for each in gpus) or '""'
    source = f"""
#include <string.h>
static const char* names[] = {{{names}}};
int cuInit(unsigned flags) {{ return flags; }}
int cuDeviceGetCount(int* count) {{ *count = {len(gpus)}; return 0; }}
int cuDeviceGet(int* device, int index) {{ *device = index; return index >= {len(gpus)}; }}
int cuDeviceGetName(char* name, int length, int device) {{
    strncpy(name, names[device], length); return 0;
}}
int cuDeviceGetUuid_v2(char* uuid, int device) {{
    memset(uuid, 0, 16); uuid[3] = device; return 0;
}}
int cuDeviceGetAttribute(int* value, int attribute, int device) {{
    *value = -1;
{attributes}    return *value == -1;
}}
"""
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@dataclass
class Program:
    """A stand-in for nvidia-smi, alone on the path.

    Parameters
    ----------
    folder : Path
        Holds the program; ``facts`` and ``processes`` are what it prints, ``asked`` its arguments.
    """

    folder: Path

    @classmethod
    def write(cls, folder: Path, facts: str = H200) -> "Program":
        tool = folder / "nvidia-smi"
        tool.write_text(
            f"""#!/bin/sh
echo "$@" >> {folder}/asked
case "$1" in
    --query-compute-apps*) exec /bin/cat {folder}/processes ;;
    *) exec /bin/cat {folder}/facts ;;
esac
"""
        )
        tool.chmod(0o755)
        program = cls(folder)
        program.says(facts)
        program.computes()
        return program

    def says(self, facts: str) -> None:
        (self.folder / "facts").write_text(f"{facts}\n")

    def computes(self, *pids: int) -> None:
        (self.folder / "processes").write_text("".join(f"{pid}\n" for pid in pids))

    @property
    def asked(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@contextmanager
def gpus_here(*found: Gpu) -> Iterator[None]:
    """Let this process believe that the driver finds these GPUs."""
    with mock.patch.object(driver, "gpus", return_value=found):
        yield


def path_with(folder: Path) -> str:
    """Return a search path on which the folder comes first."""
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
