"""Index arrays from outside: int32 or int64, converted and checked once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

#: The dtypes of index arrays, and those in which a negative number is larger than any index.
UNSIGNED: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.int32): np.dtype(np.uint32),
    np.dtype(np.int64): np.dtype(np.uint64),
}


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


def index_array(name: str, value: Any, ndim: int) -> npt.NDArray[Any]:
    """Return an int32 or int64 array; it may be `value` itself, or share its memory.

    Raises
    ------
    ValueError, TypeError
        When it has another number of dimensions or another dtype, or cannot be read.
    """
    array = value if type(value) is np.ndarray else _as_array(name, value)
    if array.dtype not in UNSIGNED:
        raise TypeError(f"{name} must be int32 or int64; got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s); got shape {array.shape}")
    return array


def _as_array(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        if hasattr(value, "untyped_storage"):
            value = value.detach().cpu()
            if not has_memory(value):
                raise ValueError("its memory was given back")
            value = value.numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read as an array of integers: {error}") from error
    # An empty list has no dtype of its own.
    return array if array.size or array.dtype.kind != "f" else array.astype(np.int64)


def greatest(values: npt.NDArray[Any]) -> int:
    """Return the greatest of an index array, a negative one as more than any; -1 where it is empty.

    So one comparison tells whether all lie between 0 and a limit.
    """
    if not values.size:
        return -1
    return int(np.maximum.reduce(values.view(UNSIGNED[values.dtype]), axis=None))


def check_distinct_slots(name: str, slots: LongArray) -> int:
    """Refuse a slot mapping that writes one slot twice (the result would depend on a race).

    Returns
    -------
    int
        The largest slot; -1 when there is none.
    """
    in_order = slots.copy()
    in_order.sort()
    twice = in_order[1:] == in_order[:-1]
    if np.logical_or.reduce(twice) and (repeated := in_order[1:][twice])[-1] >= 0:
        raise ValueError(
            f"{name} gives slot {int(repeated[repeated >= 0][0])} to more than one new token"
        )
    return int(in_order[-1]) if len(in_order) else -1
