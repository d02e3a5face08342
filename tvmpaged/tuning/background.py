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

    Nobody waits for a job that hangs: whoever comes by after its deadline sees that it is late, and
    that is a failure like any other.

    Parameters
    ----------
    on_failure : callable
        Told once why jobs are no longer done.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._jobs: queue.Queue[tuple[Callable[[], object], float]] = queue.Queue(QUEUE_SIZE)
        self._lock = threading.Lock()
        self._failed = False
        self._thread: threading.Thread | None = None
        self._unfinished = 0
        self._late_at = float("inf")

    @property
    def failed(self) -> bool:
        """Whether jobs are no longer done."""
        if not self._failed and time.monotonic() > self._late_at:
            self.fail("no answer in time")
        return self._failed

    @property
    def idle(self) -> bool:
        """Whether all jobs so far are done."""
        return not self._unfinished

    def submit(self, job: Callable[[], object], deadline_s: float = float("inf")) -> None:
        """Hand over a job, which may take so long once its turn comes; returns at once."""
        if self.failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        with self._lock:
            self._unfinished += 1
        try:
            self._jobs.put_nowait((job, deadline_s))
        except queue.Full:
            self.fail(f"more than {QUEUE_SIZE} messages are waiting")

    def settle(self, timeout_s: float) -> bool:
        """Wait until all jobs so far are done; False when they are not, or never will be."""
        end = time.monotonic() + timeout_s
        while not self.idle:
            if self.failed or time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return not self.failed

    def fail(self, why: str) -> None:
        """Do no more jobs."""
        with self._lock:
            if self._failed:
                return
            self._failed = True
        self._on_failure(why)

    def _work(self) -> None:
        while True:
            job, deadline_s = self._jobs.get()
            try:
                if not self._failed:
                    self._late_at = time.monotonic() + deadline_s
                    job()
            except Exception as error:  # noqa: BLE001, whatever a server's client raises
                self.fail(f"{type(error).__name__}: {error}")
            finally:
                self._late_at = float("inf")
                with self._lock:
                    self._unfinished -= 1
