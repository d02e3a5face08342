"""An export's candidates, tried: by the device here, or from answers that were written down.

The same session, the same decision and the same order on both sides: what was measured elsewhere is
played back through the code that measures.
"""

from __future__ import annotations

import shlex
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvmpaged.bundle import BundleError
from tvmpaged.bundle.fields import Fields
from tvmpaged.errors import UserError
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.doubt import contradiction, doubt
from tvmpaged.tuning.export_manifest import Candidate, Export, ExportedSpec, ExportFolder, Library
from tvmpaged.tuning.finalists import Result, decide
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import Lines
from tvmpaged.tuning.machine import Machine
from tvmpaged.tuning.process import Answer, Process
from tvmpaged.tuning.results import SCHEMA_VERSION, Measured, Results
from tvmpaged.tuning.session import Session
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.trial import Choices, choices_key


class Tape:
    """Answers by what was asked; who leads is asked for several times.

    Parameters
    ----------
    answers : sequence of Measured
        Known ones, those to one question in the order they came.
    journal : Lines, optional
        Where new ones are written as they come.
    """

    def __init__(self, answers: Sequence[Measured], journal: Lines | None = None) -> None:
        self._answers = list(answers)
        self._played: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
        self._journal = journal
        self._lock = threading.Lock()  # devices answer side by side

    @property
    def answers(self) -> tuple[Measured, ...]:
        """All answers, in the order they came."""
        return tuple(self._answers)

    def play(
        self, spec: AttentionSpec, phase: str, keys: Sequence[str], *, again: bool
    ) -> Measured | None:
        """Return the next answer to a question, if there is one.

        Parameters
        ----------
        spec, phase, keys
            The question.
        again : bool
            Whether the last one is given once more when all were: on several devices who led
            hung on who answered first.
        """
        question = (str(spec), phase, tuple(keys))
        with self._lock:
            known = [each for each in self._answers if each.question == question]
            turn = self._played[question]
            self._played[question] += turn < len(known)
        return known[min(turn, len(known) - 1)] if known and (again or turn < len(known)) else None

    def knows(self, spec: AttentionSpec, key: str) -> bool:
        """Return whether a candidate was measured, alone or beside the default."""
        return any(
            (each.spec, each.phase, each.keys[-1:]) == (str(spec), "search", (key,))
            for each in self._answers
        )

    def keep(self, measured: Measured) -> None:
        """Take in a new answer, which counts as played; it is on the disk when this returns."""
        with self._lock:
            self._answers.append(measured)
            self._played[measured.question] += 1
            if self._journal is not None:
                self._journal.append([{"kind": "answer", **measured.as_dict()}])


def open_journal(path: Path, results: Results, export: Export) -> Tape:
    """Return a tape that goes on where the last run under the same circumstances stopped.

    Parameters
    ----------
    path : Path
        The journal. Lines that are torn or that nobody should believe are passed over: what they
        would have told is measured again.
    results : Results
        The circumstances; its answers are not looked at.
    export : Export
        What is measured.
    """
    journal, header = Lines(path), {"schema_version": SCHEMA_VERSION, **results.header()}
    answers, ours = [], False
    for line in journal.read():
        kind = line.pop("kind", None)
        if kind == "run":
            ours = line == header
        elif ours:
            try:
                measured = Measured.read(Fields(line, "answer"))
            except BundleError:
                continue
            if not doubt(measured, export):
                answers.append(measured)
    if not ours:
        journal.append([{"kind": "run", **header}])
    return Tape(answers, journal)


class ExportedMachine(Machine):
    """A machine that compiles nothing: artifacts come from an export, answers from a tape first.

    Parameters
    ----------
    source : ExportFolder
        Where artifacts come from. Bytes that have the manifest's digest are copied into `folder`,
        which is this process's own: what was hashed is what is loaded.
    tape : Tape
        What is known; with a device it grows.
    folder, num_workers, devices, interrupted
        As of a `Machine`; without a device it only answers from the tape.
    """

    def __init__(
        self,
        source: ExportFolder,
        tape: Tape,
        folder: Path,
        num_workers: int,
        devices: Sequence[Process] = (),
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__([], devices, folder, num_workers, interrupted)
        self.source, self.tape = source, tape
        self._specs = {each.spec: each for each in source.export.specs}

    def compile(
        self, spec: AttentionSpec, target: TargetKey, choices: Sequence[Choices]
    ) -> list[Answer]:
        """Fetch candidates; those that could not be compiled answer as they did then."""
        del target
        return [self._fetch_candidate(spec, self._candidate(spec, each)) for each in choices]

    def _ask(
        self,
        phase: str,
        spec: AttentionSpec,
        candidates: Sequence[Choices],
        request: dict[str, Any],
        timeout_s: float,
    ) -> Answer:
        keys = tuple(choices_key(each) for each in candidates)
        known = self.tape.play(spec, phase, keys, again=not self.devices)
        if known is not None:
            return known.answer
        if not self.devices:
            return self._lacking(spec, phase, keys)
        answer = super()._ask(phase, spec, candidates, request, timeout_s)
        if answer.reason != "interrupted":
            libraries = [self._candidate(spec, each).library for each in candidates]
            sha256s = tuple(each.sha256 for each in libraries if each is not None)
            self.tape.keep(
                Measured(
                    str(spec), phase, keys, sha256s, answer.reply, answer.reason, answer.detail
                )
            )
        return answer

    def _lacking(self, spec: AttentionSpec, phase: str, keys: Sequence[str]) -> Answer:
        """Answer what the tape cannot; only what a record can do without may be lacking."""
        if phase == "roof":
            return Answer({})
        raise UserError(
            f"{spec}: the results lack the {phase} round of {' '.join(keys)}: run "
            f"tvmpaged measure {shlex.quote(str(self.source.path))} once more where it was measured"
        )

    def can_answer(self, spec: AttentionSpec, candidate: Candidate) -> bool:
        """Return whether anything can be said of a candidate."""
        known = candidate.library is None or self.tape.knows(spec, candidate.key)
        return known or bool(self.devices)

    def fetch_merge(self, exported: ExportedSpec) -> Path:
        """Return where a spec's merge kernel lies."""
        path = self.path(exported.spec, "merge")
        self._fetch(exported.merge, path)
        return path

    def _candidate(self, spec: AttentionSpec, choices: Choices) -> Candidate:
        found = self._specs[spec].find(choices_key(choices))
        assert found is not None
        return found

    def _fetch_candidate(self, spec: AttentionSpec, candidate: Candidate) -> Answer:
        if candidate.library is None:
            if candidate.reason == "compile":
                return Answer({"error": candidate.detail})
            return Answer({}, candidate.reason, candidate.detail)
        self._fetch(candidate.library, self.path(spec, candidate.key))
        return Answer({})

    def _fetch(self, library: Library, path: Path) -> None:
        if self.devices:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.source.read(library))


def try_all(
    exported: ExportedSpec,
    machine: ExportedMachine,
    *,
    rotation_bytes: int,
    deadline: float = float("inf"),
    on_status: Callable[[Status], None] = lambda _status: None,
) -> tuple[Session, Result, MeasuredRoof | None]:
    """Try a spec's candidates, the best ones once more beside the default, the winner by the roof.

    Parameters
    ----------
    exported : ExportedSpec
        The spec's part of the export.
    machine : ExportedMachine
        What answers.
    rotation_bytes : int
        K and V that are read before the same are read again.
    deadline : float
        Of `time.monotonic`; then the candidates so far must do.
    on_status : callable
        Told of each batch.

    Returns
    -------
    session : Session
        With every trial.
    result : Result
        Who won.
    roof : MeasuredRoof or None
        What bounds the kernel there, timed in turns with the winner; None when that failed.

    Raises
    ------
    GivenUpError
        When a signal came.
    UserError
        When not even the default can be measured, an answer is missing, or they contradict each
        other.
    """
    target = machine.source.export.header.target
    first, *others = exported.candidates
    default = first.choices
    candidates = [first, *(each for each in others if machine.can_answer(exported.spec, each))]
    task = Task(
        machine=machine,
        spec=exported.spec,
        target=target,
        workload=exported.workload,
        merge=machine.fetch_merge(exported),
        default=default,
        rotation_bytes=rotation_bytes,
        seed=exported.seed,
    )
    session = Session(
        task=task,
        num_trials=len(candidates),
        deadline=deadline,
        starts=[each.choices for each in candidates],
        on_batch=lambda _batch: on_status(session.status("search")),
    )
    task.measure_roof()
    on_status(session.status("start"))
    session.search()
    if machine.interrupted():
        raise GivenUpError
    on_status(session.status("finalists"))
    result = decide(task, default, list(session.trials.values()))
    roof = task.measure_roof(beside=result.choices)
    why = contradiction(exported, machine.tape.answers)
    if why:
        raise UserError(
            f"{exported.spec}: the results contradict each other: {why}; where it was measured, "
            f"run tvmpaged measure {shlex.quote(str(machine.source.path))} --no-resume on a quiet "
            "machine"
        )
    on_status(session.done(result, roof))
    return session, result, roof
