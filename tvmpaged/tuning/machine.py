"""The processes that compile and measure candidates, and what their answers say."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvmpaged.cpu import num_threads
from tvmpaged.driver import Gpu
from tvmpaged.records import Latency
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.device import measuring_process, memory_total
from tvmpaged.tuning.process import START_TIMEOUT_S, Answer, Process, ask_all, is_out_of_memory
from tvmpaged.tuning.scratch import scratch_folder
from tvmpaged.tuning.trial import Choices, Reason, Trial, choices_key
from tvmpaged.tuning.workload import Workload

COMPILE_TIMEOUT_S = 120.0
#: For one candidate's check and times; kernels that are tuned take milliseconds.
MEASURE_TIMEOUT_S = 60.0
#: Of an error's text; a compiler's may run to pages.
_MAX_DETAIL = 500
#: With less a compiler that fails has had no room to write.
MIN_FREE_BYTES = 4 << 20
#: For one candidate's times, as long as it may lead.
MIN_SECONDS = 0.5
MAX_SECONDS = 1.0


@dataclass
class Machine:
    """The processes that compile and measure, and where artifacts lie in between.

    They take turns: nothing compiles while something is measured, so the two share no core, no
    cache and no memory bandwidth at any time. Compiling takes all devices, measuring one.

    Parameters
    ----------
    compilers : list of Process
        One core each, and pinned to it.
    devices : sequence of Process
        A CPU's is alone on the machine while it works, and on all of its cores, as a served kernel
        is; GPUs of one kind work side by side; none where nothing is measured.
    folder : Path
        Of artifacts; temporary.
    num_workers : int
        Threads of a kernel; of a GPU its multiprocessors.
    interrupted : callable
        True once all work is to be given up.
    """

    compilers: list[Process]
    devices: Sequence[Process]
    folder: Path
    num_workers: int
    interrupted: Callable[[], bool] = lambda: False
    _compiling: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _idle: queue.SimpleQueue[Process] = field(default_factory=queue.SimpleQueue, repr=False)

    def __post_init__(self) -> None:
        for each in self.devices:
            self._idle.put(each)

    @property
    def num_devices(self) -> int:
        """How many candidates can be measured at a time."""
        return len(self.devices)

    @contextmanager
    def _taking(self, count: int) -> Iterator[list[Process]]:
        """Give so many idle devices, once there are as many, for the time of the block."""
        taken = [self._idle.get() for _ in range(count)]
        try:
            yield taken
        finally:
            for each in taken:
                self._idle.put(each)

    def compile(
        self, spec: AttentionSpec, target: TargetKey, choices: Sequence[Choices]
    ) -> list[Answer]:
        """Compile candidates into `path`; an answer without reason means it is there.

        Raises
        ------
        OSError
            When the disk is full.
        """
        self.path(spec, "").parent.mkdir(parents=True, exist_ok=True)
        requests = [
            {
                "spec": str(spec),
                "target": str(target),
                "choices": each,
                "path": str(self.path(spec, choices_key(each))),
            }
            for each in choices
        ]
        with self._compiling, self._taking(self.num_devices):
            # All have answered or were killed when it returns.
            answers = ask_all(self.compilers, requests, COMPILE_TIMEOUT_S, self.interrupted)
        failures = any("error" in each.reply or each.reason for each in answers)
        if failures and shutil.disk_usage(self.folder).free < MIN_FREE_BYTES:
            # It says nothing about the candidates: they are not to be remembered as failures.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        return answers

    def path(self, spec: AttentionSpec, key: str) -> Path:
        """Return where a candidate's artifact lies."""
        return self.folder / str(spec) / f"{key}.so"

    def measure(
        self,
        spec: AttentionSpec,
        workload: Workload,
        merge: Path,
        candidates: Sequence[Choices],
        *,
        rotation_bytes: int,
        seed: int,
        min_seconds: float = MIN_SECONDS,
        max_seconds: float = MAX_SECONDS,
        leading_speedup: float = 0.0,
        phase: str = "search",
    ) -> Answer:
        """Check candidates and time them in turns."""
        request = self._request(spec, workload, merge, candidates) | {
            "seed": seed,
            "rotation_bytes": rotation_bytes,
            "min_seconds": min_seconds,
            "max_seconds": max_seconds,
            "leading_speedup": leading_speedup,
        }
        timeout_s = MEASURE_TIMEOUT_S + max_seconds * len(candidates)
        return self._ask(phase, spec, candidates, request, timeout_s)

    def measure_roof(
        self,
        spec: AttentionSpec,
        workload: Workload,
        merge: Path,
        candidate: Choices | None,
        *,
        rotation_bytes: int,
        seed: int,
    ) -> MeasuredRoof | None:
        """Measure what bounds the kernel, beside a candidate if there is one; None: it failed."""
        candidates = [candidate] if candidate else []
        request = self._request(spec, workload, merge, candidates)
        request |= {"roof": True, "seed": seed, "rotation_bytes": rotation_bytes}
        answer = self._ask("roof", spec, candidates, request, MEASURE_TIMEOUT_S)
        found = answer.reply.get("roof")
        return None if found is None else MeasuredRoof(**found)

    def _ask(
        self,
        phase: str,
        spec: AttentionSpec,
        candidates: Sequence[Choices],
        request: dict[str, Any],
        timeout_s: float,
    ) -> Answer:
        """Ask the device; what for, and of what, stands before the request for those who log it."""
        del spec
        with self._taking(1) as (device,):
            answer = device.ask(request, timeout_s, self.interrupted)
            if answer.reason or _is_sound(phase, answer.reply, len(candidates)):
                return answer
            # A candidate that wrote over the pipe: the worker's own answer may come next.
            device.kill()
            return Answer({}, "crash", f"its answer is none: {str(answer.reply)[:80]}")

    def _request(
        self,
        spec: AttentionSpec,
        workload: Workload,
        merge: Path,
        candidates: Sequence[Choices],
    ) -> dict[str, Any]:
        return {
            "spec": str(spec),
            "workload": workload.as_dict(),
            "num_workers": self.num_workers,
            "merge": str(merge),
            "candidates": [
                {"path": str(self.path(spec, choices_key(each))), "choices": each}
                for each in candidates
            ],
        }

    def start(self) -> None:
        """Start all processes at once, so that no candidate pays for it."""
        processes = self._processes()
        requests = [{"ping": True}] * len(processes)
        ask_all(processes, requests, START_TIMEOUT_S, self.interrupted)

    def close(self) -> None:
        """End the processes."""
        for each in self._processes():
            each.kill()

    def _processes(self) -> list[Process]:
        return [*self.compilers, *self.devices]


@contextmanager
def open_machine(
    interrupted: Callable[[], bool] = lambda: False,
    *,
    measures: bool = True,
    gpus: Sequence[Gpu] = (),
) -> Iterator[Machine]:
    """Give this machine with a compiler for each core, and end its processes after the block.

    Parameters
    ----------
    interrupted : callable
        True once all work is to be given up.
    measures : bool
        Whether it also measures.
    gpus : sequence of Gpu
        What it measures on; by default the CPU.
    """
    one_core = {"OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}
    cores = sorted(os.sched_getaffinity(0))
    share = memory_total() // (len(cores) + 1)
    with scratch_folder() as folder:
        # What a compiler that is killed leaves behind goes with the folder.
        one_core["TMPDIR"] = str(folder)
        machine = Machine(
            compilers=[
                Process("tvmpaged.tuning.compile_worker", one_core, share, {core}) for core in cores
            ],
            devices=measuring_processes(gpus) if measures else [],
            folder=folder,
            num_workers=gpus[0].multiprocessors if gpus else num_threads(),
            interrupted=interrupted,
        )
        try:
            yield machine
        finally:
            machine.close()


def measuring_processes(gpus: Sequence[Gpu]) -> list[Process]:
    """Return a measuring process for each GPU, or the CPU's."""
    return [measuring_process(f"cuda:{each.index}") for each in gpus] or [measuring_process()]


def _is_sound(phase: str, reply: dict[str, Any], count: int) -> bool:
    """Whether a reply says what its request asked for, of so many candidates."""
    try:
        if reply.keys() & {"wrong", "error"}:
            return all(isinstance(reply.get(name, ""), str) for name in ("wrong", "error"))
        if phase == "roof":
            return MeasuredRoof(**reply["roof"]).value > 0
        speedups = [each["speedup"] for each in reply["samples"]]
        found = latencies(Answer(reply))
        return len(found) == count and all(each > 0 for each in speedups)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False


def latencies(answer: Answer) -> list[Latency]:
    """Return the times of a measuring worker's reply."""
    return [Latency.of(each["times_us"], each["disturbed"]) for each in answer.reply["samples"]]


def failed(choices: Choices, answer: Answer, stage: Reason) -> Trial | None:
    """Return the failure that an answer tells of, or None."""
    if answer.reason:
        return Trial(choices, reason=answer.reason, detail=answer.detail)
    if "wrong" in answer.reply:
        return Trial(choices, reason="wrong", detail=answer.reply["wrong"])
    if "error" in answer.reply:
        detail = answer.reply["error"][:_MAX_DETAIL]
        reason: Reason = "memory" if is_out_of_memory(detail) else stage
        return Trial(choices, reason=reason, detail=detail)
    return None
