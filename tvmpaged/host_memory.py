"""Memory of this machine for caches: page-aligned, in huge pages, free until it is touched.

A decode reads blocks in any order. In pages of 4 KiB each block would be looked up anew by the
processor; one page of 2 MiB holds hundreds of blocks.
"""

from __future__ import annotations

import math
import mmap

import torch

#: Tensors of at least this size ask for huge pages (2 MiB on x86).
HUGE_PAGE_BYTES = 2 * 1024 * 1024


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a zero tensor whose memory is page-aligned and costs nothing until it is touched.

    Parameters
    ----------
    shape : tuple of int
        Its shape.
    dtype : torch.dtype
        Its dtype.
    """
    elements = math.prod(shape)
    if not elements:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if elements * dtype.itemsize >= HUGE_PAGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
