"""The rules that a choice list must pass on a GPU before anything is compiled."""

from __future__ import annotations

from tvmpaged.layout import layout_of
from tvmpaged.schedules import cuda_mma_rules
from tvmpaged.schedules.choices import Choices
from tvmpaged.sm import STATIC_SHARED_BYTES, WARP_SIZE, limits
from tvmpaged.spec import ATTENTION_KERNELS, DTYPE_BYTES, MAX_HEAD_DIM, AttentionSpec, TargetKey

#: Widest load and store of a thread.
VECTOR_BYTES = 16
#: TVM starts each array in shared memory at a multiple of this.
ALIGNMENT_BYTES = 64
#: Bytes that one asynchronous copy may have.
COPY_BYTES = (4, 8, 16)
#: Most steps in shared memory.
MOST_STAGES = 4
#: Registers that a walk needs besides its arrays: addresses, counters, what is in flight. Less than
#: any compiled one took, so that nothing is refused that would fit.
OTHER_REGISTERS = 8


def vectors_per_thread(dim: int, choices: Choices) -> int:
    """Return how many vectors of a row one thread holds."""
    return -(-(dim or MAX_HEAD_DIM) // int(choices["dim_threads"] * choices["lanes"]))


def register_estimate(spec: AttentionSpec, choices: Choices) -> int:
    """Return what a thread holds: q, sums, scores, and K and V of a step, or of a key."""
    words = sum(_step_words(spec, choices))
    at_once = words if choices["stages"] == 1 else words // _keys(choices)
    return _row_registers(spec, choices) + at_once


def least_registers(spec: AttentionSpec, choices: Choices) -> int:
    """Return what no compiled walk takes less than: K and V may be taken bit by bit."""
    if choices["isa"] == "mma":
        return cuda_mma_rules.least_registers(spec, choices)
    return _row_registers(spec, choices)


def _row_registers(spec: AttentionSpec, choices: Choices) -> int:
    lanes, rows = int(choices["lanes"]), int(choices["row_tile"])
    elements = lanes * vectors_per_thread(spec.head_dim, choices)
    elements_v = lanes * vectors_per_thread(spec.head_dim_v, choices)
    return rows * (elements + elements_v + _keys(choices) + 2) + OTHER_REGISTERS


def _step_words(spec: AttentionSpec, choices: Choices) -> tuple[int, int]:
    dims = (vectors_per_thread(dim, choices) for dim in (spec.head_dim, spec.head_dim_v))
    size = int(choices["lanes"]) * DTYPE_BYTES[spec.kv_dtype]
    k, v = (_keys(choices) * vectors * size // 4 for vectors in dims)
    return k, v


def _keys(choices: Choices) -> int:
    """Return the keys of a step that one thread takes."""
    return int(choices["keys_per_step"] * choices["dim_threads"] // choices["threads"])


def shared_bytes(spec: AttentionSpec, choices: Choices) -> int:
    """Return the shared memory of a walk: its stages, and what its groups fold at the end."""
    if choices["isa"] == "mma":
        return cuda_mma_rules.shared_bytes(spec, choices)
    groups = int(choices["threads"] // choices["dim_threads"])
    rows, dim_v = int(choices["row_tile"]), spec.head_dim_v or MAX_HEAD_DIM
    folded = 0
    if choices["fold"] == "shared":
        folded = rows * int(choices["keys_per_step"] * choices["dim_threads"])
    parts = (groups * dim_v, groups * rows, groups * rows, folded)
    stages = choices["stages"] * step_bytes(spec, choices) if choices["stages"] > 1 else 0
    taken = (stages, *(4 * part for part in parts))
    return sum(-(-each // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in taken)


def step_bytes(spec: AttentionSpec, choices: Choices) -> int:
    """Return the bytes of a step's K and V."""
    row = (spec.head_dim or MAX_HEAD_DIM) + (spec.head_dim_v or MAX_HEAD_DIM)
    return int(choices["keys_per_step"]) * row * DTYPE_BYTES[spec.kv_dtype]


def reject(spec: AttentionSpec, target: TargetKey, choices: Choices) -> str | None:
    """Return why a choice list cannot be built or cannot win; None when it may be tried."""
    found, _ = limits(target.arch)
    if layout_of(spec, choices) not in ("HND", "NHD"):
        return f"layout={choices['layout']!r} is none that a GPU's kernels read"
    threads = choices["threads"]
    if threads % WARP_SIZE or not 0 < threads <= found.threads_per_block:
        most = found.threads_per_block
        return f"threads={threads} is no multiple of {WARP_SIZE} up to {most}"
    if spec.kernel not in ATTENTION_KERNELS:
        return None
    reason = _reject_shape(spec, choices) or _reject_form(spec, choices)
    if reason:
        return reason
    registers = least_registers(spec, choices)
    most = min(found.registers_per_thread, found.registers_per_sm // threads)
    if registers > most:
        return f"a thread needs {registers} registers or more; it has {most}"
    room = found.shared_per_block
    if choices["isa"] == "simt":  # its arrays are of sizes known when it is compiled
        room = min(room, STATIC_SHARED_BYTES)
    shared = shared_bytes(spec, choices)
    if shared > room:
        return f"a block needs {shared} bytes of shared memory; it has {room}"
    return None


def _reject_shape(spec: AttentionSpec, choices: Choices) -> str | None:
    lanes, along, threads = choices["lanes"], choices["dim_threads"], choices["threads"]
    keys = choices["keys_per_step"]
    for name, dim in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if dim % lanes:
            return f"lanes={lanes} does not divide {name}={dim}"
    if lanes * DTYPE_BYTES[spec.kv_dtype] > VECTOR_BYTES:
        return f"lanes={lanes} of {spec.kv_dtype} are more than {VECTOR_BYTES} bytes"
    if along not in (1, 2, 4, 8, 16, 32):
        return f"dim_threads={along} is no power of two up to {WARP_SIZE}"
    widest = max(spec.head_dim or MAX_HEAD_DIM, spec.head_dim_v or MAX_HEAD_DIM)
    if along > 1 and along // 2 * lanes >= widest:
        return f"dim_threads={along} leaves half of the threads without a part of {widest} dims"
    if keys % (threads // along):
        return f"keys_per_step={keys} is no multiple of the {threads // along} groups of threads"
    if choices["split_length"] % keys:
        return f"split_length={choices['split_length']} is no multiple of keys_per_step={keys}"
    return None


#: What means nothing without tensor cores, and where it stands then.
IDLE: Choices = {"key_warps": 1, "q_in": "registers"}


def _reject_form(spec: AttentionSpec, choices: Choices) -> str | None:
    if choices["isa"] == "mma":
        return cuda_mma_rules.reject_shape(spec, choices)
    for name, value in IDLE.items():
        if choices[name] != value:
            return f"{name}={choices[name]!r} means nothing under isa={choices['isa']!r}"
    if not 1 <= choices["stages"] <= MOST_STAGES:
        return f"stages={choices['stages']} is none of 1 to {MOST_STAGES}"
    size = choices["lanes"] * DTYPE_BYTES[spec.kv_dtype]
    if choices["stages"] > 1 and size not in COPY_BYTES:
        return f"lanes={choices['lanes']} of {spec.kv_dtype}: no copy has {size} bytes"
    rows, group = choices["row_tile"], spec.group_size
    if spec.kernel == "decode" and group and rows > group:
        return f"row_tile={rows} is more than the group's {group} rows"
    return None
