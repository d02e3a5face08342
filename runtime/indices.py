"""Slot mappings and block copies from outside, checked once and made tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tvmpaged.planning.indices import check_distinct_slots, index_array
from tvmpaged.runtime.place import Place


def check_slots(value: Any, num_slots: int, place: Place, *, distinct: bool = True) -> torch.Tensor:
    """Return a slot mapping as an aligned ``[num_tokens]`` int64 tensor of a device.

    Parameters
    ----------
    value : array of int
        Slots; -1 skips a token.
    num_slots : int
        Slots of the cache.
    place : Place
        Where the tensor is to lie.
    distinct : bool
        Whether a slot may appear only once.

    Raises
    ------
    ValueError, TypeError
        Naming the slot.
    """
    slots = index_array("slot_mapping", value, 1)
    if len(slots) and not -1 <= slots.min() <= slots.max() < num_slots:
        bad = slots[(slots < -1) | (slots >= num_slots)][0]
        raise ValueError(
            f"slot_mapping names slot {bad}; k_cache has slots 0..{num_slots - 1}, and -1 skips"
        )
    if distinct:
        check_distinct_slots("slot_mapping", slots)
    return place.put(_aligned(slots, torch.int64))


def check_copies(value: Any, num_blocks: int, place: Place) -> torch.Tensor:
    """Return block copies as an aligned ``[num_copies, 2]`` int32 tensor of a device.

    Parameters
    ----------
    value : array of int
        (source, destination) pairs; may be empty.
    num_blocks : int
        Blocks of the cache.
    place : Place
        Where the tensor is to lie.

    Raises
    ------
    ValueError, TypeError
        When a block is out of range, a destination appears twice, or one is also a source: the
        result would depend on the order of the copies.
    """
    if isinstance(value, list | tuple) and not value:
        value = np.zeros((0, 2), np.int64)
    copies = index_array("block_copies", value, 2)
    if copies.shape[1] != 2:
        raise ValueError(f"block_copies has shape {copies.shape}; expected [num_copies, 2]")
    if len(copies) and not 0 <= copies.min() <= copies.max() < num_blocks:
        bad = copies[(copies < 0) | (copies >= num_blocks)][0]
        raise ValueError(f"block_copies names block {bad}; k_cache has 0..{num_blocks - 1}")
    destinations, counts = np.unique(copies[:, 1], return_counts=True)
    if (counts > 1).any():
        twice = destinations[counts > 1][0]
        raise ValueError(f"block_copies has destination {twice} more than once")
    both = np.intersect1d(copies[:, 0], destinations)
    if len(both):
        raise ValueError(f"block_copies has block {both[0]} as a source and as a destination")
    return place.put(_aligned(copies, torch.int32))


def _aligned(values: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a copy in memory of torch's own, whatever the strides of the values are."""
    found = torch.empty(values.shape, dtype=dtype)
    found.numpy()[...] = values
    return found
