"""What ``tvmpaged tune --export`` and ``--import-results`` do: the device is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tvmpaged import provenance
from tvmpaged.errors import UserError
from tvmpaged.nvcc import require_nvcc
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tune import check_specs, run_log
from tvmpaged.tuning.export import Exported, Exporter, check_folder
from tvmpaged.tuning.import_results import import_spec, read_results
from tvmpaged.tuning.interrupt import GivenUpError, held_back
from tvmpaged.tuning.machine import open_machine
from tvmpaged.tuning.session import share_until
from tvmpaged.tuning.status import Status, Tuned
from tvmpaged.tuning.work import Settings

__all__ = ["Exported", "export", "import_results"]


def export(
    specs: Sequence[AttentionSpec],
    target: TargetKey,
    folder: Path,
    settings: Settings,
    *,
    on_status: Callable[[Status], None] = lambda _status: None,
) -> list[Exported]:
    """Compile candidates for a machine that need not be this one, and write them to a folder.

    Parameters
    ----------
    specs : sequence of AttentionSpec
        Attention kernels with their sizes.
    target : TargetKey
        What to compile for.
    folder : Path
        Appears whole when all is compiled; an earlier export without results is replaced.
    settings : Settings
        How many candidates of each, from which seed, and where the logs are.
    on_status : callable
        Told of each batch.

    Raises
    ------
    ValueError
        When a spec cannot be tuned, or the target cannot be built for.
    UserError
        When the folder is something else, or holds results.
    KeyboardInterrupt
        When a signal came; nothing is written then.
    """
    check_specs(specs)
    check_folder(folder)
    if target.kind == "cuda":
        require_nvcc()
    header = provenance.header(target)
    end = time.monotonic() + (settings.time_limit_s or float("inf"))
    found: list[Exported] = []
    with held_back() as interrupt, open_machine(interrupt, measures=False) as machine:
        exporter = Exporter(header, settings, machine, on_status)
        try:
            machine.start()
            for index, spec in enumerate(specs):
                try:
                    found.append(exporter.add(spec, share_until(end, len(specs) - index)))
                except UserError as error:
                    found.append(Exported(spec, failure=str(error)))
            if any(not each.failure for each in found) and not interrupt():
                exporter.write(folder)
        except GivenUpError:
            pass  # the signal is raised again where it was held back
    return found


def import_results(
    folder: Path,
    settings: Settings,
    *,
    on_status: Callable[[Status], None] = lambda _status: None,
    on_warning: Callable[[str], None] = lambda _message: None,
) -> list[Tuned]:
    """Take the results that ``tvmpaged measure`` left in an export into logs and records.

    Parameters
    ----------
    folder : Path
        The export, back from the device.
    settings : Settings
        Where logs, records and runs go.
    on_status : callable
        Told how far each spec is.
    on_warning : callable
        Told what the user should know.

    Raises
    ------
    UserError
        When anything in the folder is missing, stale, or not to be believed; nothing is written.
    ValueError
        When the tracking server's address cannot be used.
    """
    source, results = read_results(folder)
    specs = [each.spec for each in source.export.specs]
    check_specs(specs)
    target = source.export.header.target
    trials = max(len(each.candidates) for each in source.export.specs)
    settings = replace(settings, trials=trials, seed=source.export.seed)
    runs = run_log(specs, target, settings, on_warning)
    found: list[Tuned] = []
    status = "FAILED"
    try:
        if runs is not None:
            runs.connect()
        for exported in source.export.specs:
            try:
                record = import_spec(exported, source, results, settings.work_dir, runs, on_status)
                found.append(Tuned(exported.spec, record))
            except UserError as error:
                found.append(Tuned(exported.spec, failure=str(error)))
        status = "FINISHED"
    finally:
        if runs is not None:
            runs.close(status)
    return found
