"""Building for CUDA where there is no GPU: a child process with a stand-in for the driver.

TVM makes a loadable artifact only where its CUDA runtime library can be loaded, and that one wants
the driver's. Building needs no function of it, so where there is no driver an empty library of its
name does. It lives in a temporary folder, for as long as the child does, and nowhere else: in this
process, in a wheel or in a bundle it would hide the real one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tvmpaged.nvcc import require_nvcc
from tvmpaged.sm import Resources
from tvmpaged.spec import AttentionSpec, TargetKey


def build_cuda(
    spec: AttentionSpec, target: TargetKey, choices: dict[str, Any], path: Path, ptx: bool
) -> Resources:
    """Compile one spec under one choice list into a shared library, in a child process.

    Parameters
    ----------
    spec, target, choices, path, ptx
        As of `tvmpaged.build.build_artifact`.

    Raises
    ------
    UserError
        When nvcc is missing; says what to install.
    ValueError
        When nvcc refuses the program.
    RuntimeError
        When the child failed; with what it said last.
    """
    require_nvcc()
    request = {
        "spec": str(spec),
        "target": str(target),
        "choices": choices,
        "path": str(path),
        "ptx": ptx,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tvmpaged.cuda_child"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"building {spec} for {target} failed:\n{done.stderr.strip()[-4000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if "error" in answer:
        raise ValueError(answer["error"])
    return Resources(**answer["resources"])
