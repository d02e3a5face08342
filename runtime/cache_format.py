"""``CacheFormat``: how one layer's K and V caches look, for all that make, check or read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tvmpaged.host_memory import zero_pages
from tvmpaged.layout import inner_shape, read_rows
from tvmpaged.runtime.indices import check_slots
from tvmpaged.runtime.place import Place, place_of
from tvmpaged.runtime.tensors import check_cache

#: What a process can address on x86-64 without five-level paging.
ADDRESS_SPACE_BYTES = 2**47

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class CacheFormat:
    """Sizes, dtype and layout of the caches that a `PagedAttention` takes.

    Parameters
    ----------
    num_kv_heads, head_dim, block_size : int
        Sizes.
    dtype : torch.dtype
        Of the elements.
    layout : str
        ``HND``, ``NHD`` or one of `tvmpaged.layout.NATIVE_LAYOUTS`.
    place : Place
        Where they lie.
    """

    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    layout: str
    place: Place

    @cached_property
    def inner(self) -> tuple[int, int, int]:
        """The shape of one block."""
        return inner_shape(self.layout, self.num_kv_heads, self.block_size, self.head_dim)

    def make(self, num_blocks: int, num_layers: int) -> list[Pair]:
        """Return zeroed K and V caches, one pair per layer.

        Raises
        ------
        ValueError
            When the memory cannot be had.
        """
        shape = (num_blocks, *self.inner)
        needed = 2 * num_layers * math.prod(shape) * self.dtype.itemsize
        too_much = f"num_blocks={num_blocks} and num_layers={num_layers} need {needed} bytes"
        if needed > ADDRESS_SPACE_BYTES:
            raise ValueError(f"{too_much}; a process has {ADDRESS_SPACE_BYTES}")
        try:
            return [(self._zeros(shape), self._zeros(shape)) for _ in range(num_layers)]
        # Of the system, and of torch's allocator on a GPU.
        except (OSError, torch.OutOfMemoryError) as error:
            raise ValueError(f"{too_much}; {self.place.device} refuses them: {error}") from error

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.place.is_gpu:
            return torch.zeros(shape, dtype=self.dtype, device=self.place.device)
        return zero_pages(shape, self.dtype)

    def check(self, k_cache: Any, v_cache: Any) -> Pair:
        """Return one layer's caches as kernels take them.

        Raises
        ------
        ValueError, TypeError
            Naming the argument, its value and what is allowed.
        """
        inner, device = self.inner, self.place.device
        k_cache = check_cache("k_cache", k_cache, inner, self.dtype, device)
        v_cache = check_cache("v_cache", v_cache, inner, self.dtype, device)
        num_blocks = k_cache.shape[0], v_cache.shape[0]
        if num_blocks[0] != num_blocks[1]:
            raise ValueError(f"k_cache has {num_blocks[0]} blocks, but v_cache has {num_blocks[1]}")
        return k_cache, v_cache

    def read(self, k_cache: Any, v_cache: Any, slot_mapping: Any) -> Pair:
        """Return the K and V rows that stand in slots; see `PagedAttention.read_kv`."""
        k_cache, v_cache = self.check(k_cache, v_cache)
        num_slots = len(k_cache) * self.block_size
        slots = check_slots(slot_mapping, num_slots, place_of(), distinct=False)
        if len(slots) and int(slots.min()) < 0:
            raise ValueError("slot_mapping names slot -1, which holds nothing to read")
        slots = self.place.put(slots)
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        k, v = (
            read_rows(cache, which, self.layout, self.block_size, block, slots % self.block_size)
            for which, cache in (("k", k_cache), ("v", v_cache))
        )
        return k, v
