"""Persistent worker processes that speak JSON lines: started once, replaced when they die or hang.

A worker is ``python -m <module>``; nothing is pickled, so what is sent may come from anywhere. The
worker's other output is kept, since its last lines often say why it died.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Literal

from tvmpaged.tuning.trial import Reason

#: From a worker's start to its first answer; importing the compiler on a busy machine takes long.
START_TIMEOUT_S = 180.0
_POLL_S = 0.2
_TAIL_BYTES = 2000
#: How Python, C++, LLVM and torch word that they were refused memory, and how a process ends that
#: the system killed because there was none: nobody else kills one that has a request.
_OUT_OF_MEMORY = re.compile(
    r"^MemoryError|^SIGKILL|bad_alloc|out of memory|allocation failed|allocate memory",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Answer:
    """What came of one request: a worker's reply, or why there is none.

    Parameters
    ----------
    reply : dict
        Empty when there is none.
    reason : str
        ``""``, ``crash``, ``memory``, ``time-out`` or ``interrupted``.
    detail : str
        For a person.
    seconds : float
        From the request to the answer.
    """

    reply: dict[str, Any]
    reason: Reason | Literal[""] = ""
    detail: str = ""
    seconds: float = 0.0


class Process:
    """One worker process; asking it starts it.

    Parameters
    ----------
    module : str
        Run as ``python -m module``; it calls `tvmpaged.tuning.child.serve`.
    environment : dict
        Added to this process's own.
    memory_bytes : int, optional
        Data it may hold; with more its allocations fail, instead of the machine's running out.
    cores : collection of int, optional
        It and all it starts run on these alone; by default on this process's.
    """

    def __init__(
        self,
        module: str,
        environment: dict[str, str] | None = None,
        memory_bytes: int | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        self.module = module
        self.environment = environment or {}
        self.memory_bytes = memory_bytes
        self.cores = cores
        self.num_starts = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._buffer = b""
        self._is_starting = False
        self._timeout_s = 0.0
        self._asked_at = 0.0
        self._deadline = 0.0

    def send(self, request: dict[str, Any], timeout_s: float) -> None:
        """Hand over a request; `poll` has the answer."""
        fresh = self._child is None or self._child.poll() is not None
        if fresh:
            self._start()
        # A fresh worker answers a ping first, so that no request pays for its start.
        lines = [{"ping": True}, request] if fresh else [request]
        self._is_starting = fresh
        self._timeout_s = timeout_s
        self._set_clock(START_TIMEOUT_S if fresh else timeout_s)
        assert self._child is not None
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it died just now; poll says so
            self._child.stdin.write("".join(json.dumps(each) + "\n" for each in lines).encode())
            self._child.stdin.flush()

    def _set_clock(self, timeout_s: float) -> None:
        self._asked_at = time.monotonic()
        self._deadline = self._asked_at + timeout_s

    def poll(self) -> Answer | None:
        """Return the answer when there is one; a hung worker is killed and that is the answer."""
        assert self._child is not None
        assert self._child.stdout is not None
        seconds = time.monotonic() - self._asked_at
        if select.select([self._child.stdout], [], [], 0)[0]:
            data = os.read(self._child.stdout.fileno(), 1 << 16)
            self._buffer += data
            if not data:
                detail = self._epitaph()
                reason: Reason = "memory" if is_out_of_memory(detail) else "crash"
                return Answer({}, reason, detail, seconds)
        line, newline, rest = self._buffer.partition(b"\n")
        if newline:
            self._buffer = rest
            if not self._is_starting:
                return self._reply(line, seconds)
            self._is_starting = False
            self._set_clock(self._timeout_s)
        if time.monotonic() > self._deadline:
            self.kill()
            return Answer({}, "time-out", f"no answer in {seconds:.0f} s", seconds)
        return None

    def _reply(self, line: bytes, seconds: float) -> Answer:
        try:
            return Answer(dict(json.loads(line)), seconds=seconds)
        except (TypeError, ValueError):
            # A candidate that wrote over its process's memory: what is left of that is no worker.
            self.kill()
            return Answer({}, "crash", f"its answer is no JSON: {line[:80]!r}", seconds)

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def stdout_fd(self) -> int:
        """What becomes readable when the answer comes."""
        assert self._child is not None
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def ask(
        self,
        request: dict[str, Any],
        timeout_s: float,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Send one request and wait for its answer."""
        return ask_all([self], [request], timeout_s, interrupted)[0]

    def kill(self) -> None:
        """End the process at once; the next request starts another."""
        if self._child is not None:
            # Its whole session: a compiler's linker goes with it.
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._close()

    def _start(self) -> None:
        self.kill()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self._buffer = b""
        self._child = subprocess.Popen(
            [sys.executable, "-m", self.module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=os.environ | self.environment,
            # A Ctrl-C at the terminal is for the parent, which ends its workers in order.
            start_new_session=True,
        )
        if self.cores is not None:
            # Before it has started any thread: those inherit it.
            os.sched_setaffinity(self._child.pid, self.cores)
        if self.memory_bytes:
            limits = (self.memory_bytes, self.memory_bytes)
            resource.prlimit(self._child.pid, resource.RLIMIT_DATA, limits)
        self.num_starts += 1

    def _epitaph(self) -> str:
        """Return how a dead worker ended and the last of what it said; forget it."""
        assert self._child is not None
        assert self._output is not None
        code = self._child.wait()
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        said = self._output.read().decode(errors="replace").strip().splitlines()
        self._close()
        try:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            how = f"signal {-code}"
        return f"{how}; {said[-1].strip()}" if said else how

    def _close(self) -> None:
        assert self._child is not None
        for stream in (self._child.stdin, self._child.stdout, self._output):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._child = self._output = None


def is_out_of_memory(text: str) -> bool:
    """Whether an error's text or a process's last words tell that it was refused memory."""
    return _OUT_OF_MEMORY.search(text) is not None


def ask_all(
    workers: Sequence[Process],
    requests: Sequence[dict[str, Any]],
    timeout_s: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Share requests out among workers; return their answers in the order of the requests.

    Parameters
    ----------
    workers : sequence of Process
        Each has one request at a time.
    requests : sequence of dict
        Plain data.
    timeout_s : float
        For each request.
    interrupted : callable
        Asked several times a second; once true, all that is in flight is given up.
    """
    answers: list[Answer | None] = [None] * len(requests)
    waiting = list(range(len(requests)))[::-1]
    busy: dict[Process, int] = {}
    while waiting or busy:
        if interrupted():
            for worker in busy:
                worker.kill()
            break
        for worker in workers:
            if worker not in busy and waiting:
                busy[worker] = waiting.pop()
                worker.send(requests[busy[worker]], timeout_s)
        select.select([worker.stdout_fd for worker in busy], [], [], _POLL_S)
        for worker, index in list(busy.items()):
            answer = worker.poll()
            if answer is not None:
                answers[index] = answer
                del busy[worker]
    return [each or Answer({}, "interrupted", "interrupted") for each in answers]
