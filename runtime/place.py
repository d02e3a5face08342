"""Where kernels run: a device as torch, bundles and plans know it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tvmpaged.cpu import native_target, num_threads
from tvmpaged.gpu import find_gpu, target_of
from tvmpaged.spec import TargetKey


@dataclass(frozen=True)
class Place:
    """One device.

    Parameters
    ----------
    device : torch.device
        With its number, if it is a GPU.
    target : TargetKey
        What code built for exactly this device is called.
    num_units : int
        What work is dealt to: threads of a CPU, multiprocessors of a GPU.
    """

    device: torch.device
    target: TargetKey
    num_units: int

    @property
    def is_gpu(self) -> bool:
        """Whether calls queue their work on torch's current stream."""
        return self.device.type == "cuda"

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the CPU on this device, without waiting for it to get there."""
        tensor = tensor.pin_memory() if self.is_gpu else tensor
        return tensor.to(self.device, non_blocking=True)

    def twin(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory of the CPU that `copy` fills a device's from; a CPU's own is its twin."""
        return torch.empty_like(memory, device="cpu", pin_memory=True) if self.is_gpu else memory

    def copy(self, twin: torch.Tensor, memory: torch.Tensor) -> Callable[[], None]:
        """Bring a twin's contents over, without waiting; return what waits until it may change."""
        if twin is memory:
            return self.no_wait
        memory.copy_(twin, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(self.device))
        return copied.synchronize

    @staticmethod
    def no_wait() -> None:
        """Wait for nothing."""


def place_of(device: Any = "cpu") -> Place:
    """Return a device of this machine.

    Parameters
    ----------
    device : str or torch.device
        ``cpu``, ``cuda:1``, or ``cuda``: torch's current GPU.

    Raises
    ------
    ValueError
        When there is no such device, or torch cannot use it.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is none: {error}") from error
    if wanted.type == "cpu":
        return Place(torch.device("cpu"), native_target(), num_threads())
    if wanted.type != "cuda":
        raise ValueError(f"device={str(device)!r} is not supported; allowed: cpu, cuda, cuda:0 ...")
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}: torch {torch.__version__} finds no GPU")
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    gpu = find_gpu(f"cuda:{index}")
    return Place(torch.device("cuda", index), target_of(gpu), gpu.multiprocessors)
