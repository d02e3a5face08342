"""What a walk with tensor cores needs, and the rules for its choices."""

from __future__ import annotations

from tvmpaged.schedules.choices import Choices
from tvmpaged.sm import STATIC_SHARED_BYTES, WARP_SIZE
from tvmpaged.spec import DTYPE_BYTES, AttentionSpec

#: Rows, keys and dims of one product; dims of one vector; what a row in shared memory is longer by.
SIDE, LANES, PADDING = 16, 8, 8
#: Largest head whose sums are held in registers.
MOST_DIMS = 256
#: Registers that a walk needs besides q, scores and sums; less than any compiled one took.
OTHER_REGISTERS = 8


def has_mma(spec: AttentionSpec) -> bool:
    """Tell whether both products of a spec can run on tensor cores."""
    dims = (spec.head_dim, spec.head_dim_v)
    return (
        spec.q_dtype == spec.kv_dtype
        and spec.q_dtype in ("float16", "bfloat16")
        and all(0 < dim <= MOST_DIMS and dim % SIDE == 0 for dim in dims)
    )


def heights(choices: Choices) -> int:
    """Return how many products of 16 rows a warp has above each other."""
    warps = int(choices["threads"]) // WARP_SIZE // int(choices["key_warps"])
    return int(choices["row_tile"]) // (SIDE * warps)


def least_registers(spec: AttentionSpec, choices: Choices) -> int:
    """Return what no compiled walk takes less than: sums, a step's scores, and q if kept."""
    keys = int(choices["keys_per_step"]) // int(choices["key_warps"])
    q = spec.head_dim // 4 if choices["q_in"] == "registers" else 0
    each = q + spec.head_dim_v // 2 + keys // 2
    return heights(choices) * each + OTHER_REGISTERS


def shared_bytes(spec: AttentionSpec, choices: Choices) -> int:
    """Return the shared memory of a walk: its stages, q, and what its warps fold at the end.

    (What `warp_loops` keeps there besides is not counted: that form is for no GPU.)
    """
    row = spec.head_dim + spec.head_dim_v + 2 * PADDING
    key_warps, rows = int(choices["key_warps"]), int(choices["row_tile"])
    stages = int(choices["stages"]) * int(choices["keys_per_step"]) * row
    q = rows * (spec.head_dim + PADDING)
    elements = max(stages, q) if choices["q_in"] == "registers" else stages + q
    # A row's maximum and sum are kept by the four lanes that share it.
    folded = rows * (4 * 2 * key_warps + spec.head_dim_v) if key_warps > 1 else 0
    tile, folded_bytes = elements * DTYPE_BYTES[spec.kv_dtype], 4 * folded
    if tile + folded_bytes > STATIC_SHARED_BYTES:  # see `Warps.tile_elements`
        tile = max(tile, STATIC_SHARED_BYTES)
    return tile + folded_bytes


def reject_shape(spec: AttentionSpec, choices: Choices) -> str | None:
    """Return why a choice list does not fit together; None when it does."""
    if not has_mma(spec):
        return f"isa='mma' needs 16-bit inputs and head sizes that are multiples of {SIDE}"
    warps, key_warps = choices["threads"] // WARP_SIZE, choices["key_warps"]
    rows, keys, group = choices["row_tile"], choices["keys_per_step"], spec.group_size
    if choices["lanes"] != LANES:
        return f"lanes={choices['lanes']} are not the {LANES} of one copy"
    if warps % key_warps:
        return f"key_warps={key_warps} does not divide the {warps} warps"
    row_warps = warps // key_warps
    if rows % (SIDE * row_warps):
        return f"row_tile={rows} is no multiple of {SIDE} rows of each of {row_warps} warps"
    if keys % (SIDE * key_warps):
        return f"keys_per_step={keys} is no multiple of {SIDE} keys of each of {key_warps} warps"
    if not 1 <= choices["stages"] <= 3:
        return f"stages={choices['stages']} is none of 1, 2 and 3"
    if choices["q_in"] not in ("registers", "shared"):
        return f"q_in={choices['q_in']!r} is neither 'registers' nor 'shared'"
    if spec.kernel == "decode" and group and rows - group >= SIDE:
        return f"row_tile={rows} leaves {SIDE} rows or more of the group's {group} empty"
    return None
