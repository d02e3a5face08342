"""Index arrays from outside: int32 or int64, converted and checked once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


def has_memory(tensor: Any) -> bool:
    """Tell whether a torch tensor's memory reaches to its last element.

    It does not after ``untyped_storage().resize_``, by which some trainers give memory back behind
    a tensor's shape; reading it then ends the process.
    """
    if not tensor.numel():
        return True
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((extent - 1) * stride for extent, stride in extents)
    return bool((last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes())


def index_array(name: str, value: Any, ndim: int) -> LongArray:
    """Return an int64 copy.

    Raises
    ------
    ValueError, TypeError
        When it has another number of dimensions or another dtype, or cannot be read.
    """
    try:
        if hasattr(value, "untyped_storage"):
            value = value.detach().cpu()
            if not has_memory(value):
                raise ValueError("its memory was given back")
            value = value.numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as an array of integers: {error}") from error
    if array.size == 0 and array.dtype.kind == "f":  # an empty list has no dtype of its own
        array = array.astype(np.int64)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise TypeError(f"{name} must be int32 or int64; got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s); got shape {array.shape}")
    return array.astype(np.int64)


def check_distinct_slots(name: str, slots: LongArray) -> None:
    """Refuse a slot mapping that writes one slot twice (the result would depend on a race)."""
    taken = np.sort(slots[slots >= 0])
    twice = taken[1:][taken[1:] == taken[:-1]]
    if len(twice):
        raise ValueError(f"{name} gives slot {int(twice[0])} to more than one new token")
