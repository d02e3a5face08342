"""What a manifest says: ``Manifest`` and ``Artifact``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvmpaged.freshness import STALE, freshness

if TYPE_CHECKING:
    from tvmpaged.sm import Resources
    from tvmpaged.spec import AttentionSpec, TargetKey

#: Any change of the fields below needs a new one: manifests are read strictly.
SCHEMA_VERSION = 2

#: Calling convention between the runtime and the kernels: argument order and the work-list columns.
#: Raise it whenever one of them changes; artifacts of another number are refused before loading.
KERNEL_ABI = 1

MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "manifest.json.sig"
LOCK_NAME = ".lock"
#: Lists the files that a write adds or removes; there only while it runs or after it was killed.
CHANGING_NAME = ".changing"
TEMPORARY_NAMES = (".changing.new", "manifest.json.new", "manifest.json.sig.new")
KINDS = ("tuned", "default", "generic")


@dataclass(frozen=True)
class Abi:
    """What an artifact loads under; exact versions are provenance and stand elsewhere.

    Parameters
    ----------
    kernels : int
        See `KERNEL_ABI`.
    tvm_ffi : str
        A version range.
    tvm_runtime : str
        The release of ``libtvm_runtime.so``, such as ``0.27`` (any post release of it).
    """

    kernels: int = KERNEL_ABI
    tvm_ffi: str = ">=0.1.13.post3,<0.1.16"
    tvm_runtime: str = "0.27"


@dataclass(frozen=True)
class Git:
    """The commit the kernels came from, and whether the tree held other changes."""

    commit: str | None
    dirty: bool | None


@dataclass(frozen=True)
class BuiltWith:
    """Exact versions of the tools, for a person who looks for a cause; nothing is refused by it."""

    tvmpaged: str
    tvm: str
    tvm_ffi: str
    linker: str
    toolkit: str | None = None


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel of a bundle.

    Parameters
    ----------
    spec : AttentionSpec
        What it computes; one artifact per spec and target.
    file, sha256, symbol : str
        A plain name inside the target's folder, the digest of its bytes, the function in it.
    kind : str
        ``tuned`` (choices of a record), ``default`` (untuned) or ``generic`` (sizes at run time).
    choices : dict
        Schedule choices as plain data; re-applicable without any database.
    source_sha256 : str
        Digest of the kernel and schedule sources; another value than the installed one is stale.
    built_with : BuiltWith
        Exact versions.
    git : Git
        Where the sources stood.
    created_at : str
        UTC, ISO 8601.
    record_id, mlflow_run_id : str or None
        The record and the tuning run that the choices came from.
    measured_us : float or None
        Median time in microseconds, as the record has it.
    measured_on : str or None
        The device that time was measured on.
    num_threads : int or None
        Threads that time was measured with.
    resources : Resources or None
        What the kernel takes of a GPU; None on a CPU.
    """

    spec: AttentionSpec
    file: str
    sha256: str
    symbol: str
    kind: str
    choices: dict[str, int | str]
    source_sha256: str
    built_with: BuiltWith
    git: Git
    created_at: str
    record_id: str | None = None
    mlflow_run_id: str | None = None
    measured_us: float | None = None
    measured_on: str | None = None
    num_threads: int | None = None
    resources: Resources | None = None

    @property
    def kernel(self) -> str:
        """Which kernel it is; the spec says so."""
        return self.spec.kernel

    def state(self, target: TargetKey) -> str:
        """Return what it is worth on this machine; see `tvmpaged.freshness`.

        A tuned one without a time was made of the choices of a stale record, and is as stale,
        though its program is of the installed sources.
        """
        if self.kind == "tuned" and self.measured_us is None:
            return STALE
        return freshness(target, self.source_sha256, self.measured_on, self.num_threads)


@dataclass(frozen=True)
class Manifest:
    """All that one target's folder of a bundle holds.

    Parameters
    ----------
    target : TargetKey
        What the artifacts were built for; equals the folder's path in the bundle.
    abi : Abi
        What they load under.
    cpu_features : tuple of str
        Names of ``/proc/cpuinfo`` that the machine must have; empty for CUDA.
    sm_arch : str or None
        The sm arch the device code was built for, with ``+ptx`` where PTX is beside it; None for
        CPU.
    built_with, git, created_at
        Of the last write; an artifact that an earlier one left has its own.
    artifacts : tuple of Artifact
        In the order of their specs.
    """

    target: TargetKey
    abi: Abi
    cpu_features: tuple[str, ...]
    sm_arch: str | None
    built_with: BuiltWith
    git: Git
    created_at: str
    artifacts: tuple[Artifact, ...] = ()

    def find(self, spec: AttentionSpec) -> Artifact | None:
        """Return the artifact of exactly this spec."""
        return next((each for each in self.artifacts if each.spec == spec), None)

    def with_artifacts(self, artifacts: list[Artifact]) -> Manifest:
        """Return the same manifest with these artifacts, in the order of their specs."""
        return replace(self, artifacts=tuple(sorted(artifacts, key=lambda each: str(each.spec))))
