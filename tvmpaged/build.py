"""From a spec and a choice list to a shared library: the one path, for tuning and packaging."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmpaged import kernels, schedules
from tvmpaged.sm import Resources, limits
from tvmpaged.sources import source_sha256
from tvmpaged.spec import AttentionSpec, TargetKey

if TYPE_CHECKING:
    import tvm

__all__ = ["build_artifact", "build_module", "source_sha256", "symbol_name", "tvm_target"]

#: The host's part of a GPU's artifact checks tensors and launches; it runs on every CPU we run on.
HOST_CPU = "x86-64-v3"
#: Passes of TVM that a GPU's programs are compiled without. It would add barriers where it suspects
#: a conflict in shared memory, and fails where that is under a condition; programs have their own.
GPU_PASSES_OFF = ["s_tir.ThreadSync"]
#: The same of a CPU's. It would shrink buffers to what is used of them, which is all; where
#: registers are buffers of one vector, that took three times as long as all other passes.
CPU_PASSES_OFF = ["s_tir.CompactBufferAllocation"]


def symbol_name(spec: AttentionSpec) -> str:
    """Return the name under which an artifact's library holds the spec's function."""
    return spec.kernel


def tvm_target(target: TargetKey) -> tvm.target.Target:
    """Return TVM's target for a target key.

    Raises
    ------
    ValueError
        When LLVM does not know the microarchitecture, or the kind cannot be built.
    """
    import tvm
    from tvm.target.codegen import llvm_get_cpu_archlist

    if target.kind == "cuda":
        limits(target.arch)  # refuses what is no arch
        device = {"kind": "cuda", "arch": target.arch}
        return tvm.target.Target(device, host={"kind": "llvm", "mcpu": HOST_CPU})
    known = {str(name) for name in llvm_get_cpu_archlist(tvm.target.Target("llvm"))}
    if target.arch not in known:
        raise ValueError(f"target {target}: LLVM knows no CPU {target.arch!r}; try cpu/x86-64-v3")
    return tvm.target.Target({"kind": "llvm", "mcpu": target.arch})


def build_module(spec: AttentionSpec, target: TargetKey, choices: dict[str, Any]) -> tvm.IRModule:
    """Return the scheduled program, ready for compilation.

    Raises
    ------
    ValueError
        When the choices cannot fit the spec; the message gives the rule.
    """
    from tvm.s_tir import Schedule

    _check_choices(spec, target, choices)
    sch = Schedule(kernels.kernel(spec, choices))
    schedules.schedule(sch, spec, target)
    return sch.mod


def _check_choices(spec: AttentionSpec, target: TargetKey, choices: dict[str, Any]) -> None:
    reason = schedules.reject(spec, target, choices)
    if reason is not None:
        raise ValueError(f"choices for {spec} cannot be built: {reason}")


def build_artifact(
    spec: AttentionSpec,
    target: TargetKey,
    choices: dict[str, Any],
    path: Path,
    *,
    ptx: bool = False,
) -> Resources | None:
    """Compile one spec under one choice list into a shared library.

    Parameters
    ----------
    spec : AttentionSpec
        The case.
    target : TargetKey
        What to build for; need not be this machine.
    choices : dict
        The options.
    path : Path
        Where the library is written (``.so``).
    ptx : bool
        Whether a GPU's library also holds PTX, for newer architectures.

    Returns
    -------
    Resources or None
        What the kernel takes on a GPU.

    Raises
    ------
    ValueError
        When the choices cannot fit or the target cannot be built.
    UserError
        When the device's compiler is missing.
    """
    if target.kind == "cuda":
        from tvmpaged.cuda_build import build_cuda

        _check_choices(spec, target, choices)
        return build_cuda(spec, target, choices, path, ptx)
    import tvm

    module = build_module(spec, target, choices)
    with tvm.transform.PassContext(disabled_pass=CPU_PASSES_OFF):
        tvm.compile(module, target=tvm_target(target)).export_library(str(path))
    return None
