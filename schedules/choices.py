"""Choices as data: the untuned default of each spec, the open list a search may try, and the rules.

A choice list is flat: option name -> int or str. The default is one such list; the space gives each
option its values; `reject` says why a combination cannot fit, before anything is compiled. An
option that means nothing under another (the register tile of the step not taken) must stand at its
first value, so that no program is tried twice under two names.
"""

from __future__ import annotations

from typing import Any

from tvmpaged.cpu import MICROARCHITECTURES
from tvmpaged.spec import ATTENTION_KERNELS, MAX_HEAD_DIM, AttentionSpec, TargetKey

Choices = dict[str, Any]

#: Options that matter under one value of "step" only, in the order of `space`.
ROWS_ONLY = ("prefetch_keys", "prefetch_level", "dot_unroll")
COLUMNS_ONLY = ("dot_vectors", "weigh_rows")

#: Bytes of one core's second-level cache that a tile's scratch may fill (half of the least L2 among
#: the microarchitectures named in `tvmpaged.cpu`: 512 KiB on Zen 3).
SCRATCH_BYTES = 256 * 1024


def has_avx512(target: TargetKey) -> bool:
    """Tell whether code for the target has 32 vector registers of 64 bytes."""
    return "avx512f" in MICROARCHITECTURES.get(target.arch, frozenset())


def _lanes(spec: AttentionSpec, target: TargetKey) -> int:
    """Return the widest vector that divides both head sizes."""
    fits = spec.head_dim and spec.head_dim % 16 == 0 and spec.head_dim_v % 16 == 0
    return 16 if fits and has_avx512(target) else 8


def default_choices(spec: AttentionSpec, target: TargetKey) -> Choices:
    """Return the untuned default: vectorised, all threads, no search behind it."""
    if spec.kernel not in ATTENTION_KERNELS:
        return {} if spec.kernel == "copy_blocks" else {"lanes": 8}
    lanes, registers = _lanes(spec, target), _registers(target)
    few_rows = spec.kernel == "decode" and spec.group_size <= 8  # RUN_TIME counts as few
    if spec.is_generic:
        row_tile = 4 if few_rows else 16
    elif few_rows:
        row_tile = spec.group_size
    else:
        rows = spec.group_size if spec.kernel == "decode" else 64
        row_tile = min(64, -(-rows // lanes) * lanes)
    while not few_rows and _scratch_bytes(spec, row_tile, 32) > SCRATCH_BYTES:
        row_tile -= lanes
    # As many accumulators as the registers hold beside their operands, four vectors at most.
    fit = (registers - 2) // row_tile if few_rows else registers // 5
    vectors = max(1, min(4, fit))
    return {
        "step": "rows" if few_rows else "columns",
        "row_tile": row_tile,
        "keys_per_step": 16 if spec.is_generic else 32,
        "lanes": lanes,
        "split_length": 512 if spec.kernel == "decode" else 1024,
        "weigh_vectors": vectors,
        "prefetch_keys": 32 if few_rows and not spec.is_generic else 0,
        "prefetch_level": 2 if few_rows and not spec.is_generic else 1,
        "dot_unroll": 4 if few_rows else 1,
        "dot_keys": max(1, min(lanes, (registers - 8) // row_tile)) if few_rows else 4,
        "dot_vectors": 1 if few_rows else min(vectors, row_tile // lanes),
        "weigh_rows": 1 if few_rows else 4,
    }


def space(spec: AttentionSpec, target: TargetKey) -> dict[str, tuple[Any, ...]]:
    """Return the open list: each option's values. Its first values are legal everywhere."""
    if spec.kernel not in ATTENTION_KERNELS or spec.is_generic:
        return {name: (value,) for name, value in default_choices(spec, target).items()}
    widest = _lanes(spec, target)
    decode = spec.kernel == "decode"
    group_tiles = {spec.group_size, -(-spec.group_size // 2), 8, 16} if decode else set()
    row_tiles = sorted(group_tiles | {8, 16, 32, 48, 64, 96, 128})
    return {
        "step": ("rows", "columns") if decode else ("columns",),
        "row_tile": tuple(row_tiles),
        "keys_per_step": (16, 32, 64, 128),
        "lanes": (8, 16) if widest == 16 else (8,),
        "split_length": (256, 512, 1024, 2048) if decode else (1024, 2048, 4096),
        "weigh_vectors": (1, 2, 3, 4, 5, 8),
        "prefetch_keys": (0, 16, 32, 64, 128),
        "prefetch_level": (1, 2, 3),
        "dot_unroll": (1, 2, 4, 8),
        "dot_keys": (1, 2, 4, 8, 16),
        "dot_vectors": (1, 2, 3, 4, 6),
        "weigh_rows": (1, 2, 4, 8, 16),
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
    return (_reject_rows if choices["step"] == "rows" else _reject_columns)(
        spec, target, choices, rows, lanes
    )


def _idle(choices: Choices, names: tuple[str, ...], first: dict[str, Any]) -> str | None:
    for name in names:
        if choices[name] != first[name]:
            return f"{name}={choices[name]} means nothing under step={choices['step']!r}"
    return None


_FIRST_VALUES = {
    "prefetch_keys": 0,
    "prefetch_level": 1,
    "dot_unroll": 1,
    "dot_vectors": 1,
    "weigh_rows": 1,
}


def _reject_rows(
    spec: AttentionSpec, target: TargetKey, choices: Choices, rows: int, lanes: int
) -> str | None:
    if spec.group_size and rows > spec.group_size:
        return f"row_tile={rows} is more than the group's {spec.group_size} rows"
    if not choices["prefetch_keys"] and choices["prefetch_level"] != 1:
        return "prefetch_level means nothing without prefetch_keys"
    per_vector = _registers_per_vector(target, lanes)
    for name in ("dot_keys", "weigh_vectors"):
        # Accumulators beside one vector of K or V and one of q or a probability.
        registers = (rows * choices[name] + 2) * per_vector
        if registers > _registers(target):
            return f"row_tile x {name} needs {registers} vector registers"
    return _idle(choices, COLUMNS_ONLY, _FIRST_VALUES)


def _reject_columns(
    spec: AttentionSpec, target: TargetKey, choices: Choices, rows: int, lanes: int
) -> str | None:
    if rows % lanes:
        return f"row_tile={rows} is no multiple of lanes={lanes}"
    per_vector = _registers_per_vector(target, lanes)
    for what, first, second in (
        ("dot_keys x dot_vectors", choices["dot_keys"], choices["dot_vectors"]),
        ("weigh_rows x weigh_vectors", choices["weigh_rows"], choices["weigh_vectors"]),
    ):
        registers = (first * second + second) * per_vector
        if registers > _registers(target):
            return f"{what} needs {registers} vector registers"
    if rows // lanes < choices["dot_vectors"]:
        return f"dot_vectors={choices['dot_vectors']} is more than the tile's {rows // lanes}"
    scratch = _scratch_bytes(spec, rows, choices["keys_per_step"])
    if scratch > SCRATCH_BYTES:
        return f"the tile's scratch of {scratch} bytes is over {SCRATCH_BYTES}"
    return _idle(choices, ROWS_ONLY, _FIRST_VALUES)


def _scratch_bytes(spec: AttentionSpec, rows: int, keys: int) -> int:
    """Return what a tile of the columns step keeps: K, V, scores, q and the accumulators."""
    dims = (spec.head_dim or MAX_HEAD_DIM) + (spec.head_dim_v or MAX_HEAD_DIM)
    return 4 * (keys * (dims + rows) + rows * dims)


def _registers(target: TargetKey) -> int:
    return 32 if has_avx512(target) else 16


def _registers_per_vector(target: TargetKey, lanes: int) -> int:
    return 2 if lanes == 16 and not has_avx512(target) else 1
