"""Ctrl-C and SIGTERM, held back while the search runs.

The search calls Python from compiled code, which would turn a KeyboardInterrupt into some other
error. So a signal only sets a flag that every wait looks at; when the search has come to its end
in order, the signal is raised again. A second one is not held back. One that the process was told
to ignore, as a shell tells what it starts in the background, stays ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GivenUpError(Exception):
    """Work was given up because a signal came; that signal is raised again soon."""


class Interrupt:
    """Whether a signal came."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> bool:
        """Return True once a signal came."""
        return self.number != 0


@contextmanager
def held_back() -> Iterator[Interrupt]:
    """Hold signals back inside the block; raise the one that came at its end.

    Raises
    ------
    KeyboardInterrupt
        When a signal came and its own handler raised nothing.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        interrupt.number = number
        signal.signal(number, before[number])

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, note)
    try:
        yield interrupt
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if interrupt.number:
        signal.raise_signal(interrupt.number)
        # Whoever handles it and goes on must not take what was given up for what was done.
        raise KeyboardInterrupt
