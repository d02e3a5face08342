"""How many blocks a KV cache gets when nobody says."""

from __future__ import annotations

from pathlib import Path

import torch

from tvmpaged.runtime.errors import checked_int
from tvmpaged.spec import DTYPE_BYTES

_GIB = 2**30

#: A CPU's memory is shared with everything else on the machine; a GPU's is the engine's.
_CPU_SHARE, _CPU_MOST_BYTES = 0.25, 4 * _GIB
_GPU_SHARE = 0.8


def block_bytes(
    num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> int:
    """Return the bytes of one block: K and V of all layers."""
    return 2 * num_layers * num_kv_heads * block_size * head_dim * DTYPE_BYTES[dtype]


def default_cache_bytes(device: str) -> int:
    """Return what the cache may take on `device` by default."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _GPU_SHARE)
    return min(int(_available_bytes() * _CPU_SHARE), _CPU_MOST_BYTES)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _CPU_MOST_BYTES


def num_blocks_for(
    block: int, needed: int, cache_bytes: int | None, num_blocks: int | None, device: str
) -> int:
    """Decide the number of blocks.

    Parameters
    ----------
    block : int
        Bytes of one block.
    needed : int
        Blocks that all sequences could ever use at once; no default exceeds it.
    cache_bytes, num_blocks : int, optional
        What the user said; `num_blocks` wins.
    device : str
        Where the cache will be.

    Raises
    ------
    ValueError, TypeError
        When it is no block at all, or no number.
    """
    if num_blocks is not None:
        return checked_int("num_blocks", num_blocks, 1)
    given = cache_bytes is not None
    size = default_cache_bytes(device)
    if cache_bytes is not None:
        size = checked_int("kv_cache_memory_bytes", cache_bytes, 1)
    found = size // block
    if found < 1:
        name = "kv_cache_memory_bytes" if given else "the free memory's share"
        raise ValueError(f"{name}={size} is too small: one block takes {block} bytes")
    return found if given else min(found, needed)
