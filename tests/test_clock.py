"""A GPU's clock: its own events, a cache that holds nothing, and no time in which it waited."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tvmpaged.tuning import timing
from tvmpaged.tuning.clock import FLUSH_CACHES, MIN_FLUSH_BYTES, CpuClock, CudaClock, clock_for

pytestmark = pytest.mark.runtime

CPU = torch.device("cpu")


@dataclass
class Cuda:
    """What `torch.cuda` is to the clock: events are written into a log.

    Parameters
    ----------
    elapsed_ms : callable
        What the next pair of events says.
    is_idle : bool
        Whether the GPU has come to the first event before all was queued.
    """

    elapsed_ms: Callable[[], float] = lambda: 0.25
    is_idle: bool = False
    l2_bytes: int = 0
    log: list[str] = field(default_factory=list)

    @contextmanager
    def device(self, _device: Any) -> Iterator[None]:
        self.log.append("<")
        yield
        self.log.append(">")

    def get_device_properties(self, _device: Any) -> Any:
        return SimpleNamespace(L2_cache_size=self.l2_bytes)

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing

        def record() -> None:
            self.log.append("event")

        def query() -> bool:
            self.log.append("ask")
            return self.is_idle

        def synchronize() -> None:
            self.log.append("wait")

        def elapsed(_end: Any) -> float:
            return self.elapsed_ms()

        return SimpleNamespace(
            record=record, query=query, synchronize=synchronize, elapsed_time=elapsed
        )


def clock(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> CudaClock:
    made = CudaClock(CPU, cuda)
    real = type(made._flush).zero_

    def zero_(tensor: torch.Tensor) -> torch.Tensor:
        cuda.log.append("flush")
        return real(tensor[:1])

    monkeypatch.setattr(torch.Tensor, "zero_", zero_)
    return made


def test_the_cache_is_overwritten_before_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    made = clock(cuda, monkeypatch)
    assert made.once(lambda: cuda.log.append("call")) == timing.Taken(250.0, True, 0.0)
    # An event of torch's is one of the GPU that is current when it is recorded.
    assert cuda.log == ["<", "flush", "event", "call", "event", "ask", "wait", ">"]
    made.close()


def test_what_is_overwritten_is_several_caches() -> None:
    assert len(CudaClock(CPU, Cuda())._flush) == MIN_FLUSH_BYTES
    large = MIN_FLUSH_BYTES
    assert len(CudaClock(CPU, Cuda(l2_bytes=large))._flush) == FLUSH_CACHES * large


def test_a_time_in_which_the_gpu_waited_for_the_host_is_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = clock(Cuda(is_idle=True, elapsed_ms=lambda: 1e-3), monkeypatch)
    taken = made.once(lambda: None)
    assert not taken.clean
    assert taken.waiting > timing.MAX_WAITING
    # In a long one the host's part is nothing to speak of.
    long = clock(Cuda(is_idle=True, elapsed_ms=lambda: 1e4), monkeypatch).once(lambda: None)
    assert long.clean
    assert 0 < long.waiting < timing.MAX_WAITING


def test_contenders_are_compared_by_the_gpus_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times, running = {"slow": 2.0, "fast": 1.0}, [""]
    made = clock(Cuda(elapsed_ms=lambda: times[running[-1]]), monkeypatch)
    calls = [lambda: running.append("slow"), lambda: running.append("fast")]
    slow, fast = timing.measure(calls, lambda: made, min_seconds=0.0, max_seconds=1.0)
    assert (slow.speedup, fast.speedup) == (1.0, 2.0)
    assert set(fast.times_us) == {1000.0}
    assert len(fast.times_us) >= timing.MIN_REPEATS


def test_a_cpus_clock_is_the_one_that_sees_waiting_threads() -> None:
    made = clock_for(CPU)
    assert isinstance(made, CpuClock)
    assert made.once(lambda: None).us >= 0
    made.close()
