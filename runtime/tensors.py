"""What comes through the public face: every tensor is checked here before a kernel sees it.

Compiled kernels check shapes, dtypes and strides themselves, but take alignment on trust and crash
without it, and do not know which argument a user would call wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tvmpaged.planning.indices import has_memory

#: Compiled kernels assume that data starts at a multiple of this.
ALIGNMENT_BYTES = 64

#: What a GPU's block stride must be a multiple of; see `tvmpaged.kernels.tile`.
GPU_STRIDE_BYTES = 16

CPU = torch.device("cpu")


#: Descriptions that passed all checks, with what was expected of them. A model calls with the same
#: few for every layer of every step, and to check one afresh takes as long as a small kernel.
_PASSED: set[tuple[Any, ...]] = set()
_MOST_PASSED = 1024


def _description(value: Any, device: torch.device, *expected: Any) -> tuple[Any, ...] | None:
    """Return all that the checks of a plain tensor depend on, or None for anything else."""
    if type(value) is not torch.Tensor or value.layout != torch.strided:
        return None
    if value.requires_grad or value.is_neg() or value.device != device:
        return None
    return (
        device,
        *expected,
        value.dtype,
        value.shape,
        value.stride(),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
        value.data_ptr() % ALIGNMENT_BYTES,
    )


def _passed(description: tuple[Any, ...] | None) -> None:
    """Remember a description whose tensor is taken as it is."""
    if description is not None:
        if len(_PASSED) >= _MOST_PASSED:
            _PASSED.clear()
        _PASSED.add(description)


def is_plain(value: Any, nbytes: int) -> bool:
    """Tell whether a kernel's own checks of an argument are enough.

    A kernel sees the dtype, device, shape, strides, and an address that is missing. What it takes
    on trust is looked at here: alignment, a lazily negated view, elements that share memory, and
    memory that does not reach to the last element.

    Parameters
    ----------
    value : Any
        What was passed.
    nbytes : int
        Size of what passes the kernel's own checks.
    """
    try:
        return (
            type(value) is Tensor
            and value.is_contiguous()
            and not value.data_ptr() % ALIGNMENT_BYTES
            and not value.is_neg()
            and nbytes + (value.storage_offset() and value.storage_offset() * value.itemsize)
            <= value.untyped_storage().nbytes()
        )
    except RuntimeError:  # a layout that has no strides or no one memory
        return False


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a torch tensor over the same memory.

    Raises
    ------
    ValueError, TypeError
        When it is neither a torch tensor nor a NumPy array, or torch cannot describe its strides.
    """
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype not in (np.float32, np.float16):
            raise TypeError(
                f"{name} is a NumPy array of {value.dtype}; NumPy arrays may be float32 or float16 "
                "(pass a torch tensor for bfloat16)"
            )
        if any(stride < 0 or stride % value.itemsize for stride in value.strides):
            raise ValueError(f"{name} has strides {value.strides} bytes; copy it first")
        if not value.flags.writeable:
            # torch would warn. Only `out` and caches are written, and those are refused before.
            value = value.copy()
        return torch.from_numpy(value)
    raise TypeError(f"{name} must be a torch tensor or a NumPy array; got {type(value).__name__}")


def check_plain(
    name: str, value: Any, dtype: torch.dtype, device: torch.device, *, written: bool
) -> torch.Tensor:
    """Return the tensor of an argument whose elements lie in a device's memory, as they are.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    value : tensor
        What was passed.
    dtype, device
        What is expected.
    written : bool
        Whether a kernel writes there, so that no copy may stand in.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and what is allowed.
    """
    if written and isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ValueError(f"{name} is a read-only NumPy array")
    tensor = as_tensor(name, value)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on device {tensor.device}; expected {device}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}; expected a strided tensor")
    if not has_memory(tensor):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but its memory was given back")
    if tensor.is_neg():
        if written:
            raise ValueError(f"{name} is a view that negates lazily; resolve it first")
        tensor = tensor.resolve_neg()
    return tensor.detach() if tensor.requires_grad else tensor


def check_rows(
    name: str,
    value: Any,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
    *,
    stage: bool,
) -> torch.Tensor:
    """Check a ``[num_tokens, heads, dim]`` tensor: packed last dimension, free outer strides.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    value : tensor
        What was passed.
    heads, dim : int
        What is expected.
    dtype, device
        What is expected.
    stage : bool
        Whether unaligned data is copied (an input) or refused (an output).

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and what is allowed.
    """
    description = _description(value, device, heads, dim, dtype, stage)
    if description in _PASSED:
        return value  # type: ignore[no-any-return]
    tensor = check_plain(name, value, dtype, device, written=not stage)
    if tensor.dim() != 3 or tensor.shape[1:] != (heads, dim):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected [num_tokens, {heads}, {dim}]"
        )
    if not stage and _rows_overlap(tensor):
        raise ValueError(f"{name} has strides {tensor.stride()}: its rows overlap")
    if tensor.stride(2) == 1 and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        _passed(description)
        return tensor
    if tensor.numel() == 0:
        return tensor.contiguous()
    if not stage:
        raise ValueError(
            f"{name} must have a packed last dimension and start at a multiple of "
            f"{ALIGNMENT_BYTES} bytes; got strides {tensor.stride()} and address "
            f"{tensor.data_ptr() % ALIGNMENT_BYTES} past one"
        )
    return aligned_copy(tensor)


def _rows_overlap(tensor: torch.Tensor) -> bool:
    """Tell whether two rows ``[token, head]`` share memory, as those of an expanded tensor do."""
    width = tensor.shape[2]
    for stride, extent in sorted(zip(tensor.stride()[:2], tensor.shape[:2], strict=True)):
        if extent > 1:
            if stride < width:
                return True
            width += (extent - 1) * stride
    return False


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a packed copy; torch's own allocations are aligned."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def check_cache(
    name: str,
    value: Any,
    inner: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> torch.Tensor:
    """Check one layer's cache: free block stride, the rest packed.

    A GPU loads 16 bytes at once, so there that stride is a multiple of them.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and what is allowed. A cache is never copied.
    """
    description = _description(value, device, inner, dtype)
    if description in _PASSED:
        return value  # type: ignore[no-any-return]
    tensor = check_plain(name, value, dtype, device, written=True)
    if tensor.dim() != 4 or tuple(tensor.shape[1:]) != inner:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; expected [num_blocks, "
            f"{inner[0]}, {inner[1]}, {inner[2]}]"
        )
    packed = (inner[1] * inner[2], inner[2], 1)
    # The stride of an axis of extent 1 means nothing, and torch leaves any number there.
    named = zip(tensor.shape[1:], tensor.stride()[1:], packed, strict=True)
    if any(extent > 1 and stride != wanted for extent, stride, wanted in named):
        raise ValueError(
            f"{name} has strides {tensor.stride()}; only the block stride is free, the inner ones "
            f"must be {packed}"
        )
    block_elements = inner[0] * packed[0]
    if tensor.shape[0] > 1 and tensor.stride(0) < block_elements:
        raise ValueError(
            f"{name} has block stride {tensor.stride(0)}, but a block has {block_elements} "
            "elements: its blocks overlap"
        )
    block_bytes = tensor.stride(0) * tensor.itemsize
    if tensor.shape[0] > 1 and device.type == "cuda" and block_bytes % GPU_STRIDE_BYTES:
        raise ValueError(
            f"{name} has block stride {tensor.stride(0)} ({block_bytes} bytes); on a GPU it must "
            f"be a multiple of {GPU_STRIDE_BYTES} bytes"
        )
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"{name} starts {tensor.data_ptr() % ALIGNMENT_BYTES} bytes past a multiple of "
            f"{ALIGNMENT_BYTES}; caches must be aligned (new_cache makes them so)"
        )
    block_stride = tensor.stride(0) if tensor.shape[0] > 1 else block_elements
    if tensor.stride() != (block_stride, *packed):
        return tensor.as_strided(tensor.shape, (block_stride, *packed))
    _passed(description)
    return tensor
