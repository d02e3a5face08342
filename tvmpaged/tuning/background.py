"""Work that may hang without holding anything up: done in order by a thread, given up when late."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

QUEUE_SIZE = 256
_POLL_S = 0.02


class Background:
    """Runs jobs one after the other in a daemon thread; the first failure ends it for good.

    Parameters
    ----------
    on_failure : callable
        Told once why jobs are no longer done.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(QUEUE_SIZE)
        self._lock = threading.Lock()
        self._failed = False
        self._thread: threading.Thread | None = None

    @property
    def failed(self) -> bool:
        """Whether jobs are no longer done."""
        return self._failed

    def submit(self, job: Callable[[], None]) -> None:
        """Hand over a job; returns at once."""
        if self._failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self.fail(f"more than {QUEUE_SIZE} messages are waiting")

    def settle(self, timeout_s: float) -> bool:
        """Wait until all jobs so far are done; False when they are not, or never will be."""
        done, end = threading.Event(), time.monotonic() + timeout_s
        self.submit(done.set)
        while not done.wait(_POLL_S):
            if self._failed or time.monotonic() > end:
                return False
        return not self._failed

    def fail(self, why: str) -> None:
        """Do no more jobs."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
        self._on_failure(why)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if not self._failed:
                    job()
            except Exception as error:  # noqa: BLE001, whatever a server's client raises
                self.fail(f"{type(error).__name__}: {error}")
