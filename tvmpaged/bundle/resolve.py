"""Which artifact serves a spec on a machine: a pure decision.

Every fact about the machine is in `Host` and every bundle in a `Folder`, so a decision can be
replayed, and tested, anywhere. The order of what is accepted::

    tuned    for this target, for another GPU of this arch, for an arch this machine can run
    default  in the same order
    generic  in the same order
             (ties: the place in the search path)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tvmpaged.bundle.manifest import KERNEL_ABI, KINDS, Artifact, Manifest
from tvmpaged.cpu import MICROARCHITECTURES
from tvmpaged.sm import runs_on

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tvmpaged.bundle.folder import Folder
    from tvmpaged.spec import AttentionSpec, TargetKey


@dataclass(frozen=True)
class Host:
    """The machine and the libraries that an artifact would be loaded under.

    Parameters
    ----------
    target : TargetKey
        What code built for exactly this machine is called.
    cpu_flags : frozenset of str
        The CPU's features by the names of ``/proc/cpuinfo``.
    tvm_ffi_version, runtime_version : str
        Versions of the installed ``tvm_ffi`` and of the ``libtvm_runtime.so`` that is loaded.
    """

    target: TargetKey
    cpu_flags: frozenset[str]
    tvm_ffi_version: str
    runtime_version: str


@dataclass(frozen=True)
class Accepted:
    """An artifact that can serve the spec, and why it stands where it stands."""

    folder: Folder
    artifact: Artifact
    kind: str
    why: str
    rank: tuple[int, int, int]  # kind and distance; less is better

    @property
    def path(self) -> Path:
        """The artifact's file."""
        return self.folder.path / self.artifact.file

    @property
    def target(self) -> TargetKey:
        """What the artifact was built for."""
        assert self.folder.target is not None
        return self.folder.target


@dataclass(frozen=True)
class Rejected:
    """A bundle's folder that cannot serve the spec, and the reason."""

    folder: Folder
    reason: str

    def __str__(self) -> str:
        path = str(self.folder.path)
        place = "" if self.reason.startswith(path) else f"{path}: "
        return f"{place}{self.reason} [{self.folder.source}]"


@dataclass(frozen=True)
class Resolution:
    """A decision: every candidate is either accepted, the best first, or rejected by reason."""

    spec: AttentionSpec
    host: Host
    strict: bool
    accepted: tuple[Accepted, ...]
    rejected: tuple[Rejected, ...]

    def require(self) -> Accepted:
        """Return the best candidate.

        Raises
        ------
        FileNotFoundError
            When there is none; lists every candidate with its reason, and the command that builds
            what is missing.
        """
        if self.accepted:
            return self.accepted[0]
        strictly = " that is specialised (strict=True)" if self.strict else ""
        lines = [f"no artifact{strictly} for spec {self.spec} on {self.host.target}"]
        lines += [f"  rejected: {each}" for each in self.rejected] or ["  no bundle was found"]
        lines.append(f"build it with: {build_command(self.spec, self.host.target, self.strict)}")
        raise FileNotFoundError("\n".join(lines))


def build_command(spec: AttentionSpec, target: TargetKey, strict: bool) -> str:
    """Return the exact command that builds an artifact of this spec for this machine."""
    name = "native" if target.kind == "cpu" else "cuda"
    # Where not even a generic artifact serves, the kernels beside this one are missing too.
    base = "" if strict else " --base"
    return f"tvmpaged package --target {name} --spec '{spec}'{base} --install"


def resolve(
    spec: AttentionSpec, host: Host, candidates: Sequence[Folder], strict: bool = False
) -> Resolution:
    """Decide which artifact serves a spec.

    Parameters
    ----------
    spec : AttentionSpec
        What is to be computed.
    host : Host
        The machine it is to run on.
    candidates : sequence of Folder
        In the order of the search path.
    strict : bool
        Accept only artifacts of exactly this spec, built for exactly this target.

    Returns
    -------
    Resolution
        Never raises for a candidate; `Resolution.require` raises when all are rejected.
    """
    accepted, rejected = [], []
    for folder in candidates:
        manifest = folder.manifest
        if manifest is None:
            rejected.append(Rejected(folder, folder.problem))
            continue
        reason = unusable(manifest, host)
        if not reason and strict and not _is_for(manifest.target, host.target):
            reason = f"strict=True, and it is built for {manifest.target}, not {host.target}"
        exact, generic = manifest.find(spec), manifest.find(spec.generic())
        if not reason and strict and exact is None and generic is not None:
            reason = "strict=True, and it holds only the generic artifact for this spec"
        artifact = exact or generic
        if not reason and artifact is None:
            reason = f"none of its {len(manifest.artifacts)} artifacts is for this spec"
        if reason or artifact is None:
            rejected.append(Rejected(folder, reason))
            continue
        kind = artifact.kind if artifact is exact else "generic"
        distance, how = _distance(manifest, host)
        rank = (KINDS.index(kind), *distance)
        accepted.append(Accepted(folder, artifact, kind, f"{kind}, {how}", rank))
    accepted.sort(key=lambda each: each.rank)  # stable: the search path breaks ties
    return Resolution(spec, host, strict, tuple(accepted), tuple(rejected))


def unusable(manifest: Manifest, host: Host) -> str:
    """Return why a machine cannot run or load what a manifest's artifacts are, or nothing."""
    return _cannot_run(manifest, host) or _cannot_load(manifest, host)


def _cannot_load(manifest: Manifest, host: Host) -> str:
    """Return why the installed libraries cannot load a folder's artifacts, or nothing."""
    abi = manifest.abi
    if abi.kernels != KERNEL_ABI:
        return (
            f"its kernels' calling convention is number {abi.kernels}, this tvmpaged calls "
            f"number {KERNEL_ABI}: package it again"
        )
    for name, wanted, found in (
        ("tvm_ffi", abi.tvm_ffi, host.tvm_ffi_version),
        ("libtvm_runtime", f"=={abi.tvm_runtime}.*", host.runtime_version),
    ):
        try:
            fits = SpecifierSet(wanted).contains(Version(found), prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            return f"needs {name} {wanted}, found {name} {found}"
    return ""


def _cannot_run(manifest: Manifest, host: Host) -> str:
    """Return why this machine cannot run a folder's artifacts, or nothing."""
    mine, yours = host.target, manifest.target
    if mine.kind != yours.kind:
        return f"is built for {yours}, this is {mine}"
    # Both what the manifest says and what this version knows of the microarchitecture: an edited
    # manifest must not be able to bring about an illegal instruction.
    known = MICROARCHITECTURES.get(yours.arch, frozenset()) if yours.kind == "cpu" else frozenset()
    missing = sorted((known | set(manifest.cpu_features)) - host.cpu_flags)
    if missing:
        return f"needs {', '.join(missing)}, this CPU ({mine}) has none of that"
    if mine.kind == "cpu" or mine.arch == yours.arch:
        return ""
    code = manifest.sm_arch or yours.arch
    return "" if runs_on(code, mine.arch)[0] else f"is built for {code}, this GPU is {mine.arch}"


def _is_for(yours: TargetKey, mine: TargetKey) -> bool:
    """Return whether code is built for exactly this machine.

    An arch with a suffix (``sm_90a``) is the same GPU's, with what only that one has.
    """
    if mine.kind == "cpu":
        return yours == mine
    return replace(yours, arch=yours.arch.rstrip("af")) == mine


def _distance(manifest: Manifest, host: Host) -> tuple[tuple[int, int], str]:
    """Return how far a runnable folder is from this machine (less is better), and in words."""
    mine, yours = host.target, manifest.target
    if _is_for(yours, mine):
        # With a suffix it may use more of the GPU.
        return (0, -int(yours != mine)), f"built for this target ({yours})"
    if yours.kind == "cuda" and yours.arch == mine.arch:
        return (1, 0), f"built for another GPU of this arch ({yours})"
    if yours.kind == "cuda":
        _, steps = runs_on(manifest.sm_arch or yours.arch, mine.arch)
        return (2, steps), f"built for an arch it can run ({yours})"
    # The richer microarchitecture first; x86-64-v4 and -v3 are the poorest of all.
    features = MICROARCHITECTURES.get(yours.arch, frozenset(manifest.cpu_features))
    return (2, -len(features)), f"built for a microarchitecture this CPU can run ({yours})"
