"""Writing an export: candidates of specs, compiled here, to be measured on another machine.

With results of that machine in the log, the candidates are what the search would try next: so
export, measure, import and export again is a search whose device is elsewhere.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tvmpaged import records, schedules
from tvmpaged.bundle import Manifest, file_name, trust
from tvmpaged.errors import UserError
from tvmpaged.files import sync_folder, write_synced
from tvmpaged.sources import source_sha256
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.export_manifest import (
    EXPORT_NAME,
    JOURNAL_NAME,
    RESULTS_NAME,
    Candidate,
    Export,
    ExportedSpec,
    Library,
    encode,
)
from tvmpaged.tuning.finalists import NUM_FINALISTS
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import LOG_NAME, read_runs, read_searches
from tvmpaged.tuning.machine import Machine, failed
from tvmpaged.tuning.model_session import propose
from tvmpaged.tuning.process import Answer
from tvmpaged.tuning.session import BATCH
from tvmpaged.tuning.starts import credible, default_start, neighbours, spec_seed
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.work import Settings
from tvmpaged.tuning.workload import Workload


@dataclass(frozen=True)
class Exported:
    """What became of one spec.

    Parameters
    ----------
    spec : AttentionSpec
        Which.
    candidates : int
        How many can be measured.
    failures : int
        How many could not be compiled.
    known_trials : int
        Earlier trials of the log that the proposals follow from.
    failure : str
        Why the spec is not in the export.
    """

    spec: AttentionSpec
    candidates: int = 0
    failures: int = 0
    known_trials: int = 0
    failure: str = ""

    def as_dict(self) -> dict[str, str | int | None]:
        """Return plain data."""
        return {**vars(self), "spec": str(self.spec), "failure": self.failure or None}


class Exporter:
    """Compiles candidates, and writes the folder once all are there.

    Parameters
    ----------
    header : bundle.Manifest
        The target, and what its libraries need.
    settings : Settings
        How many candidates, from which seed, and where the logs are.
    machine : Machine
        What compiles.
    on_status : callable
        Told of each batch.
    """

    def __init__(
        self,
        header: Manifest,
        settings: Settings,
        machine: Machine,
        on_status: Callable[[Status], None],
    ) -> None:
        self.header = header
        self.settings = settings
        self.machine = machine
        self.on_status = on_status
        self._specs: list[ExportedSpec] = []
        self._paths: dict[str, Path] = {}
        self._merges: dict[str, Library] = {}

    def add(self, spec: AttentionSpec, deadline: float) -> Exported:
        """Propose and compile a spec's candidates.

        Parameters
        ----------
        spec : AttentionSpec
            Which.
        deadline : float
            Of `time.monotonic`; then the candidates so far must do.

        Raises
        ------
        GivenUpError
            When a signal came.
        UserError
            When the untuned default or the merge kernel cannot be compiled.
        """
        workload = self.settings.workload(spec, self.header.target.kind)
        seed = spec_seed(self.settings.seed, spec)
        known = self._known(spec, workload)
        merge = self._merge(spec.out_dtype)
        candidates: list[Candidate] = []
        wanted = self._propose(spec, known, seed)
        self._tell(spec, candidates, len(wanted), "start")
        while wanted[len(candidates) :] and (not candidates or time.monotonic() < deadline):
            begin = len(candidates)
            candidates += self._compile(spec, wanted[begin : begin + BATCH])
            self._tell(spec, candidates, len(wanted), "compile")
        _library(spec, candidates[0])
        self._specs.append(ExportedSpec(spec, workload, seed, merge, tuple(candidates)))
        self._tell(spec, candidates, len(candidates), "done")
        failures = sum(each.library is None for each in candidates)
        return Exported(spec, len(candidates) - failures, failures, len(known))

    def write(self, folder: Path) -> None:
        """Write the folder: it appears whole, in the place of an earlier export if there is one."""
        sources = source_sha256(self.header.target.kind)
        export = Export(self.header, sources, self.settings.seed, tuple(self._specs))
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for library in {each.file: each for each in export.libraries()}.values():
                write_synced(new / library.file, self._paths[library.sha256].read_bytes())
            write_synced(new / EXPORT_NAME, encode(export))
            new.chmod(0o755)
            sync_folder(new)
            old = new.with_name(f"{new.name}.old")
            if folder.exists():
                check_folder(folder)
                folder.rename(old)
            new.rename(folder)
            sync_folder(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise

    def _propose(self, spec: AttentionSpec, known: list[Trial], seed: int) -> list[Choices]:
        target, count = self.header.target, self.settings.trials
        default = default_start(spec, target)
        timed = sorted((each for each in known if each.latency_us), key=lambda one: one.median_us)
        # The best so far once more: they are to be compared with the new ones in one round.
        again = [default, *(each.choices for each in timed[:NUM_FINALISTS])]
        starts = [default, *neighbours(spec, target, self.settings.work_dir)]
        new = propose(spec, target, starts, known, seed, count)
        found = {choices_key(each): each for each in (*again, *new)}
        return list(found.values())[:count]

    def _known(self, spec: AttentionSpec, workload: Workload) -> list[Trial]:
        """Return what the log holds of the same programs, measured on the last device."""
        ours = {
            "source_sha256": source_sha256(self.header.target.kind),
            "tvm": version("apache-tvm"),
            "tvm_ffi": version("apache-tvm-ffi"),
            "workload": json.loads(json.dumps(workload.as_dict())),
        }
        log = records.folder(self.settings.work_dir, self.header.target, spec) / LOG_NAME
        keys = [
            each.setting_key
            for each in read_searches(log)
            if all(each.setting.get(name) == value for name, value in ours.items())
        ]
        trials = read_runs(log, keys[-1]).trials if keys else []
        return credible(spec, self.header.target, trials)

    def _merge(self, dtype: str) -> Library:
        """Return the kernel that folds a split sequence's parts; compiled once per dtype."""
        if dtype not in self._merges:
            spec = AttentionSpec.make("merge", dtype)
            choices = schedules.default_choices(spec, self.header.target)
            self._merges[dtype] = _library(spec, self._compile(spec, [choices])[0])
        return self._merges[dtype]

    def _compile(self, spec: AttentionSpec, choices: Sequence[Choices]) -> list[Candidate]:
        answers = self.machine.compile(spec, self.header.target, choices)
        return [self._take(spec, *each) for each in zip(choices, answers, strict=True)]

    def _take(self, spec: AttentionSpec, choices: Choices, answer: Answer) -> Candidate:
        failure = failed(choices, answer, "compile")
        if failure is not None:
            if failure.reason == "interrupted":
                raise GivenUpError
            return Candidate(choices, None, failure.reason, failure.detail)
        path = self.machine.path(spec, choices_key(choices))
        data = path.read_bytes()
        digest = trust.sha256(data)
        self._paths[digest] = path
        return Candidate(choices, Library(file_name(spec, digest), digest, len(data)))

    def _tell(
        self, spec: AttentionSpec, candidates: Sequence[Candidate], count: int, phase: str
    ) -> None:
        failures = sum(each.library is None for each in candidates)
        self.on_status(Status(spec, phase, len(candidates), count, failures))


def _library(spec: AttentionSpec, candidate: Candidate) -> Library:
    if candidate.library is None:
        raise UserError(f"{spec}: the untuned default cannot be compiled: {candidate.detail}")
    return candidate.library


def check_folder(folder: Path) -> None:
    """Refuse to write an export where something else is, or results that nobody has yet.

    Raises
    ------
    UserError
        Saying what to do.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / EXPORT_NAME).is_file():
        raise UserError(f"{folder} is there and is no export; name a folder that is not there yet")
    if (folder / JOURNAL_NAME).exists() or (folder / RESULTS_NAME).exists():
        raise UserError(
            f"{folder} holds results; take them in with tvmpaged tune --import-results "
            f"{shlex.quote(str(folder))}, then remove it or name another folder"
        )
