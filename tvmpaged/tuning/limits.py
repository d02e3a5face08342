"""What every candidate is checked on, for what, and which errors pass."""

from __future__ import annotations

from typing import Any

from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.workload import Workload

#: Allowed ``||out - ref|| / ||ref||`` by out's dtype: float32 sums in another order; the 16-bit
#: dtypes round out once, and probabilities once (half a unit in the last of 11 and of 8 bits).
TOLERANCE = {"float32": 1e-5, "float16": 1.5e-3, "bfloat16": 5e-3}
#: lse is float32 whatever the dtype of q.
LSE_TOLERANCE = 1e-5


def check_workload(spec: AttentionSpec, split_length: int) -> Workload:
    """Return the step that a candidate is checked on."""
    size = spec.block_size
    lengths = [0, 1, size - 1, size, size + 1, 3 * size + 5, split_length + size + 3]
    if spec.kernel == "decode":
        q_lens = [1] * len(lengths)
    else:
        q_lens = [0, 3, size - 1, size, 2, 2 * size, 4]  # the second has rows that see nothing
    heads = 2 if spec.group_size <= 16 else 1
    return Workload(heads, tuple(q_lens), tuple(lengths))


def limits(spec: AttentionSpec, choices: dict[str, Any]) -> dict[str, float]:
    """Return what a candidate is checked for, in order, and the greatest errors that pass."""
    lengths = check_workload(spec, int(choices["split_length"])).seq_lens
    return {
        "rows of out hold NaN": 0.0,
        **{_sequence(seq, length): TOLERANCE[spec.out_dtype] for seq, length in enumerate(lengths)},
        "rows of lse are -inf though they see something, or the reverse": 0.0,
        "lse": LSE_TOLERANCE,
    }


def _sequence(seq: int, length: int) -> str:
    return f"sequence {seq}, of length {length}"
