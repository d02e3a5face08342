"""Searches in child processes that die when they are told; each is a fork of a warm process."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

TRIALS = 24
#: What was measured, key by key, whatever became of the log.
MEASURED = "measured"
#: The exit code of a child whose write failed.
NO_SPACE = 28


@dataclass(frozen=True)
class Death:
    """When a child dies.

    Parameters
    ----------
    kind : str
        ``moment``: after so many seconds of work. ``byte``: in the middle of a write, when a file
        has so many bytes. ``record``: the same, while the record is saved. ``full``: as ``byte``,
        but the write fails, as on a full disk. ``never``.
    value : float
        Seconds or bytes.
    """

    kind: str
    value: float = 0.0


def run(folder: Path, death: Death) -> int:
    """Go on with a search in a child; return its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kill_child"])
    # The server that forks takes no path of ours, and says nothing when an import fails there.
    with patch.dict(os.environ, {"PYTHONPATH": str(Path(__file__).parent)}):
        forkserver.ensure_running()
    child = context.Process(target=_search, args=(folder, death))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def _search(folder: Path, death: Death) -> None:
    # Only there: it changes what it imports.
    import kill_child

    kill_child.search(folder, death)
