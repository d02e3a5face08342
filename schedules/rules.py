"""The rules that a choice list must pass before anything is compiled.

A rule names what cannot fit (registers, scratch), what does not divide, and what means nothing: an
option of the step form that is not taken must stand at its first value, so that no program is tried
twice under two names.
"""

from __future__ import annotations

from typing import Any

from tvmpaged.cpu import MICROARCHITECTURES
from tvmpaged.spec import ATTENTION_KERNELS, MAX_HEAD_DIM, AttentionSpec, TargetKey

Choices = dict[str, Any]

#: Options that matter under one value of "step" only, and where they stand under the other.
ROWS_ONLY = {"prefetch_keys": 0, "prefetch_level": 1, "dot_unroll": 1}
COLUMNS_ONLY = {"dot_vectors": 1, "weigh_rows": 1}

#: Bytes of one core's second-level cache that a tile's scratch may fill (all of the
#: least L2 that a CPU with AVX2 has, Haswell's 256 KiB; a quarter or less of a current one's).
SCRATCH_BYTES = 256 * 1024


def has_avx512(target: TargetKey) -> bool:
    """Tell whether code for the target has 32 vector registers of 64 bytes."""
    return "avx512f" in MICROARCHITECTURES.get(target.arch, frozenset())


def num_registers(target: TargetKey) -> int:
    """Return how many vector registers code for the target has."""
    return 32 if has_avx512(target) else 16


def scratch_bytes(spec: AttentionSpec, rows: int, keys: int) -> int:
    """Return what a tile of the columns step keeps: K, V, scores, q and the accumulators."""
    dims = (spec.head_dim or MAX_HEAD_DIM) + (spec.head_dim_v or MAX_HEAD_DIM)
    return 4 * (keys * (dims + rows) + rows * dims)


def register_tiles(spec: AttentionSpec, choices: Choices) -> dict[str, int]:
    """Return, for each option that is a side of a register tile, the extent that it must divide.

    An extent known at run time only counts as 1: such a loop is not tiled.
    """
    lanes = choices["lanes"]
    vectors = spec.head_dim // lanes or 1
    vectors_v = spec.head_dim_v // lanes or 1
    if choices["step"] == "rows":
        return {"dot_keys": lanes, "dot_unroll": vectors, "weigh_vectors": vectors_v}
    return {
        "dot_keys": choices["keys_per_step"],
        "dot_vectors": choices["row_tile"] // lanes,
        "weigh_rows": choices["row_tile"],
        "weigh_vectors": vectors_v,
    }


def reject(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    """Return why a choice list cannot be built or cannot win; None when it may be tried."""
    if spec.kernel not in ATTENTION_KERNELS:
        return None
    lanes, keys, rows = choices["lanes"], choices["keys_per_step"], choices["row_tile"]
    for name, dim in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if dim % lanes:
            return f"lanes={lanes} does not divide {name}={dim}"
    if keys % lanes:
        return f"keys_per_step={keys} is no multiple of lanes={lanes}"
    if choices["split_length"] % keys:
        return f"split_length={choices['split_length']} is no multiple of keys_per_step={keys}"
    if choices["step"] == "columns" and rows % lanes:
        return f"row_tile={rows} is no multiple of lanes={lanes}"
    for name, extent in register_tiles(spec, choices).items():
        if extent % choices[name]:
            return f"{name}={choices[name]} does not divide {extent}"
    step_rule, idle = (
        (_reject_rows, COLUMNS_ONLY) if choices["step"] == "rows" else (_reject_columns, ROWS_ONLY)
    )
    for name, first in idle.items():
        if choices[name] != first:
            return f"{name}={choices[name]} means nothing under step={choices['step']!r}"
    return step_rule(spec, target, choices)


def _reject_rows(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    rows = choices["row_tile"]
    if spec.group_size and rows > spec.group_size:
        return f"row_tile={rows} is more than the group's {spec.group_size} rows"
    if not choices["prefetch_keys"] and choices["prefetch_level"] != 1:
        return "prefetch_level means nothing without prefetch_keys"
    for name in ("dot_keys", "weigh_vectors"):
        # Accumulators beside one vector of K or V and one of q or a probability.
        reason = _reject_registers(f"row_tile x {name}", rows * choices[name] + 2, target, choices)
        if reason:
            return reason
    return None


def _reject_columns(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    rows, lanes = choices["row_tile"], choices["lanes"]
    if spec.kernel == "decode" and spec.group_size and rows - spec.group_size >= lanes:
        return f"row_tile={rows} leaves a vector of the group's {spec.group_size} rows empty"
    for first, second in (("dot_keys", "dot_vectors"), ("weigh_rows", "weigh_vectors")):
        # Accumulators beside the vectors of one side; the other side is broadcast from memory.
        needed = (choices[first] + 1) * choices[second]
        reason = _reject_registers(f"{first} x {second}", needed, target, choices)
        if reason:
            return reason
    scratch = scratch_bytes(spec, rows, choices["keys_per_step"])
    if scratch > SCRATCH_BYTES:
        return f"the tile's scratch of {scratch} bytes is over {SCRATCH_BYTES}"
    return None


def _reject_registers(what: str, vectors: int, target: TargetKey, choices: Choices) -> str | None:
    halves = 2 if choices["lanes"] == 16 and not has_avx512(target) else 1
    if vectors * halves > num_registers(target):
        return f"{what} needs {vectors * halves} vector registers"
    return None
