"""How K and V lie in a cache: the one place that knows.

=========  =================================================================================
``HND``    ``[num_blocks, num_kv_heads, block_size, head_dim]``
``NHD``    ``[num_blocks, block_size, num_kv_heads, head_dim]``
``pairs``  ``[num_blocks, num_kv_heads, block_size * head_dim / 32, 32]``, bfloat16 only
=========  =================================================================================

``pairs`` is what AMX multiplies by: lines of 64 bytes, of which 16 that follow each other fill a
tile register. A line of K holds two dims of 16 keys, a line of V 16 dims of two keys::

    K, line p of 16 keys        key 0: dim 2p, 2p + 1   key 1: dim 2p, 2p + 1  ...  key 15
    V, line p of 16 dims        dim 0: key 2p, 2p + 1   dim 1: key 2p, 2p + 1  ...  dim 15

K's lines go along the dims, then along the keys. V's go along the keys of a stretch (32, or 16
where 32 do not divide the block), then along the dims, then along the stretches. Both have one
shape, and a block's bytes are those of the other layouts in another order.

HND and NHD are what a spec says; ``native`` leaves it to the artifact, whose choices name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tvmpaged.spec import AttentionSpec

PAIRS = "pairs"
#: What an artifact of a native spec may have chosen.
NATIVE_LAYOUTS = ("HND", PAIRS)

#: Keys of a line of K and dims of a line of V; elements of any line.
SIDE, LINE = 16, 32

Index = Any  # an int, an integer array of NumPy or torch, or a tirx expression


def layout_of(spec: AttentionSpec, choices: Mapping[str, Any]) -> str:
    """Return the layout that the kernel of a spec reads and writes under a choice list."""
    return str(choices.get("layout", "HND")) if spec.layout == "native" else spec.layout


def fits_pairs(spec: AttentionSpec) -> bool:
    """Tell whether blocks of a spec's cache can be cut into lines of pairs."""
    sizes = (spec.head_dim, spec.head_dim_v, spec.block_size)
    return spec.kv_dtype == "bfloat16" and all(size and size % SIDE == 0 for size in sizes)


def inner_shape(
    layout: str, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int]:
    """Return a cache's shape but for its blocks."""
    if layout == "NHD":
        return block_size, num_kv_heads, head_dim
    if layout == PAIRS:
        return num_kv_heads, block_size * head_dim // LINE, LINE
    return num_kv_heads, block_size, head_dim


def stretch(block_size: int) -> int:
    """Return how many keys stand together in lines of V."""
    return LINE if block_size % LINE == 0 else SIDE


def pair_place(
    which: str, slot: Index, dim: Index, block_size: int, head_dim: int
) -> tuple[Index, Index]:
    """Return the line of an element in a head of a block of pairs, and its place in the line.

    Parameters
    ----------
    which : str
        ``k`` or ``v``.
    slot, dim : index
        Of the token in its block, and of the element in its row.
    block_size, head_dim : int
        Sizes.
    """
    if which == "k":
        return slot // SIDE * (head_dim // 2) + dim // 2, slot % SIDE * 2 + dim % 2
    keys = stretch(block_size)
    tile = slot // keys * (head_dim // SIDE) + dim // SIDE
    return tile * (keys // 2) + slot % keys // 2, dim % SIDE * 2 + slot % 2


def to_hnd(cache: Any, which: str, layout: str, block_size: int) -> Any:
    """Return a cache as HND: a view, or for pairs a copy.

    Parameters
    ----------
    cache : torch.Tensor or numpy.ndarray
        One layer's K or V.
    which, layout : str
        ``k`` or ``v``, and how it lies.
    block_size : int
        Tokens per block.
    """
    if layout != PAIRS:
        return cache.swapaxes(1, 2) if layout == "NHD" else cache
    head_dim = cache.shape[2] * LINE // block_size
    line, place = _places(which, block_size, head_dim)
    return cache[:, :, line, place]


def from_hnd(cache: Any, which: str, layout: str) -> Any:
    """Return an HND cache in another layout: a view, or for pairs a copy."""
    if layout != PAIRS:
        return cache.swapaxes(1, 2) if layout == "NHD" else cache
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    shape = (num_blocks, *inner_shape(layout, num_kv_heads, block_size, head_dim))
    packed = (cache + 0).reshape(shape)  # a copy, of whichever kind it is
    line, place = _places(which, block_size, head_dim)
    packed[:, :, line, place] = cache
    return packed


def read_rows(cache: Any, which: str, layout: str, block_size: int, block: Any, slot: Any) -> Any:
    """Return rows ``[num_tokens, num_kv_heads, head_dim]`` of a cache, copied.

    Parameters
    ----------
    cache, which, layout, block_size
        As for `to_hnd`.
    block, slot : array of int
        ``[num_tokens]``: which block, and where in it.
    """
    if layout != PAIRS:
        return cache[block, slot] if layout == "NHD" else cache[block, :, slot]
    head_dim = cache.shape[2] * LINE // block_size
    at, dim = np.asarray(slot)[:, None], np.arange(head_dim)
    line, place = pair_place(which, at, dim, block_size, head_dim)
    return cache[np.asarray(block)[:, None], :, line, place].swapaxes(1, 2)


def _places(which: str, block_size: int, head_dim: int) -> tuple[Any, Any]:
    slot, dim = np.arange(block_size)[:, None], np.arange(head_dim)
    return pair_place(which, slot, dim, block_size, head_dim)
