"""The command lines that measure what ``tvmpaged bench`` would, under a profiler."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tvmpaged.runtime.kernel_set import NVTX_VARIABLE
from tvmpaged.spec import AttentionSpec

#: A profiler repeats or slows down what it sees; ratios mean nothing there.
_FEW_ROUNDS = ("--rounds", "5", "--against", "none", "--no-mlflow")
_OUTPUT = "tvmpaged-bench"


def profile_commands(
    specs: Sequence[AttentionSpec],
    *,
    bundle: str | None,
    device: str,
    batch: int,
    context: int,
) -> list[str]:
    """Return shell command lines, the first for a whole run, others for single kernels.

    Parameters
    ----------
    specs : sequence of AttentionSpec
        What to measure.
    bundle : str or None
        Looked in first.
    device : str
        A GPU gets NVIDIA's profilers, a CPU Linux's ``perf``.
    batch, context : int
        As of ``tvmpaged bench``.
    """
    bench = ["tvmpaged", "bench", *([bundle] if bundle else [])]
    for spec in specs:
        bench += ["--spec", str(spec)]
    bench += ["--device", device, "--batch", str(batch), "--context", str(context), *_FEW_ROUNDS]
    if device == "cpu":
        return [shlex.join(["perf", "record", "-g", "-o", f"{_OUTPUT}.perf", "--", *bench])]
    named = f"{NVTX_VARIABLE}=1 "
    # TVM calls the function on the device after the kernel.
    kernels = "|".join(sorted({spec.kernel for spec in specs} | {"merge"}))
    systems = ["nsys", "profile", "--trace=cuda,nvtx", "--output", _OUTPUT]
    compute = ["ncu", "--set", "full", "--kernel-name", f"regex:^({kernels})_kernel$"]
    compute += ["--launch-count", "4", "--export", _OUTPUT]
    return [named + shlex.join([*systems, *bench]), named + shlex.join([*compute, *bench])]
