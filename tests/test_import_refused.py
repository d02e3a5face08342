"""Results that nobody should believe: each is refused by name and leaves no trace."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from import_tools import settings
from offline_tools import (
    FATES,
    KEYS,
    edit,
    measured_export,
    write_export,
)

from tvmpaged import tune_offline
from tvmpaged.bundle import trust
from tvmpaged.errors import UserError
from tvmpaged.tuning.export_manifest import (
    EXPORT_NAME,
    RESULTS_NAME,
)
from tvmpaged.tuning.import_results import read_results
from tvmpaged.tuning.trial import choices_key


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured_export(tmp_path_factory.mktemp("offline") / "export")


@pytest.fixture
def measured(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "export")


def answer(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes the first answer that says that a candidate beside the default passed."""

    def spoil(folder: Path) -> None:
        def each(data: Any) -> None:
            change(next(a for a in data["answers"] if a["keys"] == [KEYS[0], KEYS[1]]))

        edit(folder / RESULTS_NAME, each)

    return spoil


def sample(**changes: Any) -> Callable[[Path], None]:
    return answer(lambda a: a["reply"]["samples"][1].update(changes))


def check(value: Any) -> Callable[[Path], None]:
    return answer(lambda a: a["reply"]["checks"][1][3].update(error=value))


def roof(**changes: Any) -> Callable[[Path], None]:
    def change(data: Any) -> None:
        for each in data["answers"]:
            if each["phase"] == "roof":
                each["reply"]["roof"].update(changes)

    return lambda folder: edit(folder / RESULTS_NAME, change)


def whole(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / RESULTS_NAME, change)


def exported(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Return what changes the manifest, and makes the results say that they are of this one."""

    def spoil(folder: Path) -> None:
        edit(folder / EXPORT_NAME, change)
        digest = trust.sha256((folder / EXPORT_NAME).read_bytes())
        edit(folder / RESULTS_NAME, lambda data: data.update(export_sha256=digest))

    return spoil


def swap_choices(data: Any) -> None:
    first, second = data["specs"][0]["candidates"][:2]
    for name in ("key", "choices"):
        first[name], second[name] = second[name], first[name]


def choice(name: str, value: Any) -> Callable[[Path], None]:
    """Return what changes, or adds, an option of the last candidate."""

    def change(data: Any) -> None:
        last = data["specs"][0]["candidates"][-1]
        last["choices"][name] = value
        last["key"] = choices_key(last["choices"])

    return exported(change)


def pickled(folder: Path) -> None:
    """Write the same results as what runs code when it is read."""
    file = folder / RESULTS_NAME
    file.write_bytes(pickle.dumps(json.loads(file.read_bytes())))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (answer(lambda a: a["reply"].pop("samples")), "says that 2 candidates passed, and has no"),
        (answer(lambda a: a["reply"]["samples"].pop()), "has no times of each"),
        (sample(times_us=[]), "at least 5 times"),
        (sample(times_us=[400.0] * 4), "at least 5 times"),
        (sample(times_us=[450.0] * 5 + [-1.0]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + [0]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + [True]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + ["450"]), "not all finite and above 0"),
        (sample(times_us=[450.0] * 5 + [float("inf")]), "Infinity, which is no JSON"),
        (sample(times_us=[float("nan")] * 5), "NaN, which is no JSON"),
        (sample(speedup=9.0), "speedup=9 is not what its times say"),
        (sample(speedup=None), "speedup=None is no ratio"),
        (answer(lambda a: a["reply"]["samples"][0].update(speedup=1.01)), "speed-up is not 1"),
        (sample(disturbed=-1), "disturbed=-1"),
        (answer(lambda a: a["reply"].pop("checks")), "has no errors of each"),
        (answer(lambda a: a["reply"]["checks"][1].pop()), "not those of the checks"),
        (check(1.1e-5), "its error 1.1e-05 of 'sequence 2"),
        (check(-1.0), "its error -1.0"),
        (check(None), "its error None"),
        (check(float("nan")), "NaN, which is no JSON"),
        (answer(lambda a: a["sha256s"].reverse()), "another sha256 than what was exported"),
        (answer(lambda a: a.update(keys=["0" * 16])), "candidates that are not in the export"),
        (answer(lambda a: a.update(keys=[], sha256s=[])), "not in the export, or none"),
        (answer(lambda a: a.update(phase="last")), "phase 'last' is not known"),
        (roof(value=0), "no roof above 0"),
        (roof(fraction=-0.5), "fraction=-0.5 is none"),
        (roof(name="evil"), "its roof is not name='gb_per_s'"),
        (roof(name=["gb_per_s"]), "its roof is not name='gb_per_s'"),
        (roof(extra=1), "its roof is not name='gb_per_s'"),
        (answer(lambda a: a.update(spec="decode")), "its spec is not in the export"),
        (answer(lambda a: a.update(reason="tired")), "reason='tired' is not known"),
        (answer(lambda a: a.update(reason="interrupted")), "says nothing"),
        (answer(lambda a: a["reply"].update(wrong="")), "fails without saying why"),
        (whole(lambda d: d.update(schema_version=1)), "schema version 1"),
        (whole(lambda d: d.pop("device")), "device is missing"),
        (whole(lambda d: d["device"].update(num_threads=0)), "names no device, or no threads"),
        (whole(lambda d: d["device"]["caches_bytes"].update(L1="x")), "caches_bytes.L1='x' must"),
        (whole(lambda d: d["device"].update(caches_bytes={"L1": True})), "caches_bytes.L1=True"),
        (whole(lambda d: d["device"].update(rotation_bytes=-5)), "rotation_bytes=-5 must be"),
        (whole(lambda d: d.update(export_sha256="0" * 64)), "is of another export"),
        (exported(lambda d: d.update(source_sha256="0" * 64)), "other kernel sources.*again"),
        (
            exported(lambda d: d["specs"][0]["workload"].update(num_alone=99)),
            "num_alone=99 is no number of sequences",
        ),
        (exported(swap_choices), "first candidate is not the untuned default"),
        (choice("lanes", 0), "candidate [0-9a-f]{16}: lanes=0 is not in the space"),
        (choice("prefetch_keys", 10**9), "prefetch_keys=1000000000 is not in the space"),
        (choice("step", "sideways"), "step='sideways' is not in the space"),
        (choice("speed", 9), "its options are not those of the space"),
        (choice("weigh_vectors", 3), "candidate [0-9a-f]{16}: weigh_vectors=3 does not divide 4"),
        (lambda folder: (folder / RESULTS_NAME).unlink(), "run tvmpaged measure .* to its end"),
        (lambda folder: (folder / EXPORT_NAME).unlink(), "it is no export"),
        (lambda folder: os.truncate(folder / RESULTS_NAME, 1000), "is no JSON"),
        (pickled, "is no JSON"),
    ],
)
def test_what_is_not_credible_is_refused_and_leaves_no_trace(
    measured: Path, tmp_path: Path, spoil: Any, said: str
) -> None:
    spoil(measured)
    with pytest.raises(UserError, match=said) as refusal:
        tune_offline.import_results(measured, settings(tmp_path / "logs"))
    assert str(measured) in str(refusal.value)
    assert not (tmp_path / "logs").exists()


def test_a_hint_is_a_command_whatever_the_folder_is_called(tmp_path: Path) -> None:
    write_export(tmp_path / "cand é 1", FATES[:2])
    with pytest.raises(UserError, match=r"tvmpaged measure '.*/cand é 1' on"):
        read_results(tmp_path / "cand é 1")


@pytest.mark.parametrize("phase", ["search", "finalists"])
def test_results_that_lack_a_round_make_no_record(
    measured: Path, tmp_path: Path, phase: str
) -> None:
    def cut(data: Any) -> None:
        lost = next(each for each in data["answers"] if each["phase"] == phase)
        data["answers"].remove(lost)

    edit(measured / RESULTS_NAME, cut)
    (tuned,) = tune_offline.import_results(measured, settings(tmp_path / "logs"))
    assert tuned.record is None
    assert f"the results lack the {phase} round" in tuned.failure
    assert not (tmp_path / "logs").exists()
