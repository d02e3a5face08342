"""What this machine can do at best with the work that bounds a kernel: its measured roofs.

Decode reads K and V: its roof is a plain read of as many bytes, on a GPU a large copy from its
memory to its memory. Prefill multiplies: its roof is torch's matrix product of the same dtype. On a
CPU both use as many threads as the kernels do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Rows and columns of the product; larger ones are no faster, and a CPU's caches hold this one.
PRODUCT_SIZE = 1024
GPU_PRODUCT_SIZE = 8192
#: A read takes so long that to start it is nothing to speak of.
MIN_READ_BYTES = 4 << 20
#: Of a copy, one of its two sides: no smaller one reaches the memory's rate.
COPY_BYTES = 1 << 30
#: What a kernel does at most of its roof; above it, the roof was measured in a worse moment.
CREDIBLE = 1.1
UNITS = {"gb_per_s": "GB/s", "gflop_per_s": "GFLOP/s"}


@dataclass(frozen=True)
class Roof:
    """Work that does nothing else than what bounds a kernel.

    Parameters
    ----------
    name : str
        ``gb_per_s`` or ``gflop_per_s``.
    amount : int
        Bytes or operations of one call.
    call : callable
        Does it once.
    """

    name: str
    amount: int
    call: Callable[[], Any]

    def rate(self, us: Any) -> Any:
        """Return GB/s or GFLOP/s of calls that took so many microseconds: a number or an array."""
        return self.amount / us / 1e3


@dataclass(frozen=True)
class MeasuredRoof:
    """What was measured.

    Parameters
    ----------
    name : str
        ``gb_per_s`` or ``gflop_per_s``.
    value : float
        GB/s or GFLOP/s of the roof.
    fraction : float or None
        A kernel's rate by the roof's, timed in turns; None when the roof was measured alone.
    """

    name: str
    value: float
    fraction: float | None = None

    @property
    def is_credible(self) -> bool:
        """Whether no kernel was measured well above the roof."""
        return self.fraction is None or self.fraction <= CREDIBLE

    def fraction_of(self, rate: float) -> float | None:
        """Return a kernel's rate by the roof's; None where the roof is too low to be one."""
        fraction = rate / self.value
        return fraction if fraction <= CREDIBLE else None


def read_roof(num_bytes: int, rotation_bytes: int, threads: int) -> Roof:
    """Return a read of so many bytes; all of `rotation_bytes` are read before the same again.

    A dot product of a vector with itself: of torch's ways to read memory the fastest, since it has
    more loads in flight than a sum.
    """
    import torch

    from tvmpaged.host_memory import zero_pages

    size = max(num_bytes, MIN_READ_BYTES) // 4
    count = max(1, -(-rotation_bytes // (4 * size)))
    parts = [zero_pages((size,), torch.float32).fill_(1) for _ in range(count)]
    turns = itertools.cycle(parts)

    def read() -> Any:
        part = next(turns)
        return part.dot(part)

    return Roof("gb_per_s", size * 4, _with_threads(read, threads))


def copy_roof(device: Any, num_bytes: int = COPY_BYTES) -> Roof:
    """Return a copy inside a device's memory, which counts what it reads and what it writes."""
    import torch

    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return Roof("gb_per_s", 2 * num_bytes, lambda: destination.copy_(source))


def product_roof(
    dtype: str, threads: int | None, device: Any = "cpu", num_rows: int = PRODUCT_SIZE
) -> Roof:
    """Return a square matrix product of random values; `threads` are a CPU's."""
    import torch

    one = torch.randn((num_rows, num_rows), device=device).to(getattr(torch, dtype))
    other, out = one.clone(), torch.empty_like(one)

    def multiply() -> Any:
        return torch.mm(one, other, out=out)

    call = multiply if threads is None else _with_threads(multiply, threads)
    return Roof("gflop_per_s", 2 * num_rows**3, call)


def roof_for(
    kernel: str,
    dtype: str,
    threads: int,
    *,
    num_bytes: int,
    rotation_bytes: int,
    device: Any = "cpu",
) -> Roof:
    """Return the roof of a kernel.

    Parameters
    ----------
    kernel : str
        ``decode`` or ``prefill``.
    dtype : str
        Of q.
    threads : int
        Of the kernel.
    num_bytes : int
        That the kernel's step reads: a call of the roof reads as many, and so takes about as long.
    rotation_bytes : int
        That steps read before the same are read again; so does the roof.
    device : str or torch.device
        Where the kernel runs.
    """
    on_gpu = str(device).startswith("cuda")
    if kernel == "decode":
        return copy_roof(device) if on_gpu else read_roof(num_bytes, rotation_bytes, threads)
    if on_gpu:
        return product_roof(dtype, None, device, GPU_PRODUCT_SIZE)
    return product_roof(dtype, threads)


def _with_threads(call: Callable[[], Any], threads: int) -> Callable[[], Any]:
    """Return the call under so many of torch's threads, whatever the process uses otherwise."""
    import torch

    def run() -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return call()
        finally:
            torch.set_num_threads(before)

    return run
