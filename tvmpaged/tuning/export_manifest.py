"""What an export folder holds, and reading it: compiled candidates of specs, to measure elsewhere.

::

    export.json        what stands here; read strictly, every file by its digest
    SPEC.DIGEST.so     candidates, and the kernels that merge
    results.jsonl      of `tvmpaged measure`: every answer as it came
    results.json       of `tvmpaged measure`: all of them, when it ended in order

Like a bundle it is code: files that others may write, links and names that leave the folder are
refused. All that is said in it is plain data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tvmpaged import bundle
from tvmpaged.bundle import BundleError, trust
from tvmpaged.bundle.fields import Fields, load_object, parsed
from tvmpaged.errors import UserError
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.trial import Choices, Reason, as_reason, choices_key
from tvmpaged.tuning.workload import Workload

SCHEMA_VERSION = 1
EXPORT_NAME = "export.json"
JOURNAL_NAME = "results.jsonl"
RESULTS_NAME = "results.json"


@dataclass(frozen=True)
class Library:
    """A compiled file beside the manifest."""

    file: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Candidate:
    """One choice list of a spec.

    Parameters
    ----------
    choices : dict
        Option -> value.
    library : Library or None
        What it was compiled to.
    reason, detail : str
        Why it could not be compiled, a `tvmpaged.tuning.trial.Reason`, and for a person.
    """

    choices: Choices
    library: Library | None
    reason: Reason | Literal[""] = ""
    detail: str = ""

    @property
    def key(self) -> str:
        """The candidate's short name."""
        return choices_key(self.choices)


@dataclass(frozen=True)
class ExportedSpec:
    """One spec's part.

    Parameters
    ----------
    spec : AttentionSpec
        Which.
    workload : Workload
        What it is to be measured on.
    seed : int
        Of the values measured on.
    merge : Library
        The kernel that folds a split sequence's parts: its time counts.
    candidates : tuple of Candidate
        In the order to be tried; the untuned default leads.
    """

    spec: AttentionSpec
    workload: Workload
    seed: int
    merge: Library
    candidates: tuple[Candidate, ...]

    def find(self, key: str) -> Candidate | None:
        """Return the candidate of this short name."""
        return next((each for each in self.candidates if each.key == key), None)


@dataclass(frozen=True)
class Export:
    """All that an export holds.

    Parameters
    ----------
    header : bundle.Manifest
        Target, what the libraries need, and what built them; without artifacts.
    source_sha256 : str
        Of kernel and schedule sources.
    seed : int
        Of the command that made it.
    specs : tuple of ExportedSpec
        Each spec once.
    """

    header: bundle.Manifest
    source_sha256: str
    seed: int
    specs: tuple[ExportedSpec, ...]

    def libraries(self) -> Iterator[Library]:
        """Yield every library."""
        for spec in self.specs:
            yield spec.merge
            yield from (each.library for each in spec.candidates if each.library is not None)


@dataclass(frozen=True)
class ExportFolder:
    """An export on disk; from `read_export`.

    Parameters
    ----------
    path : Path
        The folder.
    export : Export
        What its manifest says.
    sha256 : str
        Of the manifest's bytes, which name all others: it stands for the whole export.
    """

    path: Path
    export: Export
    sha256: str

    def read(self, library: Library) -> bytes:
        """Return a library's bytes, which have the manifest's digest.

        Raises
        ------
        BundleError
            When they do not, or the file may not be trusted.
        """
        path = self.path / library.file
        with trust.open_folder(self.path) as folder_fd:
            return trust.read_hashed(folder_fd, library.file, path, library.sha256)


def encode(export: Export) -> bytes:
    """Return the bytes of ``export.json``."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "header": json.loads(bundle.encode(export.header)),
        "source_sha256": export.source_sha256,
        "seed": export.seed,
        "specs": [
            {
                "spec": str(each.spec),
                "workload": each.workload.as_dict(),
                "seed": each.seed,
                "merge": asdict(each.merge),
                "candidates": [{"key": one.key, **asdict(one)} for one in each.candidates],
            }
            for each in export.specs
        ],
    }
    return (json.dumps(data, indent=1, allow_nan=False) + "\n").encode()


def decode(data: bytes) -> Export:
    """Read `encode`'s bytes.

    Raises
    ------
    BundleError
        Naming the field, its value and what is allowed.
    """
    top = Fields(load_object(data, EXPORT_NAME), "export")
    check_version(top, SCHEMA_VERSION)
    header = bundle.decode(json.dumps(top.take("header", dict)).encode())
    export = Export(
        header=header,
        source_sha256=top.sha256("source_sha256"),
        seed=top.take("seed", int),
        specs=tuple(
            _read_spec(Fields(each, f"export.specs[{index}]"))
            for index, each in enumerate(top.take_list("specs", dict))
        ),
    )
    top.end()
    if len({each.spec for each in export.specs}) < len(export.specs) or not export.specs:
        raise BundleError("export lists a spec twice, or none")
    return export


def check_version(top: Fields, readable: int) -> None:
    """Take the schema version, and refuse another one than is read here.

    Raises
    ------
    BundleError
        With both.
    """
    version = top.take("schema_version", int)
    if version != readable:
        raise BundleError(
            f"{top.where} has schema version {version}, this tvmpaged reads {readable}: use one "
            "version of tvmpaged to export, to measure and to import"
        )


def _read_spec(entry: Fields) -> ExportedSpec:
    spec = ExportedSpec(
        spec=parsed(AttentionSpec.parse, entry.take("spec", str), f"{entry.where}.spec"),
        workload=_read_workload(entry.fields("workload")),
        seed=entry.take("seed", int),
        merge=_read_library(entry.fields("merge")),
        candidates=tuple(
            _read_candidate(Fields(each, f"{entry.where}.candidates[{index}]"))
            for index, each in enumerate(entry.take_list("candidates", dict))
        ),
    )
    entry.end()
    if len({each.key for each in spec.candidates}) < len(spec.candidates) or not spec.candidates:
        raise BundleError(f"{entry.where} lists a candidate twice, or none")
    return spec


def _read_candidate(entry: Fields) -> Candidate:
    key, choices = entry.take("key", str), entry.choices()
    library, reason = entry.take("library", dict, None), entry.take("reason", str)
    candidate = Candidate(
        choices=choices,
        library=_read_library(Fields(library, f"{entry.where}.library")) if library else None,
        reason=parsed(as_reason, reason, f"{entry.where}.reason") if reason else "",
        detail=entry.take("detail", str),
    )
    entry.end()
    if candidate.key != key:
        raise BundleError(f"{entry.where}.key={key!r} is not that of its choices, {candidate.key}")
    if (candidate.library is None) != bool(candidate.reason):
        raise BundleError(f"{entry.where} holds neither a library nor why there is none, or both")
    return candidate


def _read_library(entry: Fields) -> Library:
    library = Library(entry.file(), entry.sha256(), entry.take("size_bytes", int))
    entry.end()
    return library


def _read_workload(entry: Fields) -> Workload:
    workload = Workload(
        entry.take("num_kv_heads", int),
        tuple(entry.take_list("q_lens", int)),
        tuple(entry.take_list("seq_lens", int)),
        entry.take("num_alone", int),
    )
    entry.end()
    if not 0 <= workload.num_alone <= len(workload.seq_lens):
        raise BundleError(f"{entry.where}.num_alone={workload.num_alone} is no number of sequences")
    return workload


def read_export(path: Path) -> ExportFolder:
    """Read an export's manifest, and nothing else of it.

    Raises
    ------
    UserError
        When the folder is no export, or the manifest is not as it must be.
    """
    if not (path / EXPORT_NAME).exists():
        raise UserError(
            f"{path} holds no {EXPORT_NAME}: it is no export; make one with "
            "tvmpaged tune --export DIR"
        )
    with trust.open_folder(path) as folder_fd:
        data = trust.read_file(folder_fd, EXPORT_NAME, path / EXPORT_NAME)
    try:
        return ExportFolder(path, decode(data), trust.sha256(data))
    except BundleError as error:
        raise BundleError(f"{path / EXPORT_NAME}: {error}") from error
