"""What ``tvmpaged tune`` does: search the choices of specs on this machine, and write records."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence

from tvmpaged import records, schedules
from tvmpaged.cpu import native_target
from tvmpaged.errors import UserError
from tvmpaged.gpu import find_gpu, target_of
from tvmpaged.nvcc import require_nvcc
from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec, TargetKey
from tvmpaged.tuning.device import ALL, Device, Watch, find_gpus
from tvmpaged.tuning.interrupt import GivenUpError, held_back
from tvmpaged.tuning.log import LOG_NAME, read_runs
from tvmpaged.tuning.machine import open_machine
from tvmpaged.tuning.mlflow_log import RunLog
from tvmpaged.tuning.setting import Setting
from tvmpaged.tuning.status import Estimate, Status, Tuned
from tvmpaged.tuning.tracking import tracking_uri
from tvmpaged.tuning.work import Settings, Work

__all__ = ["Estimate", "Settings", "Status", "Tuned", "estimate", "parse_target", "tune"]

SCHEMA_VERSION = 1

#: Time kept back for the finalists: so much, and what the workers' start took (which tells how busy
#: the machine is), but no more than this share of a spec's time.
FINISH_SECONDS, FINISH_SHARE = 10.0, 0.35
#: What a plan says a trial takes: to compile on one core, to check and measure, and to start up.
COMPILE_SECONDS, MEASURE_SECONDS, START_SECONDS = 1.2, 0.5, 15.0


def check_specs(specs: Sequence[AttentionSpec]) -> None:
    """Refuse what cannot be tuned.

    Raises
    ------
    ValueError
        Naming the spec.
    """
    for spec in specs:
        if spec.kernel not in ATTENTION_KERNELS or spec.is_generic:
            raise ValueError(
                f"spec={spec} cannot be tuned; allowed: decode and prefill with all sizes named"
            )


def parse_target(text: str, devices: Sequence[str] = ()) -> TargetKey:
    """Return the target to tune for, which must be this machine's CPU or one of its GPUs.

    Parameters
    ----------
    text : str
        ``native`` is the CPU, ``cuda`` the first of the devices.
    devices : sequence of str
        GPUs that measure, such as ``cuda:0``, or ``all`` of one kind; by default the first.

    Raises
    ------
    ValueError
        When it is another one: candidates are measured here.
    """
    native = native_target()
    if text == "cuda":
        first = devices[0] if devices and ALL not in devices else "cuda"
        target = target_of(find_gpu(first))
    else:
        target = native if text == "native" else TargetKey.parse(text)
    find_gpus(target, devices)
    if target.kind == "cpu" and target != native:
        raise ValueError(
            f"target={target} is not this machine, which is {native}; candidates are measured here"
        )
    return target


def estimate(
    specs: Sequence[AttentionSpec], target: TargetKey, settings: Settings
) -> list[Estimate]:
    """Return what `tune` would do, without doing it.

    Raises
    ------
    ValueError
        When a spec cannot be tuned, or the tracking server's address cannot be used.
    """
    check_specs(specs)
    if settings.use_mlflow:
        tracking_uri(settings.mlflow_uri)
    found = []
    cores = len(os.sched_getaffinity(0))
    device = Device.here(target, find_gpus(target, settings.devices))
    for spec in specs:
        workload = settings.workload(spec, target.kind)
        known = 0
        if settings.resume:
            log = records.folder(settings.work_dir, target, spec) / LOG_NAME
            known = len(read_runs(log, Setting.here(workload, target, device).key).trials)
        new = max(0, settings.trials - known)
        seconds = START_SECONDS + new * (COMPILE_SECONDS / cores + MEASURE_SECONDS)
        if settings.time_limit_s is not None:
            seconds = min(seconds, settings.time_limit_s / len(specs))
        space = schedules.space(spec, target)
        found.append(
            Estimate(
                spec=str(spec),
                num_kv_heads=workload.num_kv_heads,
                combinations=math.prod(len(values) for values in space.values()),
                trials=settings.trials,
                known_trials=min(known, settings.trials),
                seconds=seconds,
            )
        )
    return found


def tune(
    specs: Sequence[AttentionSpec],
    target: TargetKey,
    settings: Settings,
    *,
    on_status: Callable[[Status], None] = lambda _status: None,
    on_result: Callable[[Tuned], None] = lambda _result: None,
    on_warning: Callable[[str], None] = lambda _message: None,
) -> list[Tuned]:
    """Search each spec's choices and write its record.

    Parameters
    ----------
    specs : sequence of AttentionSpec
        Attention kernels with their sizes.
    target : TargetKey
        This machine.
    settings : Settings
        How.
    on_status : callable
        Told of each batch.
    on_result : callable
        Told of each spec that is done: what is returned, also to whom a signal takes that from.
    on_warning : callable
        Told what the user should know; the search goes on.

    Raises
    ------
    ValueError
        When a spec cannot be tuned, or the tracking server's address cannot be used.
    UserError
        When others compute on a GPU that is to measure.
    KeyboardInterrupt
        When a signal came; all finished trials are in the logs.
    """
    check_specs(specs)
    gpus = find_gpus(target, settings.devices)
    if target.kind == "cuda":
        require_nvcc()
    watch = Watch(gpus, allow_busy=settings.allow_busy)
    begin = time.monotonic()
    end = begin + (settings.time_limit_s or float("inf"))
    runs = run_log(specs, target, settings, on_warning)
    results: list[Tuned] = []
    with held_back() as interrupt, open_machine(interrupt, gpus=gpus) as machine:
        if runs is not None:
            runs.connect()
        machine.start()
        finish = FINISH_SECONDS + time.monotonic() - begin
        status = "FAILED"
        try:
            for index, spec in enumerate(specs):
                now = time.monotonic()
                share = (end - now) / (len(specs) - index)
                deadline = now + share - min(FINISH_SHARE * share, finish)
                if interrupt():
                    raise GivenUpError
                work = Work(
                    spec, target, settings, machine, deadline, runs, on_status, watch, on_warning
                )
                try:
                    results.append(Tuned(spec, work.run()))
                except (UserError, ValueError) as error:
                    results.append(Tuned(spec, failure=str(error)))
                on_result(results[-1])
            status = "FINISHED"
        except GivenUpError:
            status = "KILLED"  # the signal is raised again where it was held back
        finally:
            if runs is not None:
                runs.close(status)
    return results


def run_log(
    specs: Sequence[AttentionSpec],
    target: TargetKey,
    settings: Settings,
    on_warning: Callable[[str], None],
) -> RunLog | None:
    """Return where a command's runs are logged, or None when they are not to be."""
    if not settings.use_mlflow:
        return None
    params = {
        "target": str(target),
        "specs": " ".join(map(str, specs)),
        "trials": settings.trials,
        "time_limit_s": settings.time_limit_s,
        "seed": settings.seed,
        "resume": settings.resume,
    }
    return RunLog(tracking_uri(settings.mlflow_uri), on_warning, params)
