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

from tvmpaged.bundle import Built, Manifest, read_manifest, write
from tvmpaged.bundle.search import BUNDLE_VARIABLE, SIGNATURE_VARIABLE
from tvmpaged.gpu import gpu_of
from tvmpaged.spec import AttentionSpec, TargetKey

#: A child that takes longer hangs: an artifact takes well under a second.
_TIMEOUT_S = 600.0
#: Name and outcome of a check of what this machine cannot run, or the runtime does not serve.
_NOT_RUN = ("numbers", "not run")


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
        top = Path(folder)
        write(header, built, top)
        names = {each.file: each.spec for each in read_manifest(top, header.target).artifacts}
        checks, death = _verify(top, bundle, _device(header.target))
    if death and len(tuned) > 1:
        # Which one it was shows when they run apart.
        half = len(tuned) // 2
        parts = [try_out(header, [*part, *beside], bundle) for part in (tuned[:half], tuned[half:])]
        return parts[0][0] | parts[1][0], parts[0][1] or parts[1][1]
    mine = {each.artifact.spec: death for each in tuned}
    if death:
        return mine, ""
    wrong: dict[AttentionSpec, str] = {}
    not_run: dict[str, None] = {}
    for each in checks:
        spec = names.get(each["what"])
        if spec in mine and each["outcome"] == "failed":
            before = wrong.get(spec, "its record's kernel is wrong")
            wrong[spec] = f"{before}; {each['name']}: {each['detail']}"
        # Of one artifact, or of the whole folder.
        elif (spec is None or spec in mine) and (each["name"], each["outcome"]) == _NOT_RUN:
            not_run[each["detail"]] = None
    return wrong, "; ".join(not_run)


def _device(target: TargetKey) -> str:
    """Return what may run a target's kernels here, as torch calls it."""
    gpu = gpu_of(target) if target.kind == "cuda" else None
    return "cpu" if gpu is None else f"cuda:{gpu.index}"


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
