"""The log of one spec's trials: JSON lines, only ever appended to.

Each run of the tuner writes a ``run`` line with its setting, a line per trial, a ``roof`` line
whenever that was measured, a ``tracked`` line once a tracking server has named its run, and a
``record`` line when it has come to its end. A line that was torn by a crash is passed over; what is
appended after it starts on a line of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tvmpaged.errors import UserError
from tvmpaged.files import naming
from tvmpaged.roofs import MeasuredRoof
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
        Of the last such run; None when it came to its end.
    """

    trials: list[Trial]
    seed: int | None = None
    mlflow_run_id: str | None = None


@dataclass
class Search:
    """One search as a log holds it: a run, with those that resumed it before it came to its end.

    Parameters
    ----------
    setting_key : str
        Of its setting.
    setting : dict
        That setting as plain data.
    seed : int
        Of its proposals.
    trials : dict
        Key -> trial, in the order they were measured; a resumed search has those before it.
    mlflow_run_id : str or None
        Its run on a tracking server.
    record_id : str or None
        Its record's; None when it never came to its end.
    begin : int
        How many of the trials it began with.
    """

    setting_key: str
    setting: dict[str, Any]
    seed: int
    trials: dict[str, Trial] = field(default_factory=dict)
    mlflow_run_id: str | None = None
    record_id: str | None = None
    begin: int = 0


class Lines:
    """A file of JSON objects, one per line, that a crash costs no more than its last line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write objects; they are on the disk when it returns."""
        if not lines:
            return
        text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
        with naming(self.path), self.path.open("ab+") as file:
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

    def start(
        self,
        setting: Setting,
        seed: int,
        mlflow_run_id: str | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        """Write the line of a new run."""
        self._lines.append(
            [
                {
                    "schema_version": SCHEMA_VERSION,
                    "kind": "run",
                    "setting_key": setting.key,
                    "seed": seed,
                    "mlflow_run_id": mlflow_run_id,
                    "resumed": resumed,
                    "setting": setting.as_dict(),
                }
            ]
        )

    def append(self, trials: Iterable[Trial]) -> None:
        """Write trials of the run that was started last; they are on the disk when it returns."""
        self._lines.append([{"kind": "trial", **each.as_dict()} for each in trials])

    def track(self, mlflow_run_id: str) -> None:
        """Write under which name a tracking server has the run that was started last."""
        self._lines.append([{"kind": "tracked", "mlflow_run_id": mlflow_run_id}])

    def roof(self, roof: MeasuredRoof | None) -> None:
        """Write what the machine could do at best, and the winner's share of it at the end."""
        if roof is not None:
            self._lines.append([{"kind": "roof", **asdict(roof)}])

    def finish(self, record_id: str) -> None:
        """Write that the run that was started last has its record."""
        self._lines.append([{"kind": "record", "record_id": record_id}])

    def run_ids(self) -> list[str]:
        """Return the names of all runs that tracking servers have of this log."""
        found = [each.mlflow_run_id for each in read_searches(self.path)]
        return [each for each in dict.fromkeys(found) if each is not None]

    def earlier(self, setting: Setting) -> Run:
        """Return the trials of all runs whose setting is this one."""
        return read_runs(self.path, setting.key)


def read_runs(path: Path, setting_key: str) -> Run:
    """Return what a log holds for a setting; lines that cannot be read are passed over."""
    found = [each for each in read_searches(path) if each.setting_key == setting_key]
    if not found:
        return Run([])
    trials: dict[str, Trial] = {}
    for search in found:
        trials |= _new(search.trials, trials)
    last = found[-1]
    run_id = last.mlflow_run_id if last.record_id is None else None
    return Run(list(trials.values()), last.seed, run_id)


def _new(trials: Mapping[str, Trial], known: Mapping[str, Trial]) -> dict[str, Trial]:
    return {key: each for key, each in trials.items() if key not in known}


def read_searches(path: Path) -> list[Search]:
    """Return the searches that a log holds; lines that cannot be read are passed over."""
    found: list[Search] = []
    now: Search | None = None
    for line in Lines(path).read():
        try:
            if line["kind"] == "run":
                now = _search(line, found)
            elif now is None:
                continue
            elif line["kind"] == "tracked":
                now.mlflow_run_id = str(line["mlflow_run_id"])
            elif line["kind"] == "record":
                now.record_id = str(line["record_id"])
            else:
                trial = Trial.from_dict(line)
                now.trials.setdefault(trial.key, trial)
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return found


def _search(line: dict[str, Any], found: list[Search]) -> Search:
    """Return the search that a run's line begins, or goes on with."""
    run_id = line.get("mlflow_run_id")
    new = Search(str(line["setting_key"]), dict(line["setting"]), int(line["seed"]))
    new.mlflow_run_id = None if run_id is None else str(run_id)
    before = [each for each in found if each.setting_key == new.setting_key]
    # Logs of before the word "resumed" tell a resumed run by the name it kept.
    resumed = line.get("resumed", bool(before and run_id and before[-1].mlflow_run_id == run_id))
    if resumed and before and before[-1].record_id is None:
        last = before[-1]
        last.seed, last.mlflow_run_id = new.seed, new.mlflow_run_id or last.mlflow_run_id
        return last
    if resumed:
        for each in before:
            new.trials |= _new(each.trials, new.trials)
        new.begin = len(new.trials)
    found.append(new)
    return new


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
            f"{folder} is being written by {owner}; waited {LOCK_TIMEOUT_S:.0f} s; run this "
            "again when that has ended"
        ) from error
    try:
        path.write_text(f"process {os.getpid()}\n")
        yield
    finally:
        lock.release()
