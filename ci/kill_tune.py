"""Kills a real ``tvmpaged tune`` again and again, resumes it, and checks that nothing was lost.

Usage: .venv/bin/python ci/kill_tune.py [KILLS [SECONDS]]
Every other kill comes up to SECONDS after the start, the rest up to SECONDS after a new batch.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tvmpaged import records
from tvmpaged.cpu import native_target
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.log import read_searches
from tvmpaged.tuning.session import BATCH
from tvmpaged.tuning.tracking import Tracking

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TRIALS = 24
#: What a worker may take to notice that its parent is gone: until then it may still be importing.
END_S = 30


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start or resume the search in a session of its own."""
    flags = ["--spec", str(SPEC), "--trials", str(TRIALS), "--resume", "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "tvmpaged", "tune", *flags, "--mlflow-uri", "sqlite:///mlflow.db"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """Return the processes that a process started."""
    text = ""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            text += task.read_text()
    return [int(each) for each in text.split()]


def num_trials(log: Path) -> int:
    """Return how many trials a log holds."""
    return sum(len(each.trials) for each in read_searches(log))


def _wait_for_more(log: Path, before: int, child: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while num_trials(log) <= before and time.monotonic() < end and child.poll() is None:
        time.sleep(0.2)


def _end_within(seconds: float, processes: list[int]) -> bool:
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{each}").exists() for each in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def main(kills: int, seconds: float) -> None:
    """Kill, resume, and check."""
    with tempfile.TemporaryDirectory(prefix="tvmpaged-kill-") as name:
        folder = Path(name)
        log = records.folder(folder / "tuning_logs", native_target(), SPEC) / "trials.jsonl"
        before = 0
        for kill in range(kills):
            child = start(folder)
            if kill % 2:
                _wait_for_more(log, before, child)
            with suppress(subprocess.TimeoutExpired):
                child.wait(random.uniform(0.0, seconds))  # noqa: S311, no secret
            workers = children(child.pid)
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert _end_within(END_S, workers), "orphans"
            trials = num_trials(log)
            assert trials >= before, f"{before} trials became {trials}"
            print(f"kill {kill + 1} of {kills}: {trials} trials in the log", flush=True)
            before = trials
        assert start(folder).wait() == 0, "the last run failed"
        (*_, last) = read_searches(log)
        record = records.load(folder / "tuning_logs", native_target(), SPEC)
        assert record is not None
        assert len(last.trials) == record.trials <= TRIALS + BATCH
        assert last.record_id == record.record_id
        os.chdir(folder)
        tracking = Tracking("sqlite:///mlflow.db")
        running = "attributes.status = 'RUNNING'"
        assert not tracking.client.search_runs([tracking.experiment], running), "left RUNNING"
        run = tracking.client.get_run(record.mlflow_run_id)
        assert run.info.status == "FINISHED"
    print(f"{kills} kills, {record.trials} trials, and the record names its run")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(int(given[0]) if given else 10, float(given[1]) if given[1:] else 20.0)
