"""The worker's side of `tvmpaged.tuning.process`: read a request, write its reply, and again."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests with `handle`; what it raises becomes the reply ``{"error": ...}``."""
    _end_with_parent()
    replies = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints goes to stderr, not between the replies.
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        try:
            reply = handle(json.loads(line))
        except Exception as error:  # noqa: BLE001, whatever it raised is the answer
            reply = {"error": f"{type(error).__name__}: {error}".strip()}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _end_with_parent() -> None:
    """Die when the parent does, also in the middle of a kernel that never returns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if len(sys.argv) > 1 and os.getppid() != int(sys.argv[1]):
        os._exit(1)  # it was gone already
