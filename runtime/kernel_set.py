"""The door to compiled code: finds artifacts in bundles and loads them, without a compiler.

The only file of the runtime that touches ``tvm_ffi`` and ``libtvm_runtime.so``. It knows nothing of
requests; it hands out functions.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tvmpaged import tvm_libs
from tvmpaged.bundle import Artifact, Found, find, host_for
from tvmpaged.cpu import native_target, num_threads
from tvmpaged.spec import AttentionSpec

#: Turns of its loop that an idle thread of TVM's pool spins before it sleeps. TVM's own default
#: (300,000) keeps torch's threads off the cores for longer than a step of a small model takes.
SPIN_COUNT = "20000"


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
        """``tuned``, ``default``, ``generic`` or ``reference``."""
        return str(self.description["kind"])


def load_kernel(spec: AttentionSpec, bundle: str | None = None, strict: bool = False) -> Kernel:
    """Find and load the artifact that serves a spec on this machine's CPU.

    Parameters
    ----------
    spec : AttentionSpec
        What is to be computed.
    bundle : str, optional
        A bundle to look in first.
    strict : bool
        Take only an artifact specialised for exactly this spec and this machine.

    Raises
    ------
    FileNotFoundError
        When none can serve; lists every candidate and why it was rejected.
    """
    found = find(spec, host_for(native_target()), bundle, strict)
    artifact = found.accepted.artifact
    return Kernel(
        call=_load(found, artifact.sha256),
        spec=spec,
        choices=dict(artifact.choices),
        description=_describe(found, artifact),
    )


def _describe(found: Found, artifact: Artifact) -> dict[str, Any]:
    return {
        "kind": found.accepted.kind,
        "target": str(found.accepted.target),
        "artifact": str(found.accepted.path),
        "sha256": artifact.sha256,
        "choices": dict(artifact.choices),
        "record": artifact.record_id,
        "mlflow_run": artifact.mlflow_run_id,
        "measured_us": artifact.measured_us,
        "measured_on": artifact.measured_on,
        "why": found.accepted.why,
    }


_LOADED: dict[str, Callable[..., Any]] = {}


def _load(found: Found, sha256: str) -> Callable[..., Any]:
    """Load an artifact once per process: same bytes, same function."""
    if sha256 not in _LOADED:
        _load_runtime()
        import tvm_ffi

        with found.open() as path:
            module = tvm_ffi.load_module(str(path))
        _LOADED[sha256] = module.get_function(found.accepted.artifact.symbol)
    return _LOADED[sha256]


@cache
def _load_runtime() -> None:
    """Make TVM's runtime functions (its thread pool above all) available to artifacts."""
    # The pool reads these when it first runs. Unless told, it takes half of the cores and pins the
    # calling thread, with all that torch does there, to one of them.
    os.environ["TVM_NUM_THREADS"] = str(num_threads())
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", SPIN_COUNT)
    if "tvm" not in sys.modules:  # the compiler brings its own copy
        import tvm_ffi  # noqa: F401, the library links to it

        ctypes.CDLL(str(tvm_libs.find()), ctypes.RTLD_GLOBAL)
