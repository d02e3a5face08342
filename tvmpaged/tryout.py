"""Running tuned artifacts before they enter a bundle: wrong ones do not.

What a search found was checked when it was measured, but records come from elsewhere too, are
edited, and outlive compilers. So each is run beside the reference and through the relations
(`tvmpaged verify --numbers`), in a child, because what is wrong may crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tvmpaged.bundle import Built, Manifest, host_for, read_manifest, resolve, scan, write
from tvmpaged.bundle.search import BUNDLE_VARIABLE, SIGNATURE_VARIABLE
from tvmpaged.cpu import native_target
from tvmpaged.gpu import gpu_of, target_of
from tvmpaged.spec import AttentionSpec, TargetKey

#: A child that takes longer hangs: an artifact takes well under a second.
_TIMEOUT_S = 600.0


def try_out(
    header: Manifest, built: Sequence[Built], bundle: Path
) -> tuple[dict[AttentionSpec, str], str]:
    """Return what is wrong with tuned artifacts, and why they were not run if they were not.

    Parameters
    ----------
    header : Manifest
        Of the bundle that they are for.
    built : sequence of Built
        New artifacts; those that are not tuned only serve beside the others.
    bundle : Path
        Holds what else serves beside them.
    """
    tuned = [each for each in built if each.artifact.kind == "tuned"]
    if not tuned:
        return {}, ""
    beside = [each for each in built if each not in tuned]
    with tempfile.TemporaryDirectory(prefix="tvmpaged-tryout-") as folder:
        write(header, tuned[:1], Path(folder))
        (found,) = scan(Path(folder))
        here = resolve(tuned[0].artifact.spec, host_for(_here(header.target)[0]), [found])
        if here.rejected:
            return {}, here.rejected[0].reason
    return _wrong(header, tuned, beside, bundle), ""


def _wrong(
    header: Manifest, tuned: Sequence[Built], beside: Sequence[Built], bundle: Path
) -> dict[AttentionSpec, str]:
    with tempfile.TemporaryDirectory(prefix="tvmpaged-tryout-") as folder:
        top = Path(folder)
        write(header, [*tuned, *beside], top)
        names = {each.file: each.spec for each in read_manifest(top, header.target).artifacts}
        checks, death = _verify(top, bundle, _here(header.target)[1])
    if death and len(tuned) > 1:
        # Which one it was shows when they run apart.
        half = len(tuned) // 2
        parts = tuned[:half], tuned[half:]
        return {
            spec: reason
            for part in parts
            for spec, reason in _wrong(header, part, beside, bundle).items()
        }
    if death:
        return {tuned[0].artifact.spec: death}
    found: dict[AttentionSpec, str] = {}
    for each in checks:
        spec = names.get(each["what"])
        if each["outcome"] == "failed" and spec in {one.artifact.spec for one in tuned}:
            before = found.get(spec, "its record's kernel is wrong")
            found[spec] = f"{before}; {each['name']}: {each['detail']}"
    return found


def _here(target: TargetKey) -> tuple[TargetKey, str]:
    """Return this machine's device that a target may run on, as a target and as torch calls it."""
    gpu = gpu_of(target) if target.kind == "cuda" else None
    return (native_target(), "cpu") if gpu is None else (target_of(gpu), f"cuda:{gpu.index}")


def _verify(top: Path, bundle: Path, device: str = "cpu") -> tuple[list[dict[str, str]], str]:
    """Return a child's checks, or how it ended without any."""
    environment = {**os.environ, BUNDLE_VARIABLE: str(bundle)}
    environment.pop(SIGNATURE_VARIABLE, None)  # what is tried is not signed yet
    command = [sys.executable, "-m", "tvmpaged", "verify", str(top), "--numbers", "--json"]
    try:
        done = subprocess.run(
            [*command, "--device", device],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        checks: list[dict[str, str]] = json.loads(done.stdout)["checks"]
    except subprocess.TimeoutExpired:
        return [], f"its record's kernel did not end within {_TIMEOUT_S:.0f} s"
    except (KeyError, ValueError):
        said = done.stderr.strip()[-500:]
        return [], f"its record's kernel ended the process with code {done.returncode}: {said}"
    return checks, ""
