"""Taking results of another machine into the logs and records here, as far as they are credible.

Nothing of what came back is run: it is plain data, played through the code that measures. A record
gets its device, its times and its winner from there; what it is compiled from is chosen here.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tvmpaged import records
from tvmpaged.bundle import BundleError, trust
from tvmpaged.errors import UserError
from tvmpaged.records import Record
from tvmpaged.sources import source_sha256
from tvmpaged.tuning.doubt import check_answers
from tvmpaged.tuning.export_manifest import (
    RESULTS_NAME,
    ExportedSpec,
    ExportFolder,
    read_export,
)
from tvmpaged.tuning.exported import ExportedMachine, Tape, try_all
from tvmpaged.tuning.log import open_log
from tvmpaged.tuning.mlflow_log import RunLog
from tvmpaged.tuning.outcome import make_record
from tvmpaged.tuning.results import Results, decode
from tvmpaged.tuning.session import Session
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.starts import credible, default_start, why_not_tried
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.summary import write_summary
from tvmpaged.tuning.tracked import Tracked
from tvmpaged.tuning.trial import Trial, choices_key


def read_results(folder: Path) -> tuple[ExportFolder, Results]:
    """Return an export and what came of measuring it, all of it checked.

    Raises
    ------
    UserError
        Naming what is missing, stale or not to be believed, and what to do.
    """
    source = read_export(folder)
    path = folder / RESULTS_NAME
    if not path.exists():
        raise UserError(
            f"{path} is not there: run tvmpaged measure {shlex.quote(str(folder))} on the device, "
            "to its end, and bring the folder back"
        )
    if source.export.source_sha256 != source_sha256(source.export.header.target.kind):
        raise UserError(
            f"{folder} was exported from other kernel sources than are here, so its choices may "
            "mean something else: check out those sources, or export and measure again"
        )
    for exported in source.export.specs:
        _check_choices(source, exported)
    with trust.open_folder(folder) as folder_fd:
        data = trust.read_file(folder_fd, RESULTS_NAME, path)
    try:
        results = decode(data)
        check_answers(results, source.export)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from error
    if results.export_sha256 != source.sha256:
        raise UserError(f"{path} is of another export (its sha256 is {results.export_sha256})")
    return source, results


def _check_choices(source: ExportFolder, exported: ExportedSpec) -> None:
    """Refuse choices that this tvmpaged would not have exported: a record is compiled from them."""
    spec, target = exported.spec, source.export.header.target
    try:
        default = default_start(spec, target)
        reasons = [
            f"{each.key}: {reason}"
            for each in exported.candidates
            if (reason := why_not_tried(spec, target, each.choices)) is not None
        ]
    except ValueError as error:
        raise UserError(f"{source.path}: {spec}: {error}") from error
    if reasons:
        raise UserError(f"{source.path}: {spec}: candidate {reasons[0]}")
    if exported.candidates[0].choices != default:
        raise UserError(f"{source.path}: {spec}: its first candidate is not the untuned default")


def import_spec(
    exported: ExportedSpec,
    source: ExportFolder,
    results: Results,
    work_dir: Path,
    runs: RunLog | None = None,
    on_status: Callable[[Status], None] = lambda _status: None,
) -> Record:
    """Take one spec's results into the log of the device they are of, and write its record.

    Parameters
    ----------
    exported : ExportedSpec
        The spec's part of the export.
    source, results
        From `read_results`.
    work_dir : Path
        Where ``<target>/<spec>/`` lie.
    runs : RunLog, optional
        Where it is logged.
    on_status : callable
        Told how far it is.

    Raises
    ------
    UserError
        When the results do not say who won, or another process writes the log.
    """
    spec, export = exported.spec, source.export
    built = export.header.built_with
    setting = Setting.of(
        results.device, export.source_sha256, built.tvm, built.tvm_ffi, exported.workload
    )
    folder = records.folder(work_dir, export.header.target, spec)
    with tempfile.TemporaryDirectory(prefix="tvmpaged-import-") as empty:
        machine = ExportedMachine(
            source, Tape(results.answers), Path(empty), results.device.num_threads
        )
        session, result, roof = try_all(
            exported, machine, rotation_bytes=setting.rotation_bytes, on_status=on_status
        )
    with open_log(folder) as log:
        tried = credible(spec, export.header.target, log.earlier(setting).trials)
        known = {each.key: each for each in tried}
        new = [each for each in _comparable(session, known) if each.key not in known]
        run = None
        if runs is not None:
            run = runs.start_spec(spec, export.header.target, setting, export.seed)
        log.start(setting, export.seed, None, resumed=bool(known))
        log.roof(roof)
        tracked = Tracked(log, runs, run, None)
        tracked.append(list(known.values()), new, lambda us: exported.workload.rate(spec, us))
        session.trials = known | {each.key: each for each in new}
        if runs is not None:
            runs.settle()  # no search went by meanwhile, and the record is to name its run
        record = make_record(
            session, setting, result, export.seed, tracked.run_id(), roof, results.gpu
        )
        files = [records.save(work_dir, record)]
        files += [write_summary(folder, record, list(session.trials.values()))]
        tracked.finish(record, files)
    return record


def _comparable(session: Session, known: dict[str, Trial]) -> list[Trial]:
    """Return a session's trials, their times given by the default's time as the log has it.

    Each time was taken in turns with the default, so its ratio is what counts; as in a search that
    goes on, times that were taken days apart then compare.
    """
    mine, first = session.default_trial(), known.get(choices_key(session.default))
    if mine is None or first is None or mine.latency_us is None or first.latency_us is None:
        return list(session.trials.values())
    factor = first.median_us / mine.median_us
    return [
        each
        if each.latency_us is None
        else replace(each, latency_us=each.latency_us.scaled(factor), scale=each.scale * factor)
        for each in session.trials.values()
    ]
