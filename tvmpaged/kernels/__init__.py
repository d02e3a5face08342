"""TensorIR programs, one file per kernel: WHAT is computed, before any layout on a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tvm

    from tvmpaged.spec import AttentionSpec


def kernel(spec: AttentionSpec, choices: dict[str, Any]) -> tvm.IRModule:
    """Build the program of one spec under one choice list.

    Parameters
    ----------
    spec : AttentionSpec
        The case.
    choices : dict
        Options by name, plain data; the ones a program does not know are an error there.

    Returns
    -------
    tvm.IRModule
        One PrimFunc whose global symbol is ``spec.kernel``.
    """
    from tvmpaged.kernels.append_kv import append_kv
    from tvmpaged.kernels.attention import attention
    from tvmpaged.kernels.copy_blocks import copy_blocks
    from tvmpaged.kernels.merge import merge

    programs = {
        "decode": attention,
        "prefill": attention,
        "merge": merge,
        "append_kv": append_kv,
        "copy_blocks": copy_blocks,
    }
    return programs[spec.kernel](spec, choices)
