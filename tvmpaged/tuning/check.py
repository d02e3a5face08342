"""Correct before fast: a candidate against the reference, on a small step full of edges.

Lengths 0, 1 and around a block's edge, more new tokens than keys, and one sequence that every
split length splits; unused slots, unowned blocks, ``out`` and ``lse`` hold NaN beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from tvmpaged import reference
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.case import Call, Case
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


@lru_cache(maxsize=8)
def _case(spec: AttentionSpec, split_length: int) -> tuple[Case, Any, Any]:
    case = Case.make(spec, check_workload(spec, split_length), seed=1, poison=True)
    step = case.steps[0]
    out, lse = reference.paged_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        step.query_start_loc,
        step.seq_lens,
        step.block_table,
        kv_layout="NHD" if spec.layout == "NHD" else "HND",
        return_lse=True,
    )
    return case, out, lse


@dataclass(frozen=True)
class Check:
    """One comparison of a candidate with the reference.

    Parameters
    ----------
    what : str
        Of what.
    error : float
        ``||found - truth|| / ||truth||``, or how many rows are not as they must be.
    limit : float
        The greatest error that passes.
    """

    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit

    def __str__(self) -> str:
        if self.limit == 0:
            return f"{self.error:.0f} {self.what}"
        return f"relative error {self.error:.2e} of {self.what} is over {self.limit:.1e}"


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


def check(
    spec: AttentionSpec, attention: Call, merge: Call, choices: dict[str, Any], num_workers: int
) -> list[Check]:
    """Return a candidate's errors, each beside its limit."""
    case, out, lse = _case(spec, int(choices["split_length"]))
    case.out.fill_(torch.nan)
    case.lse.fill_(torch.nan)
    case.bind(attention, merge, choices, num_workers)()
    found, found_lse = case.out.double().numpy(), case.lse.double().numpy()
    # By sequence: a long one's mean of many V rows is small, and its error would drown.
    starts = case.steps[0].query_start_loc
    errors = [_error(found[begin:end], out[begin:end]) for begin, end in pairwise(starts.tolist())]
    seen = np.isfinite(lse)
    errors = [
        float(np.isnan(found).any(axis=(1, 2)).sum()),
        *errors,
        float((np.isneginf(found_lse) == seen).any(axis=1).sum()),
        _error(found_lse[seen], lse[seen]),
    ]
    allowed = limits(spec, choices).items()
    return [Check(what, error, limit) for (what, limit), error in zip(allowed, errors, strict=True)]


def wrong(checks: Sequence[Check]) -> str:
    """Return what is wrong with a candidate's numbers; empty when nothing is."""
    return next((str(each) for each in checks if not each.passed), "")


def _error(found: reference.Array, truth: reference.Array) -> float:
    """Return ``||found - truth|| / ||truth||``; infinite for a difference where truth is 0."""
    norm, difference = float(np.linalg.norm(truth)), float(np.linalg.norm(found - truth))
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / norm
