"""Choices of GPUs as data: the untuned default of each spec, and the list a search may try.

Of attention's options, ``isa`` is "simt", or "mma" where tensor cores multiply; ``threads`` is a
block's threads, of which ``dim_threads`` share a key, ``lanes`` the elements of one load,
``keys_per_step`` what the block takes at once, ``row_tile`` the query rows that share a load of K
and V, and ``fold`` how the threads of a warp work together: by ``shuffle`` and its other
instructions, or through ``shared`` memory where a device has none.

``stages`` steps of K and V lie in shared memory, on their way or there; without tensor cores 1
means that a step is loaded into registers as it comes. With tensor cores ``key_warps`` warps take
different keys of a step; the others share keys and take different rows; ``q_in`` says whether q is
kept in ``registers`` or read from ``shared`` memory at each step.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from tvmpaged.schedules.choices import Choices
from tvmpaged.schedules.cuda_mma_rules import LANES, SIDE, has_mma
from tvmpaged.schedules.cuda_rules import (
    IDLE,
    MOST_STAGES,
    VECTOR_BYTES,
    register_estimate,
    step_bytes,
)
from tvmpaged.sm import WARP_SIZE
from tvmpaged.spec import ATTENTION_KERNELS, DTYPE_BYTES, MAX_HEAD_DIM, AttentionSpec

THREADS = 128
#: By the estimate; as compiled, two blocks of `THREADS` have room on a multiprocessor.
REGISTERS = 176
MOST_ROWS = 8
#: Keys of a step that one thread takes, best first.
KEYS = (2, 1)
#: Steps on their way, and how many bytes they are to be at most: so that three blocks have room in
#: the least shared memory, and two have more on its way than memory can answer meanwhile.
STAGES, STAGE_BYTES = 3, 24 * 1024


def default_choices(spec: AttentionSpec) -> Choices:
    """Return the untuned default: loads of 16 bytes, no search behind it."""
    if spec.kernel == "copy_blocks":
        return {"threads": 256, "stripes": 8}
    if spec.kernel == "merge":
        return {"threads": THREADS, "lanes": 4}
    if spec.kernel == "append_kv":
        return {"threads": WARP_SIZE, "lanes": VECTOR_BYTES // DTYPE_BYTES[spec.kv_dtype]}
    if spec.kernel == "prefill" and has_mma(spec):
        return mma_choices(spec)
    return simt_choices(spec)


def mma_choices(spec: AttentionSpec) -> Choices:
    """Return an untuned list with tensor cores: four warps, two steps on their way.

    In prefill two heights of 16 rows a warp halve what it reads of shared memory for each product;
    q stays there, because its registers would be missing. What a warp holds grows with the head,
    and so does a step: larger heads take fewer keys, the largest one height. In decode the warps
    share the group's rows, 16 at a time, and take different keys; two steps of four warps and a
    head above 160 are more than the shared memory of sm_86.
    """
    dims = spec.head_dim + spec.head_dim_v
    choices: Choices = {
        "isa": "mma",
        "fold": "shuffle",
        "threads": THREADS,
        "dim_threads": min(4, max(spec.head_dim, spec.head_dim_v) // LANES),
        "lanes": LANES,
        "stages": 2,
    }
    if spec.kernel == "decode":
        key_warps = 4 if dims <= 2 * 160 else 2
        return choices | {
            "threads": WARP_SIZE * key_warps,
            "split_length": 256,
            "row_tile": SIDE,
            "keys_per_step": SIDE * key_warps,
            "key_warps": key_warps,
            "q_in": "registers",
        }
    return choices | {
        "split_length": 1024,
        "row_tile": 128 if dims <= 2 * 128 else 64,
        "keys_per_step": 64 if dims <= 2 * 64 else 32,
        "key_warps": 1,
        "q_in": "shared",
    }


def simt_choices(spec: AttentionSpec) -> Choices:
    """Return an untuned list without tensor cores: a few steps are always on their way."""
    lanes = VECTOR_BYTES // DTYPE_BYTES[spec.kv_dtype]
    widest = max(spec.head_dim or MAX_HEAD_DIM, spec.head_dim_v or MAX_HEAD_DIM)
    along = 1
    while along < WARP_SIZE and along * lanes < widest:
        along *= 2
    choices: Choices = {
        "isa": "simt",
        "fold": "shuffle",
        "threads": THREADS,
        "dim_threads": along,
        "lanes": lanes,
        "split_length": 256 if spec.kernel == "decode" else 1024,
    }
    choices |= IDLE | {"stages": STAGES}
    # A group's rows in as few tiles as can be, for each reads K and V again; then several keys.
    for rows, keys in product(_row_tiles(spec), KEYS):
        choices |= {"row_tile": rows, "keys_per_step": THREADS // along * keys}
        fits = STAGE_BYTES // step_bytes(spec, choices)
        if register_estimate(spec, choices) <= REGISTERS and (fits >= STAGES or keys == 1):
            break
    return choices | {"stages": max(2, min(fits, STAGES))}


def _row_tiles(spec: AttentionSpec) -> list[int]:
    """Return the row tiles to try, highest first; those of a decode's group are of equal height."""
    if spec.kernel == "prefill" or not spec.group_size:
        return list(range(MOST_ROWS, 0, -1))
    least = -(-spec.group_size // MOST_ROWS)
    return [-(-spec.group_size // parts) for parts in range(least, spec.group_size + 1)]


def space(spec: AttentionSpec) -> dict[str, tuple[Any, ...]]:
    """Return the open list: each option's values, those of the untuned default among them.

    Where there are two forms, the first values are the untuned list of the one that is not the
    default: they differ in many options, and a search starts from both.
    """
    default = default_choices(spec)
    if spec.kernel not in ATTENTION_KERNELS or spec.is_generic:
        return {name: (value,) for name, value in default.items()}
    group = spec.group_size
    tiles = {-(-group // parts) for parts in range(1, group + 1)} if spec.kernel == "decode" else ()
    values: dict[str, set[Any]] = {
        "isa": {"simt"},
        "fold": {"shuffle"},
        "threads": {64, 128, 256, 512},
        "dim_threads": {2, 4, 8, 16, 32},
        "lanes": {default["lanes"] // 2, default["lanes"]},
        "row_tile": {1, 2, 4, 8, 16, *(rows for rows in tiles if rows <= 16)},
        "keys_per_step": {8, 16, 32, 64, 128},
        "split_length": {128, 256, 512, 1024, 2048},
        "stages": set(range(1, MOST_STAGES + 1)),
    }
    values |= {name: {value} for name, value in IDLE.items()}
    first: Choices = {}
    if has_mma(spec):
        values["isa"] |= {"mma"}
        values["row_tile"] |= {32, 48, 64, 80, 128, 256}
        values["key_warps"] |= {1, 2, 4, 8}
        values["q_in"] |= {"registers", "shared"}
        first = simt_choices(spec) if default["isa"] == "mma" else mma_choices(spec)
    found = {}
    for name, each in values.items():
        rest = sorted((each | {default[name]}) - {first.get(name)})
        found[name] = (first[name], *rest) if name in first else tuple(rest)
    return found
