"""The log of one spec's trials: JSON lines, only ever appended to.

Each run of the tuner writes a ``run`` line with its setting, then a line per trial. A line that
was torn by a crash is passed over; what is appended after it starts on a line of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tvmpaged.errors import UserError
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.trial import Trial

SCHEMA_VERSION = 1
LOG_NAME = "trials.jsonl"
LOCK_NAME = ".lock"
LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Run:
    """What earlier runs under one setting left.

    Parameters
    ----------
    trials : list of Trial
        Each candidate once, in the order they were measured.
    seed : int or None
        Of the last such run.
    mlflow_run_id : str or None
        Of the last such run.
    """

    trials: list[Trial]
    seed: int | None = None
    mlflow_run_id: str | None = None


class Lines:
    """A file of JSON objects, one per line, that a crash costs no more than its last line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write objects; they are on the disk when it returns."""
        if not lines:
            return
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
        with self.path.open("ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = "\n" + text
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects; lines that hold none are passed over."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for line in file:
                try:
                    data = json.loads(line)
                except ValueError:
                    continue  # torn
                if isinstance(data, dict):
                    yield data


class TrialLog:
    """One writer's view of a log; from `open_log`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = Lines(path)

    def start(self, setting: Setting, seed: int, mlflow_run_id: str | None = None) -> None:
        """Write the line of a new run."""
        self._lines.append(
            [
                {
                    "schema_version": SCHEMA_VERSION,
                    "kind": "run",
                    "setting_key": setting.key,
                    "seed": seed,
                    "mlflow_run_id": mlflow_run_id,
                    "setting": setting.as_dict(),
                }
            ]
        )

    def append(self, trials: Iterable[Trial]) -> None:
        """Write trials of the run that was started last; they are on the disk when it returns."""
        self._lines.append([{"kind": "trial", **each.as_dict()} for each in trials])

    def earlier(self, setting: Setting) -> Run:
        """Return the trials of all runs whose setting is this one."""
        return read_runs(self.path, setting.key)


def read_runs(path: Path, setting_key: str) -> Run:
    """Return what a log holds for a setting; lines that cannot be read are passed over."""
    trials: dict[str, Trial] = {}
    seed, mlflow_run_id, ours = None, None, False
    for line in Lines(path).read():
        try:
            if line["kind"] == "run":
                ours = line["setting_key"] == setting_key
                if ours:
                    seed, mlflow_run_id = int(line["seed"]), line.get("mlflow_run_id")
            elif ours:
                trial = Trial.from_dict(line)
                trials.setdefault(trial.key, trial)
        except (KeyError, TypeError, ValueError):
            continue
    return Run(list(trials.values()), seed, mlflow_run_id)


@contextmanager
def open_log(folder: Path) -> Iterator[TrialLog]:
    """Open a folder's log for one writer; the folder is made.

    Raises
    ------
    UserError
        When another process is writing it, naming that process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        yield TrialLog(folder / LOG_NAME)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one writer.

    Raises
    ------
    UserError
        When another process holds it, naming that process.
    """
    # The kernel frees the lock when its holder dies, so nothing has to be taken over.
    path = folder / LOCK_NAME
    lock = FileLock(path, timeout=LOCK_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout as error:
        owner = path.read_text(errors="replace").strip() or "another process"
        raise UserError(
            f"{folder} is being written by {owner}; waited {LOCK_TIMEOUT_S:.0f} s"
        ) from error
    try:
        path.write_text(f"process {os.getpid()}\n")
        yield
    finally:
        lock.release()
