"""Choices as data: the untuned default of each spec, and the open list that a search may try.

A choice list is flat: option name -> int or str. The default is one such list; the space gives each
option its values. Which combinations may be built is `tvmpaged.schedules.cpu_rules`' business.
"""

from __future__ import annotations

from typing import Any

from tvmpaged.kernels.tile_registers import DEPTH, SIDE
from tvmpaged.layout import PAIRS
from tvmpaged.schedules.choices import Choices
from tvmpaged.schedules.cpu_rules import (
    IDLE,
    SCRATCH_BYTES,
    TILE_SCRATCH_BYTES,
    has_amx,
    has_avx512,
    native_layout,
    num_registers,
    register_tiles,
    scratch_bytes,
    tile_scratch_bytes,
)
from tvmpaged.spec import ATTENTION_KERNELS, DTYPE_BYTES, AttentionSpec, TargetKey

#: Up to this many query rows share a key, a decode takes its scores row by row; up to the second
#: number nothing else ever won (`tvmpaged show --options` over the searches in ``tuning_logs``).
MOST_ROWS = 8
ALWAYS_ROWS = 4

#: From so many bytes of a row of K on, 16 keys ahead are enough for what comes from memory, and
#: what comes from a cache wants to be in the first level: measured at 256, 320 and 512 bytes.
LONG_ROW_BYTES = 320


def _lanes(spec: AttentionSpec, target: TargetKey) -> int:
    """Return the widest vector that divides both head sizes."""
    fits = spec.head_dim and spec.head_dim % 16 == 0 and spec.head_dim_v % 16 == 0
    return 16 if fits and has_avx512(target) else 8


def _divisor(extent: int, limit: int) -> int:
    """Return the largest divisor of `extent` that is at most `limit`."""
    return max(d for d in range(1, max(1, min(extent, limit)) + 1) if extent % d == 0)


def default_choices(spec: AttentionSpec, target: TargetKey) -> Choices:
    """Return the untuned default: vectorised, all threads, no search behind it."""
    native: Choices = {"layout": native_layout(spec, target)} if spec.layout == "native" else {}
    if spec.kernel not in ATTENTION_KERNELS:
        return {} if spec.kernel == "copy_blocks" else {"lanes": 8} | native
    if has_amx(spec, target):
        return native | (_default_pairs(spec) if PAIRS in native.values() else _default_tiles(spec))
    return native | _default_vectors(spec, target)


def _default_vectors(spec: AttentionSpec, target: TargetKey) -> Choices:
    """Return the untuned default where no tiles are."""
    # A run-time group counts as few rows.
    few_rows = spec.kernel == "decode" and spec.group_size <= MOST_ROWS
    step = "rows" if few_rows else "columns"
    choices: Choices = IDLE["vector", step] | {
        "step": step,
        "isa": "vector",
        "lanes": _lanes(spec, target),
        "keys_per_step": 16 if spec.is_generic else 32,
        "split_length": 512 if spec.kernel == "decode" else 1024,
    }
    if few_rows:
        is_long = spec.head_dim * DTYPE_BYTES[spec.kv_dtype] >= LONG_ROW_BYTES
        ahead, level = (0, 1) if spec.is_generic else (16, 1) if is_long else (32, 2)
        choices |= {"prefetch_keys": ahead, "prefetch_level": level}
    choices["row_tile"] = _row_tile(spec, choices)
    registers, rows = num_registers(target), choices["row_tile"]
    if few_rows:
        limits = {
            "dot_keys": min(4, (registers - 8) // rows),
            "weigh_vectors": (registers - 2) // rows,
        }
    else:
        side = registers // 5
        limits = {"dot_keys": 4, "dot_vectors": side, "weigh_rows": 4, "weigh_vectors": side}
    tiles = register_tiles(spec, choices)
    return choices | {name: _divisor(tiles[name], limit) for name, limit in limits.items()}


def _default_tiles(spec: AttentionSpec) -> Choices:
    """Return the untuned default on AMX: V in pairs of dims, 2 x 2 tiles where there are rows."""
    decode = spec.kernel == "decode"
    few_rows = decode and spec.group_size < SIDE
    step = "rows" if few_rows else "columns"
    # The softmax between the products reads scores from the first-level cache while a head is
    # small; a larger one gains more by rows that share K and V.
    rows, keys = (64, 32) if spec.head_dim <= 64 else (128, 128)
    choices: Choices = IDLE["amx", step] | {
        "step": step,
        "isa": "amx",
        "lanes": SIDE,
        "row_tile": spec.group_size,
        "keys_per_step": 64 if decode else keys,
        "weigh_keys": DEPTH if decode else keys,
        "split_length": 512 if decode else 1024,
        "prefetch_keys": DEPTH if decode else 0,
        "prefetch_level": 2 if decode else 1,
        "dot_keys": 1 if few_rows else 2,
        "weigh_vectors": min(2, spec.head_dim_v // SIDE),
    }
    if not few_rows:
        if decode:
            rows = min(64, -(-spec.group_size // SIDE) * SIDE)
        choices["row_tile"] = rows
        while tile_scratch_bytes(spec, choices) > TILE_SCRATCH_BYTES:
            choices["row_tile"] -= SIDE
        tiles = choices["row_tile"] // SIDE
        # The tail of a head_dim takes tile registers of its own.
        side = 1 if spec.head_dim % DEPTH else _divisor(tiles, 2)
        choices |= {"dot_vectors": side, "weigh_rows": side}
    return choices


def _default_pairs(spec: AttentionSpec) -> Choices:
    """Return the untuned default on AMX where the cache holds pairs."""
    decode = spec.kernel == "decode"
    few_rows = decode and spec.group_size <= SIDE
    is_short = not decode and spec.head_dim <= 64
    tiles = spec.head_dim_v // SIDE
    choices: Choices = IDLE["amx", "pairs"] | {
        "step": "pairs",
        "isa": "amx",
        "lanes": SIDE,
        "row_tile": spec.group_size,
        "keys_per_step": 128 if is_short else 256,
        "split_length": 512 if decode else 1024,
        "prefetch_keys": 64 if decode else 0,
        "prefetch_level": 2 if decode else 1,
        "dot_keys": 2,
        "dot_vectors": 1,
        "weigh_rows": 1,
        "weigh_vectors": min(2, tiles),
    }
    if not few_rows:
        rows = 64 if decode or spec.head_dim <= 64 else 128
        choices["row_tile"] = min(rows, -(-spec.group_size // SIDE) * SIDE) if decode else rows
        while tile_scratch_bytes(spec, choices) > TILE_SCRATCH_BYTES:
            choices["row_tile"] -= SIDE
        # The tail of a head_dim takes tile registers of its own.
        side = 1 if spec.head_dim % DEPTH else _divisor(choices["row_tile"] // SIDE, 2)
        choices |= {"dot_vectors": side, "weigh_rows": side}
        choices["weigh_vectors"] = min(4 // side, tiles)
    return choices


def _row_tile(spec: AttentionSpec, choices: Choices) -> int:
    if choices["step"] == "rows":
        return spec.group_size or 4
    lanes = int(choices["lanes"])
    rows = 64 if spec.kernel == "prefill" else spec.group_size
    rows = 16 if spec.is_generic else min(64, -(-rows // lanes) * lanes)
    while scratch_bytes(spec, rows, choices["keys_per_step"]) > SCRATCH_BYTES:
        rows -= lanes
    return rows


def space(spec: AttentionSpec, target: TargetKey) -> dict[str, tuple[Any, ...]]:
    """Return the open list: each option's values, those of the untuned default among them.

    The default's instruction set is the only one: vectors never won where tiles fit, nor half
    vectors where whole ones do.
    """
    default = default_choices(spec, target)
    if spec.kernel not in ATTENTION_KERNELS or spec.is_generic:
        return {name: (value,) for name, value in default.items()}
    decode = spec.kernel == "decode"
    group_tiles = {spec.group_size, -(-spec.group_size // 2)} if decode else set()
    tiles, pairs = has_amx(spec, target), default["step"] == "pairs"
    either = decode and not pairs and spec.group_size > ALWAYS_ROWS
    values: dict[str, set[Any]] = {
        "isa": set(),
        "weigh_keys": {32, 64, 128, 256} if tiles else {DEPTH},
        "step": {"rows", "columns"} if either else set(),
        "lanes": set(),
        "row_tile": {8, 16, 32, 48, 64, 96, 128} | group_tiles,
        "keys_per_step": {16, 32, 64, 128} | ({256} if tiles else set()),
        "split_length": {256, 512, 1024, 2048} if decode else {1024, 2048, 4096},
        "prefetch_keys": {0, 16, 32, 64, 128},
        "prefetch_level": {1, 2, 3},
        "dot_keys": {1, 2, 4, 8, 16},
        "dot_vectors": {1, 2, 3, 4, 6},
        "weigh_rows": {1, 2, 4, 8, 16},
        "weigh_vectors": {1, 2, 3, 4, 5, 6, 8, 16},
    }
    if spec.layout == "native":
        values["layout"] = set()  # the default's alone, see `native_layout`
    return {name: tuple(sorted(each | {default[name]})) for name, each in values.items()}
