"""Compiling many artifacts in worker processes: a compiler that crashes takes nobody with it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

from tvmpaged.errors import UserError
from tvmpaged.sm import Resources
from tvmpaged.spec import AttentionSpec, TargetKey

Build = Callable[[AttentionSpec, TargetKey, dict[str, Any], Path], Resources | None]


@dataclass(frozen=True)
class Job:
    """One artifact to compile."""

    spec: AttentionSpec
    target: TargetKey
    choices: dict[str, int | str]


@dataclass(frozen=True)
class Outcome:
    """The library's bytes and what its kernel takes of a GPU, or why there are none."""

    job: Job
    data: bytes = b""
    resources: Resources | None = None
    failure: str = ""


def compile_all(
    jobs: Sequence[Job], num_workers: int, build: Build | None = None
) -> Iterator[Outcome]:
    """Compile jobs in spawned processes; yields each as it is done.

    Parameters
    ----------
    jobs : sequence of Job
        What to compile.
    num_workers : int
        Processes at a time.
    build : callable, optional
        Importable by name; by default `build_in_child`.
    """
    build = build or build_in_child
    for job, future in _submit(jobs, min(num_workers, len(jobs)), build):
        try:
            yield Outcome(job, *future.result())
        except BrokenProcessPool:
            # One job killed its worker, and with it the pool: alone, each shows who it was.
            yield _compile_alone(job, build)
        except Exception as error:  # noqa: BLE001, whatever the compiler raised is the reason
            yield Outcome(job, failure=_reason(error))


def _submit(
    jobs: Sequence[Job], num_workers: int, build: Build
) -> Iterator[tuple[Job, Future[tuple[bytes, Resources | None]]]]:
    if not jobs:
        return
    with _pool(num_workers) as pool:
        futures = {pool.submit(_compile, build, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _compile_alone(job: Job, build: Build) -> Outcome:
    with _pool(1) as pool:
        try:
            return Outcome(job, *pool.submit(_compile, build, job).result())
        except BrokenProcessPool:
            return Outcome(job, failure="the compiler's process died")
        except Exception as error:  # noqa: BLE001, whatever the compiler raised is the reason
            return Outcome(job, failure=_reason(error))


def _reason(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return text if isinstance(error, ValueError | UserError) else f"{type(error).__name__}: {text}"


def _pool(num_workers: int) -> ProcessPoolExecutor:
    # Spawned: TVM's threads do not survive a fork.
    return ProcessPoolExecutor(num_workers, get_context("spawn"), initializer=_start_worker)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it is gone, however it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def build_in_child(
    spec: AttentionSpec,
    target: TargetKey,
    choices: dict[str, Any],
    path: Path,
    *,
    ptx: bool = False,
) -> Resources | None:
    """Compile one spec in a process that is a child and does nothing else.

    Parameters and errors are those of `tvmpaged.build.build_artifact`, which would start one more
    child for each spec of a GPU.
    """
    if target.kind != "cuda":
        from tvmpaged.build import build_artifact

        return build_artifact(spec, target, choices, path)
    from tvmpaged.cuda_child import build_here
    from tvmpaged.nvcc import require_nvcc

    require_nvcc()  # before time goes into the program
    return build_here(spec, target, choices, path, ptx=ptx)


def _compile(build: Build, job: Job) -> tuple[bytes, Resources | None]:
    with tempfile.TemporaryDirectory(prefix="tvmpaged-") as folder:
        path = Path(folder) / "kernel.so"
        resources = build(job.spec, job.target, dict(job.choices), path)
        return path.read_bytes(), resources
