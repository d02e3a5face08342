"""The door to compiled code: finds artifacts in bundles and loads them, without a compiler.

The only file of the runtime that touches ``tvm_ffi`` and ``libtvm_runtime.so``. It knows nothing of
requests; it hands out functions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tvmpaged import tvm_libs
from tvmpaged.bundle import Artifact, Found, find, host_for
from tvmpaged.cpu import num_threads
from tvmpaged.runtime.place import Place, place_of
from tvmpaged.spec import AttentionSpec, TargetKey

#: Turns of its loop that an idle thread of TVM's pool spins before it sleeps: enough to bridge the
#: time between two layers, bounded so that torch's threads get the cores back.
SPIN_COUNT = "20000"

#: What kinds of kernels there are, best first.
KINDS = ("tuned", "default", "compiled", "generic", "reference")

#: Set to 1, what no bundle has is compiled when it is first asked for.
COMPILE_VARIABLE = "TVMPAGED_COMPILE_ON_MISS"
#: Set to 1, each call of a GPU's kernel is a range that names its spec for a profiler.
NVTX_VARIABLE = "TVMPAGED_NVTX"


@dataclass(frozen=True)
class Kernel:
    """A function that takes the arguments of its program, and where it came from.

    Parameters
    ----------
    call : callable
        Tensors in, nothing out; see the program's docstring in `tvmpaged.kernels`.
    spec : AttentionSpec
        What was asked for (the artifact may be the generic one behind it).
    choices : dict
        The artifact's choices.
    description : dict
        Plain data for `PagedAttention.describe`.
    """

    call: Callable[..., Any]
    spec: AttentionSpec
    choices: dict[str, int | str]
    description: dict[str, Any]

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return str(self.description["kind"])


def load_kernel(
    spec: AttentionSpec,
    bundle: str | None = None,
    strict: bool = False,
    place: Place | None = None,
) -> Kernel:
    """Find and load the artifact that serves a spec on a device of this machine.

    Parameters
    ----------
    spec : AttentionSpec
        What is to be computed.
    bundle : str, optional
        A bundle to look in first.
    strict : bool
        Take only an artifact specialised for exactly this spec and this machine.
    place : Place, optional
        The device; by default the CPU.

    With ``TVMPAGED_COMPILE_ON_MISS=1`` in the environment, and the compiler installed, what no
    bundle has is compiled in a child process into the user's cache.

    Raises
    ------
    FileNotFoundError
        When none can serve; lists every candidate and why it was rejected.
    """
    place = place or place_of()
    host = host_for(place.target)
    compiled = False
    try:
        found = find(spec, host, bundle, strict)
    except FileNotFoundError as miss:
        if os.environ.get(COMPILE_VARIABLE) != "1":
            raise
        _compile(spec, place.target, miss)
        compiled = True
        found = find(spec, host, bundle, strict)
    artifact = found.accepted.artifact
    return Kernel(
        call=_load(found, artifact.sha256, place),
        spec=spec,
        choices=dict(artifact.choices),
        description=_describe(found, artifact, place.target, compiled),
    )


def rank_of(
    spec: AttentionSpec,
    bundle: str | None = None,
    strict: bool = False,
    place: Place | None = None,
) -> tuple[int, int, int] | None:
    """Return how good the artifact is that `load_kernel` would take (less is better).

    None where there is none; nothing is compiled or loaded.
    """
    try:
        host = host_for((place or place_of()).target)
        return find(spec, host, bundle, strict).accepted.rank
    except FileNotFoundError:
        return None


def _compile(spec: AttentionSpec, target: TargetKey, miss: FileNotFoundError) -> None:
    """Compile a spec into the user's cache, in a process of its own.

    Raises
    ------
    FileNotFoundError
        When it cannot be compiled: what was missing, and what the compiler said.
    """
    command = [sys.executable, "-m", "tvmpaged", "package", "--target", str(target)]
    done = subprocess.run(
        [*command, "--spec", str(spec), "--install"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FileNotFoundError(
            f"{miss}\n{COMPILE_VARIABLE}=1, but compiling it failed:\n{done.stderr.strip()}"
        ) from miss


def _describe(found: Found, artifact: Artifact, here: TargetKey, compiled: bool) -> dict[str, Any]:
    return {
        "kind": "compiled" if compiled else found.accepted.kind,
        "target": str(found.accepted.target),
        "artifact": str(found.accepted.path),
        "sha256": artifact.sha256,
        "choices": dict(artifact.choices),
        "record": artifact.record_id,
        "mlflow_run": artifact.mlflow_run_id,
        "measured_us": artifact.measured_us,
        "measured_on": artifact.measured_on,
        "state": artifact.state(here),
        "why": found.accepted.why,
    }


_LOADED: dict[str, Callable[..., Any]] = {}


def _load(found: Found, sha256: str, place: Place) -> Callable[..., Any]:
    """Load an artifact once per process: same bytes, same function."""
    if sha256 not in _LOADED:
        _load_runtime(place.device.type)
        import tvm_ffi

        with found.open() as path:
            module = tvm_ffi.load_module(str(path))
        artifact = found.accepted.artifact
        call = module.get_function(artifact.symbol)
        if place.is_gpu:
            _LOADED[sha256] = on_gpu(call, f"tvmpaged {artifact.spec}")
        else:
            _LOADED[sha256] = _refuse_after_fork(call)
    return _LOADED[sha256]


def on_gpu(call: Callable[..., Any], name: str, cuda: Any = torch.cuda) -> Callable[..., Any]:
    """Return a GPU's function so that it leaves no trace in torch, and profilers see its name.

    tvm_ffi lets kernels run on torch's current stream of their tensors' GPU. TVM makes that GPU the
    current one and leaves it so; torch's callers expect theirs back.

    Parameters
    ----------
    call : callable
        Of the artifact.
    name : str
        Of its range for NVIDIA's profilers, under ``TVMPAGED_NVTX=1``.
    cuda : module
        ``torch.cuda``, or what stands in for it where there is no GPU.
    """

    def keep_device(*arguments: Any) -> None:
        with cuda.device(cuda.current_device()):
            call(*arguments)

    def in_range(*arguments: Any) -> None:
        cuda.nvtx.range_push(name)
        try:
            inner(*arguments)
        finally:
            cuda.nvtx.range_pop()

    inner = keep_device if cuda.device_count() > 1 else call
    return in_range if os.environ.get(NVTX_VARIABLE) == "1" else inner


@dataclass
class _Threads:
    """Whether kernels have run in this process, and whether it was forked off one where they had.

    TVM's threads do not survive a fork: a call in the child would wait for them forever.
    """

    are_started: bool = False
    are_lost: bool = False

    def note_fork(self) -> None:
        """Take note, in a forked child, of what the parent had done."""
        self.are_lost = self.are_started and os.environ["TVM_NUM_THREADS"] != "1"


_THREADS = _Threads()


def _refuse_after_fork(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> None:
        if _THREADS.are_lost:
            raise RuntimeError(
                "kernels ran before this process was forked, and their threads do not survive "
                "that; start processes with multiprocessing's 'spawn' or 'forkserver', or fork "
                "before the first call"
            )
        _THREADS.are_started = True
        function(*arguments)

    return call


def argument_of(tensor: torch.Tensor) -> Any:
    """Return what kernels take of a tensor that is passed many times, converted once.

    It holds the tensor's memory. A GPU's tensor stays torch's own: by it tvm_ffi finds the stream.
    """
    import tvm_ffi

    return tvm_ffi.from_dlpack(tensor) if tensor.device.type == "cpu" else tensor


@cache
def _load_runtime(kind: str) -> None:
    """Make TVM's runtime functions (its thread pool above all) available to a kind's artifacts."""
    # The pool reads these when it first runs. Unless told, it takes half of the cores and pins the
    # calling thread, with all that torch does there, to one of them.
    os.environ["TVM_NUM_THREADS"] = str(num_threads())
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", SPIN_COUNT)
    os.register_at_fork(after_in_child=_THREADS.note_fork)
    import tvm_ffi  # noqa: F401, the libraries link to it

    tvm_libs.load(kind)
