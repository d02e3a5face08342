"""Runs that nobody writes any more: left RUNNING by a command that was killed.

A run carries a tag that names the process which writes it, so that a later command on the same
machine sees that it is gone. In a container the name of the machine says nothing; there, whoever
holds a log's lock knows that nobody else writes the runs which that log names.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from tvmpaged.tuning.tracking import PARENT_TAG, Tracking

#: ``<host> <pid> <when that process started>``.
WRITER_TAG = "tvmpaged.writer"


def writer() -> str:
    """Return this process's name in `WRITER_TAG`."""
    return f"{platform.node()} {os.getpid()} {_started(os.getpid())}"


def is_alive(tag: str) -> bool | None:
    """Whether the process that a tag names still runs; None when this machine cannot tell."""
    host, pid, started = ([*tag.rsplit(" ", 2), "", ""])[:3]
    if host != platform.node() or not pid.isdecimal():
        return None
    return _started(int(pid)) == started


def close_orphans(tracking: Tracking, ours: Iterable[str]) -> set[str]:
    """End runs left RUNNING; return their ids.

    One whose runs below it have all come to their end has come to its own, and is FINISHED.

    Parameters
    ----------
    tracking : Tracking
        Where.
    ours : iterable of str
        Runs that only this process may write now, since it holds their log's lock.
    """
    running = {
        str(run.info.run_id): run
        for run in tracking.client.search_runs(
            [tracking.experiment], filter_string="attributes.status = 'RUNNING'"
        )
    }
    mine = set(ours)
    alive = {run_id: is_alive(run.data.tags.get(WRITER_TAG, "")) for run_id, run in running.items()}
    closed = {
        run_id
        for run_id, run in running.items()
        if alive[run_id] is False or (run_id in mine and run.data.tags.get(WRITER_TAG) != writer())
    }
    parents = {run_id: run.data.tags.get(PARENT_TAG) for run_id, run in running.items()}
    for parent in {parents[run_id] for run_id in closed} & (running.keys() - closed):
        children = {run_id for run_id, above in parents.items() if above == parent}
        # Where nobody can tell whether its process lives, one without a child has come to its end.
        if children <= closed and alive[parent] is None:
            closed.add(parent)
    for run_id in sorted(closed, key=lambda each: parents[each] is None):  # children first
        tracking.client.set_terminated(run_id, _end_of(tracking, run_id))
    return closed


def _end_of(tracking: Tracking, run_id: str) -> str:
    below = tracking.client.search_runs(
        [tracking.experiment], filter_string=f"tags.`{PARENT_TAG}` = '{run_id}'"
    )
    return "FINISHED" if {each.info.status for each in below} == {"FINISHED"} else "KILLED"


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name in brackets may hold anything; the 22nd field is the 20th after it.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
