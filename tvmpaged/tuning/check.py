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
from tvmpaged.tuning.limits import check_workload, limits


@lru_cache(maxsize=8)
def _case(
    spec: AttentionSpec, split_length: int, device: str | torch.device = "cpu"
) -> tuple[Case, Any, Any]:
    workload = check_workload(spec, split_length)
    case = Case.make(spec, workload, seed=1, poison=True, device=device)
    step = case.steps[0]
    out, lse = reference.paged_attention(
        case.q.cpu(),
        case.k_cache.cpu(),
        case.v_cache.cpu(),
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


def check(
    spec: AttentionSpec,
    attention: Call,
    merge: Call,
    choices: dict[str, Any],
    num_workers: int,
    device: str | torch.device = "cpu",
) -> list[Check]:
    """Return a candidate's errors on a device, each beside its limit."""
    case, out, lse = _case(spec, int(choices["split_length"]), device)
    case.out.fill_(torch.nan)
    case.lse.fill_(torch.nan)
    case.bind(attention, merge, choices, num_workers)()
    found, found_lse = (each.double().cpu().numpy() for each in (case.out, case.lse))
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
