"""Where an artifact comes from, and what it needs: sources, exact versions of the tools, target."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from shutil import which

from tvmpaged.bundle import Abi, BuiltWith, Git, Manifest, utc_now
from tvmpaged.bundle.search import installed_version
from tvmpaged.cpu import MICROARCHITECTURES
from tvmpaged.nvcc import find_nvcc
from tvmpaged.sm import WITH_PTX, SmArch, limits
from tvmpaged.spec import TargetKey


def _output(*command: str) -> str | None:
    """Return what a program prints, or None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def git_state(folder: Path = Path(__file__).parent) -> Git:
    """Return the commit of the checkout that holds the sources, and whether it has other changes.

    Both are None outside a checkout. An installed package may lie inside somebody else's checkout,
    so the sources must be tracked there.
    """
    git = ("git", "-C", str(folder))
    if _output(*git, "ls-files", "--error-unmatch", "spec.py") is None:
        return Git(None, None)
    commit, status = _output(*git, "rev-parse", "HEAD"), _output(*git, "status", "--porcelain")
    return Git(commit, None if status is None else bool(status))


def built_with(target: TargetKey) -> BuiltWith:
    """Return the exact versions that a build for this target uses."""
    # As TVM's export chooses it; to ask TVM would import the compiler where none is needed.
    names = ("g++", "gcc", "clang++", "clang", "c++", "cc")
    found = (
        os.environ.get("CXX") or os.environ.get("CC") or next(filter(None, map(which, names)), "")
    )
    linker = _output(found, "--version") or "unknown"
    nvcc = find_nvcc() if target.kind == "cuda" else None
    toolkit = _output(str(nvcc), "--version") if nvcc else None
    return BuiltWith(
        tvmpaged=installed_version("tvmpaged"),
        tvm=installed_version("apache-tvm"),
        tvm_ffi=installed_version("apache-tvm-ffi"),
        linker=linker.splitlines()[0],
        toolkit=toolkit.splitlines()[-1] if toolkit else None,
    )


def header(target: TargetKey, *, ptx: bool = False) -> Manifest:
    """Return a manifest without artifacts: what all that is built now for a target share.

    Parameters
    ----------
    target : TargetKey
        For what.
    ptx : bool
        Whether code for a GPU has PTX beside it.

    Raises
    ------
    ValueError
        When the microarchitecture, or the sm arch, is not known, or there is no such PTX.
    """
    cpu = target.kind == "cpu"
    if cpu and target.arch not in MICROARCHITECTURES:
        known = ", ".join(f"cpu/{name}" for name in MICROARCHITECTURES)
        raise ValueError(f"target={target} is not known; allowed: native, {known}")
    if not cpu:
        limits(target.arch)
        exact = SmArch.parse(target.arch)
        if ptx and exact is not None and exact.suffix:
            plain = replace(exact, suffix="")
            raise ValueError(f"target={target} has no PTX for newer GPUs; with --ptx take {plain}")
    return Manifest(
        target=target,
        abi=Abi(),
        cpu_features=tuple(sorted(MICROARCHITECTURES[target.arch])) if cpu else (),
        sm_arch=None if cpu else target.arch + WITH_PTX * ptx,
        built_with=built_with(target),
        git=git_state(),
        created_at=utc_now(),
    )
