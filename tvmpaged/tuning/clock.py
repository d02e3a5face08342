"""The device's clock: what a call takes on a CPU or a GPU, and whether that can be believed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tvmpaged.tuning import timing
from tvmpaged.tuning.timing import MAX_WAITING, Taken

#: Written between two timed calls: several times any second-level cache, and it keeps the GPU busy
#: for longer than a step's launches take to be queued.
MIN_FLUSH_BYTES = 256 << 20
FLUSH_CACHES = 4


class Clock(Protocol):
    """Times calls on one device."""

    def once(self, call: Callable[[], Any]) -> Taken:
        """Time one call, and tell whether it was disturbed."""

    def close(self) -> None:
        """Give back what it holds."""


@dataclass
class CpuClock:
    """Wall time; a call in which a thread waited for a core is disturbed.

    Made once all threads of the calls have started, so that they are counted.
    """

    def __post_init__(self) -> None:
        self._queue = timing.RunQueue()

    def once(self, call: Callable[[], Any]) -> Taken:
        """Time one call, and tell whether it was disturbed."""
        return timing.timed_once(call, self._queue)

    def close(self) -> None:
        """Give the kernel's files back."""
        self._queue.close()


class CudaClock:
    """The GPU's own events around a call, after the second-level cache was overwritten.

    A call only queues its work. The GPU is still overwriting meanwhile, so that between the events
    it waits for nobody; when it was faster, the time holds the host's too and is disturbed.

    Parameters
    ----------
    device : torch.device
        The GPU.
    cuda : module
        ``torch.cuda``, or what stands in for it where there is no GPU.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        l2_bytes = cuda.get_device_properties(device).L2_cache_size
        size = max(MIN_FLUSH_BYTES, FLUSH_CACHES * l2_bytes)
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def once(self, call: Callable[[], Any]) -> Taken:
        """Time one call on torch's current stream there, and tell whether it was disturbed."""
        with self._cuda.device(self._device):  # an event is one of the current device
            return self._once(call)

    def _once(self, call: Callable[[], Any]) -> Taken:
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record()
        queued_from = time.perf_counter_ns()
        call()
        end.record()
        host_us = (time.perf_counter_ns() - queued_from) / 1e3
        in_time = not begin.query()
        end.synchronize()
        us = 1e3 * begin.elapsed_time(end)
        waiting = 0.0 if in_time else host_us / max(us, 1e-3)
        return Taken(us, waiting <= MAX_WAITING, waiting)

    def close(self) -> None:
        """Give the memory back."""
        del self._flush


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device, once what is to be timed has run there."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
