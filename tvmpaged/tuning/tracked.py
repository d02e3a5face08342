"""A search that is logged: to its own file always, to a tracking server as far as there is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tvmpaged.records import Record
from tvmpaged.tuning.log import TrialLog
from tvmpaged.tuning.mlflow_log import RunLog, SpecRun
from tvmpaged.tuning.tracking import Rate
from tvmpaged.tuning.trial import Trial


class Tracked:
    """One search's log and run.

    Parameters
    ----------
    log : TrialLog
        Its file, where its run has been started.
    runs : RunLog or None
        The command's runs.
    run : SpecRun or None
        Its own among them.
    run_id : str or None
        What the file calls its run: that of a search that was cut short.
    """

    def __init__(
        self, log: TrialLog, runs: RunLog | None, run: SpecRun | None, run_id: str | None
    ) -> None:
        self._log = log
        self._runs = runs
        self._run = run
        self._run_id = run_id

    def append(self, before: list[Trial], new: list[Trial], rate: Rate) -> None:
        """Log new trials; those before them say where their steps begin."""
        self._log.append(new)
        if self._runs is not None and self._run is not None:
            self._runs.log_trials(self._run, before, new, rate)
            self._note(self._run.id)

    def run_id(self) -> str | None:
        """Return the run's id as the record will hold it."""
        if self._runs is not None and self._run is not None:
            self._note(self._runs.id_of(self._run))
        return self._run_id

    def finish(self, record: Record, files: Sequence[Path]) -> None:
        """Log the winner."""
        self._log.finish(record.record_id)
        if self._runs is not None and self._run is not None:
            self._runs.finish_spec(self._run, record, [*files, self._log.path])

    def give_up(self) -> None:
        """Leave what was found where a resumed search, or another machine, finds it."""
        if self._runs is not None and self._run is not None:
            self._note(self._run.id)
            self._runs.keep_log(self._run, self._log.path)

    def _note(self, run_id: str | None) -> None:
        if run_id is not None and run_id != self._run_id:
            self._run_id = run_id
            self._log.track(run_id)
