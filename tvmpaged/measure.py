"""What ``tvmpaged measure`` does: try an export's candidates here, and write down what came of it.

It needs the device, torch, tvm_ffi and libtvm_runtime.so, and no compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tvmpaged.bundle import Host, host_for, utc_now
from tvmpaged.bundle.resolve import unusable
from tvmpaged.bundle.search import installed_version
from tvmpaged.cpu import native_target
from tvmpaged.errors import UserError
from tvmpaged.files import replace_file
from tvmpaged.gpu import target_of
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.device import Device, Watch, find_gpus
from tvmpaged.tuning.export_manifest import (
    JOURNAL_NAME,
    RESULTS_NAME,
    ExportFolder,
    read_export,
)
from tvmpaged.tuning.exported import ExportedMachine, open_journal, try_all
from tvmpaged.tuning.finalists import MAX_SECONDS_EACH, NUM_FINALISTS, Result
from tvmpaged.tuning.interrupt import GivenUpError, held_back
from tvmpaged.tuning.log import locked
from tvmpaged.tuning.machine import measuring_processes
from tvmpaged.tuning.results import Results, encode
from tvmpaged.tuning.scratch import scratch_folder
from tvmpaged.tuning.session import Session, share_until
from tvmpaged.tuning.status import Status

SCHEMA_VERSION = 1
#: Of a spec's share of the time, kept back for the finalists at most.
FINISH_SHARE = 0.35


@dataclass(frozen=True)
class SpecMeasured:
    """What became of one spec.

    Parameters
    ----------
    spec : AttentionSpec
        Which.
    trials : int
        Candidates of which something is known now, failures included.
    failures : dict
        Reason -> how many.
    result : Result or None
        Who won.
    failure : str
        Why nobody did.
    """

    spec: AttentionSpec
    trials: int = 0
    failures: dict[str, int] | None = None
    result: Result | None = None
    failure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        won = self.result
        return {
            "spec": str(self.spec),
            "trials": self.trials,
            "failures": self.failures or {},
            "failure": self.failure or None,
            "winner": None
            if won is None
            else {
                "choices": won.choices,
                "is_default": won.is_default,
                "latency_us": asdict(won.latency_us),
                "default_latency_us": asdict(won.default_latency_us),
                "speedup": won.speedup,
            },
        }


@dataclass(frozen=True)
class Measurement:
    """What came of an export.

    Parameters
    ----------
    path : Path
        The results, ready to be taken home.
    device : Device
        What they hold for.
    specs : list of SpecMeasured
        In the export's order.
    """

    path: Path
    device: Device
    specs: list[SpecMeasured]


def measure(
    folder: Path,
    *,
    resume: bool = True,
    time_limit_s: float | None = None,
    devices: Sequence[str] = (),
    allow_busy: bool = False,
    on_status: Callable[[Status], None] = lambda _status: None,
    host: Host | None = None,
) -> Measurement:
    """Check and time an export's candidates on this machine, and write the results beside them.

    Parameters
    ----------
    folder : Path
        From ``tvmpaged tune --export``.
    resume : bool
        Go on where an earlier run under the same circumstances stopped.
    time_limit_s : float, optional
        Of the whole call, in seconds; results are written all the same.
    devices : sequence of str
        GPUs that measure side by side, such as ``cuda:0``, or ``all`` of the export's target; by
        default the first.
    allow_busy : bool
        Whether to measure on a GPU that others compute on.
    on_status : callable
        Told of each batch.
    host : Host, optional
        The machine; by default this one, for a GPU's export the first GPU.

    Raises
    ------
    UserError
        When the folder is no export, was changed, is for another machine, or is being measured by
        another process; or when others compute on the GPU.
    ValueError
        When a device is not there, or not of the export's kind.
    KeyboardInterrupt
        When a signal came; what was measured is not lost.
    """
    end = time.monotonic() + (time_limit_s or float("inf"))
    source = read_export(folder)
    target = source.export.header.target
    gpus = find_gpus(target, devices)
    _check_target(source, host or host_for(target_of(gpus[0]) if gpus else native_target()))
    watch = Watch(gpus, allow_busy=allow_busy)
    for library in source.export.libraries():
        source.read(library)  # before anything is run, all of it is what was exported
    results = Results(
        export_sha256=source.sha256,
        device=Device.here(target, gpus),
        measured_with={
            name: installed_version(name) for name in ("tvmpaged", "apache-tvm-ffi", "torch")
        },
    )
    with locked(folder), held_back() as interrupt:
        journal = folder / JOURNAL_NAME
        if not resume:
            journal.unlink(missing_ok=True)
        tape = open_journal(journal, results, source.export)
        with scratch_folder() as private:
            machine = ExportedMachine(
                source,
                tape,
                private,
                results.device.num_threads,
                measuring_processes(gpus),
                interrupt,
            )
            specs: list[SpecMeasured] = []
            state = None
            # A signal is raised again where it was held back; the journal has all answers.
            with suppress(GivenUpError):
                try:
                    machine.start()
                    specs += _measure_all(source, machine, results.device, end, on_status)
                    state = watch.state()
                finally:
                    machine.close()
        if not interrupt():
            results = replace(results, created_at=utc_now(), answers=tape.answers, gpu=state)
            replace_file(folder / RESULTS_NAME, encode(results))
    return Measurement(folder / RESULTS_NAME, results.device, specs)


def _check_target(source: ExportFolder, host: Host) -> None:
    header = source.export.header
    why = unusable(header, host)
    if why:
        raise UserError(f"{source.path} is exported for {header.target} and cannot run here: {why}")


def _measure_all(
    source: ExportFolder,
    machine: ExportedMachine,
    device: Device,
    end: float,
    on_status: Callable[[Status], None],
) -> list[SpecMeasured]:
    found = []
    for index, exported in enumerate(source.export.specs):
        until = share_until(end, len(source.export.specs) - index)
        kept = MAX_SECONDS_EACH * (NUM_FINALISTS + 1)
        share = FINISH_SHARE * (until - time.monotonic())
        try:
            session, result, _ = try_all(
                exported,
                machine,
                rotation_bytes=device.rotation_bytes,
                deadline=until - min(kept, share),
                on_status=on_status,
            )
            found.append(_measured(session, result))
        except (UserError, ValueError) as error:
            found.append(SpecMeasured(exported.spec, failure=str(error)))
    return found


def _measured(session: Session, result: Result) -> SpecMeasured:
    return SpecMeasured(session.task.spec, len(session.trials), session.failures(), result)
