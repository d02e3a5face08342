"""One spec from the command to its record: log, search, finalists, record, runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tvmpaged import records, schedules
from tvmpaged.errors import UserError
from tvmpaged.records import Record
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.device import Device, Watch
from tvmpaged.tuning.finalists import decide
from tvmpaged.tuning.interrupt import GivenUpError
from tvmpaged.tuning.log import TrialLog, open_log
from tvmpaged.tuning.machine import Machine, failed
from tvmpaged.tuning.mlflow_log import RunLog
from tvmpaged.tuning.model_session import ModelSession
from tvmpaged.tuning.outcome import make_record
from tvmpaged.tuning.session import Session
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.starts import (
    credible,
    default_start,
    may_be_tried,
    neighbours,
    spec_seed,
)
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.summary import write_summary
from tvmpaged.tuning.task import Task
from tvmpaged.tuning.tracked import Tracked
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.workload import DEFAULT_NUM_KV_HEADS, Workload


@dataclass(frozen=True)
class Settings:
    """How to tune.

    Parameters
    ----------
    trials : int
        Candidates per spec.
    time_limit_s : float or None
        Of the whole call, in seconds; results are written all the same.
    work_dir : Path
        Where ``<target>/<spec>/`` lie.
    seed : int
        Of proposals and inputs.
    resume : bool
        Go on from the logs.
    num_kv_heads : mapping
        Spec -> K/V heads of its workload; others take `DEFAULT_NUM_KV_HEADS`.
    mlflow_uri : str or None
        Tracking server; None takes MLFLOW_TRACKING_URI or the default.
    use_mlflow : bool
        Whether runs are logged.
    devices : tuple of str
        GPUs that measure side by side, such as ``cuda:0``, or ``all`` of the target; by default the
        first, or the CPU.
    allow_busy : bool
        Whether to measure on a GPU that others compute on.
    """

    trials: int = 64
    time_limit_s: float | None = None
    work_dir: Path = Path("tuning_logs")
    seed: int = 0
    resume: bool = False
    num_kv_heads: Mapping[AttentionSpec, int] | None = None
    mlflow_uri: str | None = None
    use_mlflow: bool = True
    devices: tuple[str, ...] = ()
    allow_busy: bool = False

    def workload(self, spec: AttentionSpec, kind: str) -> Workload:
        """Return what a spec is measured on, on a kind of device."""
        heads = (self.num_kv_heads or {}).get(spec, DEFAULT_NUM_KV_HEADS)
        return Workload.representative(spec, heads, kind)


@dataclass
class Work:
    """One spec's part of a call.

    Parameters
    ----------
    spec, target, settings
        What to do.
    machine : Machine
        What does it.
    deadline : float
        Of `time.monotonic`, for the search.
    runs : RunLog or None
        Where it is logged.
    on_status : callable
        Told of each batch.
    watch : Watch
        The GPUs that are measured on.
    on_warning : callable
        Told what a user should know.
    """

    spec: AttentionSpec
    target: TargetKey
    settings: Settings
    machine: Machine
    deadline: float
    runs: RunLog | None
    on_status: Callable[[Status], None]
    watch: Watch = field(default_factory=Watch)
    on_warning: Callable[[str], None] = lambda _message: None

    def run(self) -> Record:
        """Search, decide, and write the record.

        Raises
        ------
        GivenUpError
            When a signal came; the log holds all finished trials.
        UserError
            When another process writes the log, or the default cannot be measured.
        """
        device = Device.here(self.target, self.watch.gpus)
        workload = self.settings.workload(self.spec, self.target.kind)
        setting = Setting.here(workload, self.target, device)
        folder = records.folder(self.settings.work_dir, self.target, self.spec)
        with open_log(folder) as log:
            session, tracked = self._start(log, setting)
            log.roof(session.task.measure_roof())
            try:
                self._search(session, tracked)
                self._tell(session, "finalists")
                trials = list(session.trials.values())
                result = decide(session.task, session.default, trials, self._champion())
            except GivenUpError:
                tracked.give_up()
                raise
            run_id = tracked.run_id()
            roof = session.task.measure_roof(beside=result.choices)
            log.roof(roof)
            record = make_record(
                session, setting, result, self.settings.seed, run_id, roof, self.watch.state()
            )
            files = [records.save(self.settings.work_dir, record)]
            files += [write_summary(folder, record, list(session.trials.values()))]
            files += self._explain(record) if self.runs is not None else []
            tracked.finish(record, files)
            self.on_status(session.done(result, roof))
            if record.latency_us.is_doubtful:
                self.on_warning(
                    f"{self.spec}: the machine was busy: {record.latency_us.disturbed} rounds of "
                    "the finalists were disturbed, so the winner may be none; when it is quiet, "
                    "the same command with --resume times them again"
                )
            return record

    def _champion(self) -> Choices | None:
        """Return what the record that stands names, if a search may try it."""
        try:
            record = records.load(self.settings.work_dir, self.target, self.spec)
        except ValueError:
            return None
        if record is None or not may_be_tried(self.spec, self.target, record.choices):
            return None
        return {name: record.choices[name] for name in default_start(self.spec, self.target)}

    def _start(self, log: TrialLog, setting: Setting) -> tuple[Session, Tracked]:
        seed = spec_seed(self.settings.seed, self.spec)
        task = Task(
            machine=self.machine,
            spec=self.spec,
            target=self.target,
            workload=setting.workload,
            merge=self._compile_merge(),
            default=default_start(self.spec, self.target),
            rotation_bytes=setting.rotation_bytes,
            seed=seed,
        )
        known: list[Trial] = []
        earlier = log.earlier(setting) if self.settings.resume else None
        if self.settings.resume and (earlier is None or not earlier.trials):
            self.on_warning(
                f"{self.spec}: nothing to resume in {log.path.parent}: no trials of this workload, "
                "device, number of threads and kernel sources; it starts anew"
            )
        tried = credible(self.spec, self.target, earlier.trials) if earlier is not None else []
        if earlier is not None and earlier.seed == self.settings.seed:
            # The same path again: what was measured on it is answered from the log.
            task.answers = {each.key: each for each in tried}
        elif earlier is not None:
            known = tried
            default = choices_key(task.default)
            task.answers = {each.key: each for each in known if each.key == default}
        run_id = earlier.mlflow_run_id if earlier is not None else None
        run = None
        if self.runs is not None:
            run = self.runs.start_spec(
                self.spec,
                self.target,
                setting,
                self.settings.seed,
                earlier=run_id,
                # We hold the log's lock: nobody else writes the runs that it names.
                orphans=log.run_ids() if self.settings.resume else None,
            )
        log.start(setting, self.settings.seed, run_id, resumed=self.settings.resume)
        session = ModelSession(
            task=task,
            seed=seed,
            num_trials=self.settings.trials,
            deadline=self.deadline,
            starts=[task.default, *neighbours(self.spec, self.target, self.settings.work_dir)],
            known=known,
        )
        return session, Tracked(log, self.runs, run, run_id)

    def _search(self, session: Session, tracked: Tracked) -> None:
        logged = {each.key: each for each in session.known} | session.task.answers

        def on_batch(batch: list[Trial]) -> None:
            before = list(logged.values())
            new = [each for each in batch if each.key not in logged]
            logged.update({each.key: each for each in new})
            tracked.append(before, new, lambda us: session.task.workload.rate(self.spec, us))
            if batch:
                self._tell(session, "search")

        session.on_batch = on_batch
        self._tell(session, "start")
        session.search()
        if self.machine.interrupted():
            raise GivenUpError
        # Trials of the log that this search did not come to are as good as any.
        for each in session.task.answers.values():
            session.trials.setdefault(each.key, each)

    def _compile_merge(self) -> Path:
        """Compile the kernel that folds a split sequence's parts: its time counts."""
        spec = AttentionSpec.make("merge", self.spec.out_dtype)
        choices = schedules.default_choices(spec, self.target)
        path = self.machine.path(spec, choices_key(choices))
        if not path.exists():
            (answer,) = self.machine.compile(spec, self.target, [choices])
            failure = failed(choices, answer, "compile")
            if failure is not None:
                if failure.reason == "interrupted":
                    raise GivenUpError
                raise UserError(f"{spec} cannot be compiled: {failure.detail}")
        return path

    def _explain(self, record: Record) -> list[Path]:
        """Write the winner's program and assembly or CUDA source; return the files."""
        path = self.machine.path(self.spec, "winner")
        request = {
            "spec": str(self.spec),
            "target": str(self.target),
            "choices": record.choices,
            "path": str(path),
            "explain": True,
        }
        answer = self.machine.compilers[0].ask(request, 120.0, self.machine.interrupted)
        return [Path(each) for each in answer.reply.get("files", [])]

    def _tell(self, session: Session, phase: str) -> None:
        self.on_status(session.status(phase))
