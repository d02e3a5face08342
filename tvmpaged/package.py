"""What ``tvmpaged package`` does: compile specs for targets, and put them into a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tvmpaged import build, provenance, records, schedules
from tvmpaged.bundle import (
    Artifact,
    Built,
    Manifest,
    Merge,
    load_private_key,
    merge,
    read_existing,
    write,
)
from tvmpaged.compile_pool import Build, Job, build_in_child, compile_all
from tvmpaged.cpu import native_target
from tvmpaged.freshness import CURRENT
from tvmpaged.gpu import native_gpu
from tvmpaged.recorded import note_on, state_of, with_record
from tvmpaged.records import Record
from tvmpaged.sm import limits
from tvmpaged.spec import ATTENTION_KERNELS, DTYPES, AttentionSpec, TargetKey, native_family
from tvmpaged.tryout import try_out
from tvmpaged.tuning.starts import why_not_tried

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SCHEMA_VERSION = 1

_VERIFY_THERE = "run tvmpaged verify --numbers on a machine that they are for"

#: Called with how many artifacts are done, how many there are, and the last one's name.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Packaged:
    """What became of one target.

    Parameters
    ----------
    target : TargetKey
        Which.
    folder : Path
        Its folder in the bundle.
    merge : Merge
        What was taken, unchanged, kept ...
    failures : dict
        Spec -> why it has no artifact.
    notes : tuple of str
        What a person should know, such as a stale record.
    states : dict
        Spec -> what its record is worth here; see `tvmpaged.freshness`. Those without are not in.
    """

    target: TargetKey
    folder: Path
    merge: Merge
    failures: dict[AttentionSpec, str]
    notes: tuple[str, ...] = ()
    states: dict[AttentionSpec, str] = field(default_factory=dict)

    @property
    def num_refused(self) -> int:
        """How many specs are not in the bundle as they were asked for."""
        return len(self.failures) + len(self.merge.kept)


def parse_target(text: str) -> TargetKey:
    """Return the target a user names: ``native`` is this machine's CPU, ``cuda`` its GPU.

    Raises
    ------
    ValueError
        When it is none, or this machine has no GPU.
    """
    if text == "cuda":
        return native_gpu()
    return native_target() if text == "native" else TargetKey.parse(text)


def recorded_specs(records_dir: Path, targets: Sequence[TargetKey]) -> list[AttentionSpec]:
    """Return the specs that have a record for one of the targets.

    Raises
    ------
    ValueError
        When there is none, or one lies in a folder that names no spec.
    """
    found = [spec for target in targets for spec in records.specs(records_dir, target)]
    if not found:
        names = ", ".join(map(str, targets))
        raise ValueError(f"records={str(records_dir)!r} holds no record for {names}")
    return list(dict.fromkeys(found))


def base_specs() -> list[AttentionSpec]:
    """Return the base set: with it, every spec resolves, if not to the fastest kernel.

    Attention with all sizes at run time for K/V of q's dtype and, under a float32 q, of the 16-bit
    ones; what writes, copies and merges.
    """
    pairs = [(dtype, dtype) for dtype in DTYPES]
    pairs += [("float32", dtype) for dtype in DTYPES if dtype != "float32"]
    specs = [
        AttentionSpec.make(kernel, dtype, kv_dtype=kv_dtype, layout=layout)
        for kernel in (*ATTENTION_KERNELS, "append_kv")
        for dtype, kv_dtype in pairs
        for layout in ("HND", "NHD")
    ]
    specs += [AttentionSpec.make("merge", dtype) for dtype in DTYPES]
    # Blocks are bytes to it: one serves all dtypes, layouts and sizes.
    return [*specs, AttentionSpec.make("copy_blocks", "float32")]


def package(
    specs: Sequence[AttentionSpec],
    targets: Sequence[TargetKey],
    out: Path,
    *,
    records_dir: Path = Path("tuning_logs"),
    base: bool = False,
    jobs: int = 1,
    replace_existing: bool = False,
    sign: Path | None = None,
    ptx: bool = False,
    progress: Progress | None = None,
    compile_with: Build | None = None,
) -> list[Packaged]:
    """Compile specs for targets into a bundle.

    A spec with a record for its target becomes a tuned artifact, another one an untuned default. A
    tuned artifact that this machine can run and that computes something wrong does not enter. A
    spec that fails leaves the others alone; what the bundle already holds is not compiled again.

    Parameters
    ----------
    specs : sequence of AttentionSpec
        What to compile. A native spec brings the kernels that share its cache.
    targets : sequence of TargetKey
        For what; the machine itself needs none of them.
    out : Path
        The bundle.
    records_dir : Path
        Where ``<target>/<spec>/record.json`` lie.
    base : bool
        Also `base_specs`.
    jobs : int
        Compiler processes at a time.
    replace_existing : bool
        Replace artifacts that differ from the new ones.
    sign : Path, optional
        PEM file of the Ed25519 private key that signs the manifests.
    ptx : bool
        Put PTX beside code for GPUs: newer ones then run it, compiled by their driver.
    progress : callable, optional
        See `Progress`.
    compile_with : callable, optional
        Compiles instead of `tvmpaged.compile_pool.build_in_child`; importable by name.

    Raises
    ------
    ValueError
        When there is nothing to do, or `jobs` is no positive number.
    BundleError
        When the bundle or the key cannot be read, or the bundle cannot be written.
    """
    wanted = _with_families([*specs, *(base_specs() if base else ())])
    if not wanted or not targets:
        raise ValueError("nothing to package: give specs (or --base) and a target")
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1")
    key = load_private_key(sign) if sign is not None else None
    report = progress or _silent
    total, done, found = len(wanted) * len(targets), 0, []
    for target in dict.fromkeys(targets):

        def advance(count: int, what: str, before: int = done) -> None:
            report(before + count, total, what)

        compiler = compile_with or partial(build_in_child, ptx=ptx)
        work = _Work(target, out, records_dir, jobs, replace_existing, key, ptx, compiler)
        found.append(work.run(wanted, advance))
        done += len(wanted)
    return found


def _with_families(specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """Return specs once each; with one kernel of a native cache come all, for none serves alone."""
    found: dict[AttentionSpec, None] = {}
    for spec in specs:
        family = native_family(spec)
        native = spec.layout == "native" and spec.kernel in family
        found |= dict.fromkeys(family.values() if native else (spec,))
    return list(found)


def _silent(done: int, total: int, what: str) -> None:
    """Report to nobody."""


@dataclass(frozen=True)
class _Work:
    """The part of a call that concerns one target."""

    target: TargetKey
    out: Path
    records_dir: Path
    jobs: int
    replace_existing: bool
    key: Ed25519PrivateKey | None
    ptx: bool
    compile_with: Build

    def run(self, specs: Sequence[AttentionSpec], advance: Callable[[int, str], None]) -> Packaged:
        header = provenance.header(self.target, ptx=self.ptx)
        artifacts, failures, found = self._describe(specs, header)
        existing = read_existing(self.out, self.target, self.replace_existing)
        decision = merge(existing, header, artifacts, self.replace_existing)
        done = len(failures)
        if done:
            advance(done, "cannot be described")
        if there := len(specs) - done - len(decision.taken):
            done += there
            advance(done, "already there")

        wanted = {each.spec: each for each in decision.taken}
        jobs = [Job(spec, self.target, each.choices) for spec, each in wanted.items()]
        built: list[Built] = []
        for outcome in compile_all(jobs, self.jobs, self.compile_with):
            done += 1
            advance(done, str(outcome.job.spec))
            if outcome.failure:
                failures[outcome.job.spec] = outcome.failure
            else:
                artifact = replace(wanted[outcome.job.spec], resources=outcome.resources)
                built.append(Built(artifact, outcome.data))
        wrong, not_run = try_out(header, built, self.out)
        failures |= wrong
        built = [each for each in built if each.artifact.spec not in wrong]

        if built or (self.key is not None and existing is not None):
            # Without new ones nothing may go, whatever was allowed to.
            built.sort(key=lambda each: str(each.artifact.spec))
            may_replace = self.replace_existing and bool(built)
            written = write(header, built, self.out, replace_existing=may_replace, key=self.key)
            decision = replace(
                written,
                unchanged=decision.unchanged + written.unchanged,
                kept=decision.kept + written.kept,
            )
        else:
            decision = replace(decision, taken=(), replaced=(), dropped=())
        folder = self.out / str(self.target)
        states = {each.spec: state_of(each) for each in found}
        notes = tuple(note_on(each) for each in found if state_of(each) != CURRENT)
        if not_run:
            notes += (f"{self.target}: tuned kernels were not run: {not_run}; {_VERIFY_THERE}",)
        if self.target.kind == "cuda" and limits(self.target.arch)[1]:
            notes = (limits(self.target.arch)[1], *notes)
        return Packaged(self.target, folder, decision, failures, notes, states)

    def _describe(
        self, specs: Sequence[AttentionSpec], header: Manifest
    ) -> tuple[list[Artifact], dict[AttentionSpec, str], list[Record]]:
        """Return the artifacts as they would be, before anything is compiled, and the records."""
        artifacts, failures, found = [], {}, []
        sources = build.source_sha256(self.target.kind)
        for spec in specs:
            try:
                record = records.load(self.records_dir, self.target, spec)
                if record and (why := why_not_tried(spec, self.target, record.choices)):
                    raise ValueError(f"record {record.record_id} cannot be used: {why}; tune again")
                choices = record.choices if record else schedules.default_choices(spec, self.target)
            except (OSError, ValueError) as error:
                failures[spec] = str(error)
                continue
            artifact = Artifact(
                spec=spec,
                file="",
                sha256="",
                symbol=build.symbol_name(spec),
                kind="generic" if spec.is_generic else "default",
                choices=dict(choices),
                source_sha256=sources,
                built_with=header.built_with,
                git=header.git,
                created_at=header.created_at,
            )
            if record:
                artifact = with_record(artifact, record)
                found.append(record)
            artifacts.append(artifact)
        return artifacts, failures, found
