"""The rules that a choice list must pass before anything is compiled.

A rule names what cannot fit (registers, scratch), what does not divide, and what means nothing: an
option of the step form that is not taken must stand at its first value, so that no program is tried
twice under two names.
"""

from __future__ import annotations

from collections.abc import Callable

from tvmpaged.cpu import MICROARCHITECTURES
from tvmpaged.kernels.tile_registers import DEPTH, NUM_REGISTERS, SIDE, TileRegisters
from tvmpaged.layout import PAIRS, fits_pairs, layout_of, stretch
from tvmpaged.schedules.choices import Choices
from tvmpaged.spec import ATTENTION_KERNELS, MAX_HEAD_DIM, AttentionSpec, TargetKey

Rule = Callable[[AttentionSpec, TargetKey, Choices], str | None]

#: Options that matter under some values of "isa" and "step" only, and where they stand elsewhere.
ROWS_ONLY = {"prefetch_keys": 0, "prefetch_level": 1}
COLUMNS_ONLY = {"dot_vectors": 1, "weigh_rows": 1}
TILES_ONLY = {"weigh_keys": DEPTH}
#: (isa, step) -> options that mean nothing there.
IDLE = {
    ("vector", "rows"): COLUMNS_ONLY | TILES_ONLY,
    ("vector", "columns"): ROWS_ONLY | TILES_ONLY,
    ("amx", "rows"): COLUMNS_ONLY,
    ("amx", "columns"): {},
    ("amx", "pairs"): TILES_ONLY,
}

#: Lanes of a vector of AVX-512; programs of that width use its instructions for 2**x.
WIDE = 16

#: Bytes of one core's second-level cache that a tile's scratch may fill (all of the
#: least L2 that a CPU with AVX2 has, Haswell's 256 KiB; a quarter or less of a current one's).
SCRATCH_BYTES = 256 * 1024
#: The same where there is AMX: a quarter of the least L2 of such a CPU, Sapphire Rapids' 2 MiB.
TILE_SCRATCH_BYTES = 512 * 1024


def has_avx512(target: TargetKey) -> bool:
    """Tell whether code for the target has 32 vector registers of 64 bytes."""
    return "avx512f" in MICROARCHITECTURES.get(target.arch, frozenset())


def has_amx(spec: AttentionSpec, target: TargetKey) -> bool:
    """Tell whether both products of a spec can run on AMX tiles of bfloat16."""
    return (
        "amx_bf16" in MICROARCHITECTURES.get(target.arch, frozenset())
        and spec.q_dtype == spec.kv_dtype == "bfloat16"
        and not spec.is_generic
        and spec.head_dim % SIDE == spec.head_dim_v % SIDE == 0
    )


def native_layout(spec: AttentionSpec, target: TargetKey) -> str:
    """Return the layout that all artifacts of a native spec have on a target.

    It follows from what decode, prefill and append_kv of one cache have in common, so that the
    three agree: a layout that one search had chosen for itself, the other two could not read.
    """
    return PAIRS if has_amx(spec, target) and fits_pairs(spec) else "HND"


def num_registers(target: TargetKey) -> int:
    """Return how many vector registers code for the target has."""
    return 32 if has_avx512(target) else 16


def scratch_bytes(spec: AttentionSpec, rows: int, keys: int) -> int:
    """Return what a tile of the columns step keeps: K, V, scores, q and the accumulators."""
    dims = (spec.head_dim or MAX_HEAD_DIM) + (spec.head_dim_v or MAX_HEAD_DIM)
    return 4 * (keys * (dims + rows) + rows * dims)


def tile_scratch_bytes(spec: AttentionSpec, choices: Choices) -> int:
    """Return what a tile keeps under AMX: scores, probabilities, V's pairs, q, the accumulators."""
    keys, rows = int(choices["keys_per_step"]), -(-int(choices["row_tile"]) // SIDE) * SIDE
    pairs = 2 * int(choices["weigh_keys"]) * spec.head_dim_v
    if choices["step"] == "pairs":
        if TileRegisters.value_keys(spec, choices) > stretch(spec.block_size):
            pairs = 2 * keys * spec.head_dim_v  # lines of all keys are put together
    elif spec.block_size % SIDE and TileRegisters.key_rows(spec, choices) == SIDE:
        pairs += 2 * keys * spec.head_dim  # keys of such blocks are copied first
    return 6 * keys * rows + pairs + rows * (2 * spec.head_dim + 4 * spec.head_dim_v)


def register_tiles(spec: AttentionSpec, choices: Choices) -> dict[str, int]:
    """Return, for each option that is a side of a register tile, the extent that it must divide.

    An extent known at run time only counts as 1: such a loop is not tiled.
    """
    lanes = choices["lanes"]
    if choices["isa"] == "amx":
        rows = choices["row_tile"]
        return {
            "dot_keys": choices["keys_per_step"] // SIDE,
            "dot_vectors": -(-rows // SIDE),
            "weigh_rows": max(1, rows // SIDE),
        }
    vectors_v = spec.head_dim_v // lanes or 1
    if choices["step"] == "rows":
        return {"dot_keys": lanes, "weigh_vectors": vectors_v}
    return {
        "dot_keys": choices["keys_per_step"],
        "dot_vectors": choices["row_tile"] // lanes,
        "weigh_rows": choices["row_tile"],
        "weigh_vectors": vectors_v,
    }


def reject(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    """Return why a choice list cannot be built or cannot win; None when it may be tried."""
    reason = _reject_layout(spec, target, choices)
    if reason or spec.kernel not in ATTENTION_KERNELS:
        return reason
    if (choices["isa"], choices["step"]) not in IDLE:
        return f"step={choices['step']!r} needs isa='amx'"
    forms = {"rows": _reject_rows, "columns": _reject_columns}
    form: Rule = _reject_tiles if choices["isa"] == "amx" else forms[choices["step"]]
    for rule in (_reject_divisors, _reject_idle, _reject_row_tile, form):
        reason = rule(spec, target, choices)
        if reason:
            return reason
    return None


def _reject_layout(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    layout = layout_of(spec, choices)
    if spec.layout != "native":
        if "layout" in choices:
            return f"layout={choices['layout']!r} is no choice where the spec says {spec.layout}"
    elif layout != native_layout(spec, target):
        return f"layout={layout!r} is not the native one of {target}: {native_layout(spec, target)}"
    if spec.kernel in ATTENTION_KERNELS and (choices["step"] == "pairs") != (layout == PAIRS):
        return f"step={choices['step']!r} does not read layout={layout!r}"
    return None


def _reject_divisors(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    lanes, keys = choices["lanes"], choices["keys_per_step"]
    for name, dim in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if dim % lanes:
            return f"lanes={lanes} does not divide {name}={dim}"
    if lanes == WIDE and not has_avx512(target):
        return f"lanes={lanes} needs AVX-512: {target}"
    if keys % lanes:
        return f"keys_per_step={keys} is no multiple of lanes={lanes}"
    if choices["split_length"] % keys:
        return f"split_length={choices['split_length']} is no multiple of keys_per_step={keys}"
    for name, extent in register_tiles(spec, choices).items():
        if extent % choices[name]:
            return f"{name}={choices[name]} does not divide {extent}"
    return None


def _reject_idle(_spec: AttentionSpec, _target: TargetKey, choices: Choices) -> str | None:
    for name, first in IDLE[choices["isa"], choices["step"]].items():
        if choices[name] != first:
            where = f"isa={choices['isa']!r} and step={choices['step']!r}"
            return f"{name}={choices[name]} means nothing under {where}"
    if not choices["prefetch_keys"] and choices["prefetch_level"] != 1:
        return "prefetch_level means nothing without prefetch_keys"
    return None


def _reject_row_tile(spec: AttentionSpec, _target: TargetKey, choices: Choices) -> str | None:
    rows, lanes, group = choices["row_tile"], choices["lanes"], spec.group_size
    if choices["step"] == "rows":
        if group and rows > group:
            return f"row_tile={rows} is more than the group's {group} rows"
        return None
    if choices["step"] == "pairs" and spec.kernel == "decode" and rows <= min(group, SIDE):
        return None
    if rows % lanes:
        return f"row_tile={rows} is no multiple of lanes={lanes}"
    if spec.kernel == "decode" and group and rows - group >= lanes:
        return f"row_tile={rows} leaves a vector of the group's {group} rows empty"
    return None


def _reject_tiles(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    if not has_amx(spec, target):
        return f"isa='amx' needs bfloat16, head sizes of whole tiles, and a CPU with it: {target}"
    keys, rows, some = choices["keys_per_step"], choices["row_tile"], choices["weigh_keys"]
    if choices["lanes"] != SIDE:
        return f"lanes={choices['lanes']} is not the side of a tile register, {SIDE}"
    if choices["step"] == "rows" and rows > SIDE:
        return f"row_tile={rows} is more than a tile register's {SIDE} rows"
    if keys % some:
        return f"keys_per_step={keys} is no multiple of weigh_keys={some}"
    if some % DEPTH:
        return f"weigh_keys={some} is no multiple of {DEPTH}"
    vectors = choices["weigh_vectors"]
    if vectors > spec.head_dim_v // SIDE:
        return f"weigh_vectors={vectors} is more than head_dim_v={spec.head_dim_v}"
    if choices["step"] != "pairs" and vectors % 2 and spec.head_dim_v > SIDE:
        return f"weigh_vectors={vectors} is odd"
    registers = TileRegisters.plan(spec, choices)
    if not registers.fits:
        return f"{len(registers.shapes)} tile registers needed of {NUM_REGISTERS}"
    scratch = tile_scratch_bytes(spec, choices)
    if scratch > TILE_SCRATCH_BYTES:
        return f"the tile's scratch of {scratch} bytes is over {TILE_SCRATCH_BYTES}"
    return None


def _reject_rows(_spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    rows = choices["row_tile"]
    for name in ("dot_keys", "weigh_vectors"):
        # Accumulators beside one vector of K or V and one of q or a probability.
        reason = _reject_registers(f"row_tile x {name}", rows * choices[name] + 2, target)
        if reason:
            return reason
    return None


def _reject_columns(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    rows = choices["row_tile"]
    for first, second in (("dot_keys", "dot_vectors"), ("weigh_rows", "weigh_vectors")):
        # Accumulators beside the vectors of one side; the other side is broadcast from memory.
        needed = (choices[first] + 1) * choices[second]
        reason = _reject_registers(f"{first} x {second}", needed, target)
        if reason:
            return reason
    scratch = scratch_bytes(spec, rows, choices["keys_per_step"])
    if scratch > SCRATCH_BYTES:
        return f"the tile's scratch of {scratch} bytes is over {SCRATCH_BYTES}"
    return None


def _reject_registers(what: str, vectors: int, target: TargetKey) -> str | None:
    if vectors > num_registers(target):
        return f"{what} needs {vectors} vector registers"
    return None
