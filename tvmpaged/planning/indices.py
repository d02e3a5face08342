"""Index arrays from outside: int32 or int64, converted and checked once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


def index_array(name: str, value: Any, ndim: int) -> LongArray:
    """Return an int64 copy.

    Raises
    ------
    ValueError, TypeError
        When it has another number of dimensions or another dtype.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.size == 0 and array.dtype.kind == "f":  # an empty list has no dtype of its own
        array = array.astype(np.int64)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise TypeError(f"{name} must be int32 or int64; got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s); got shape {array.shape}")
    return array.astype(np.int64)


def check_distinct_slots(slots: LongArray) -> None:
    """Refuse a slot mapping that writes one slot twice (the result would depend on a race)."""
    taken = np.sort(slots[slots >= 0])
    twice = taken[1:][taken[1:] == taken[:-1]]
    if len(twice):
        raise ValueError(f"slot_mapping writes slot {int(twice[0])} more than once")
