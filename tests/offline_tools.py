"""Exports without a compiler, and a device made of arithmetic, for tests of measuring elsewhere."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvmpaged import measure, provenance, records, schedules
from tvmpaged.bundle import file_name, trust
from tvmpaged.cpu import native_target
from tvmpaged.sources import source_sha256
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.candidates import Candidates
from tvmpaged.tuning.export_manifest import (
    EXPORT_NAME,
    JOURNAL_NAME,
    RESULTS_NAME,
    Candidate,
    Export,
    ExportedSpec,
    Library,
    encode,
)
from tvmpaged.tuning.log import LOG_NAME, read_searches
from tvmpaged.tuning.process import Process
from tvmpaged.tuning.starts import default_start
from tvmpaged.tuning.trial import Choices, Trial, choices_key
from tvmpaged.tuning.workload import Workload

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = native_target()
#: The default, a faster one, one of each kind of failure, and the fastest.
FATES = ("ok 500", "ok 450", "crash", "wrong", "error", "", "ok 400", "ok 440")
BEST = FATES.index("ok 400")


def fake_devices(gpus: Sequence[object]) -> list[Process]:
    """Return what `tvmpaged.tuning.machine.measuring_processes` would, without kernels."""
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    return [Process("fake_measure_worker", path) for _ in gpus or [None]]


def legal_choices(
    count: int, spec: AttentionSpec = SPEC, target: TargetKey = TARGET
) -> list[Choices]:
    """Return so many different choice lists, the untuned default first."""
    default = default_start(spec, target)
    source = Candidates(
        schedules.space(spec, target), lambda each: schedules.reject(spec, target, each), default
    )
    random, found = np.random.default_rng(0), [default]
    while len(found) < count:
        drawn = source.draw(random)
        if drawn not in found:
            found.append(drawn)
    return found


#: Of the made-up export's candidates.
KEYS = [choices_key(each) for each in legal_choices(len(FATES))]


def write_export(
    folder: Path, fates: Sequence[str] = FATES, target: TargetKey = TARGET, **changes: Any
) -> Export:
    """Write an export whose candidates are those fates; an empty one could not be compiled."""
    folder.mkdir(parents=True)

    def library(spec: AttentionSpec, text: str) -> Library:
        digest = trust.sha256(text.encode())
        name = file_name(spec, digest)
        (folder / name).write_text(text)
        return Library(name, digest, len(text))

    candidates = tuple(
        Candidate(choices, library(SPEC, fate)) if fate
        else Candidate(choices, None, "compile", "ValueError: it does not fit")
        for choices, fate in zip(legal_choices(len(fates), SPEC, target), fates, strict=True)
    )  # fmt: skip
    merge = library(AttentionSpec.make("merge", "float32"), "merge")
    spec = ExportedSpec(SPEC, Workload.representative(SPEC, 3, target.kind), 7, merge, candidates)
    sources = source_sha256(target.kind)
    values = {"header": provenance.header(target), "source_sha256": sources, "seed": 0}
    export = Export(**({**values, "specs": (spec,)} | changes))
    (folder / EXPORT_NAME).write_bytes(encode(export))
    return export


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a JSON file as a person would who knows its format."""
    data = json.loads(path.read_bytes())
    change(data)
    path.write_text(json.dumps(data))


def journal(folder: Path) -> list[dict[str, Any]]:
    """Return the journal's answers that can be read."""
    found = []
    for line in (folder / JOURNAL_NAME).read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [each for each in found if each["kind"] == "answer"]


def results(folder: Path) -> dict[str, Any]:
    """Return what ``results.json`` holds."""
    found: dict[str, Any] = json.loads((folder / RESULTS_NAME).read_bytes())
    return found


def measure_with_fakes(folder: Path, **options: Any) -> measure.Measurement:
    """Measure a made-up export on the made-up device."""
    real, measure.measuring_processes = measure.measuring_processes, fake_devices
    try:
        return measure.measure(folder, **options)
    finally:
        measure.measuring_processes = real


def trials(work_dir: Path) -> list[Trial]:
    last = read_searches(records.folder(work_dir, TARGET, SPEC) / LOG_NAME)[-1]
    return list(last.trials.values())


def measured_export(folder: Path) -> Path:
    """Return an export that was measured by a made-up device of another name."""
    write_export(folder)
    measure_with_fakes(folder)
    edit(folder / RESULTS_NAME, lambda data: data["device"].update(name="A CPU", num_threads=77))
    return folder
