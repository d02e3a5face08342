"""Records: written whole, read strictly, one per spec and target, with a key of their own."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from record_tools import SPEC, TARGET, make_record

from tvmpaged import records
from tvmpaged.records import Latency, Record
from tvmpaged.spec import TargetKey

pytestmark = pytest.mark.runtime


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = records.save(tmp_path, make_record())
    assert path == tmp_path / "cpu/sapphirerapids" / str(SPEC) / "record.json"
    assert records.load(tmp_path, TARGET, SPEC) == make_record()
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_a_newer_record_replaces_the_older_one(tmp_path: Path) -> None:
    records.save(tmp_path, make_record())
    newer = make_record(seed=1)
    records.save(tmp_path, newer)
    assert records.load(tmp_path, TARGET, SPEC) == newer


def test_a_record_of_another_target_is_never_used(tmp_path: Path) -> None:
    other = TargetKey("cpu", "x86-64-v3")
    records.save(tmp_path, make_record())
    records.save(tmp_path, make_record(target=other, choices={"step": "columns", "lanes": 8}))
    assert records.load(tmp_path, TARGET, SPEC).choices["lanes"] == 16  # type: ignore[union-attr]
    assert records.load(tmp_path, other, SPEC).choices["lanes"] == 8  # type: ignore[union-attr]
    assert records.load(tmp_path, TargetKey("cpu", "znver4"), SPEC) is None
    assert [each.target for each in records.load_all(tmp_path, other)[0]] == [other]
    found, problems = records.load_all(tmp_path)
    assert (len(found), problems) == (2, {})
    assert records.specs(tmp_path, other) == [SPEC]
    assert records.specs(tmp_path, TargetKey("cpu", "znver4")) == []


def test_a_record_that_lies_in_another_ones_folder_is_refused(tmp_path: Path) -> None:
    path = records.save(tmp_path, make_record())
    for target, spec in (
        (TARGET, SPEC.generic()),
        (TARGET, replace(SPEC, group_size=4)),
        (TargetKey("cpu", "x86-64-v3"), SPEC),
    ):
        wrong = records.folder(tmp_path, target, spec) / "record.json"
        wrong.parent.mkdir(parents=True)
        wrong.write_bytes(path.read_bytes())
        with pytest.raises(ValueError, match="is the record of"):
            records.load(tmp_path, target, spec)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 3}, "schema version 3, not 2"),
        ({"schema_version": None}, "schema version None, not 2"),
        ({"schema_version": "1"}, "schema version 1, not 2"),
        ({"latency_us": {"median": 1.0}}, "TypeError"),
        ({"latency_us": {**vars(Latency(0.0, 1.0, 1.0, 5))}}, "0.0 us is no time"),
        ({"latency_us": {**vars(Latency(1.0, 1.0, float("nan"), 5))}}, "nan us is no time"),
        ({"spec": "decode"}, "cannot be read"),
        ({"choices": None}, "no record"),
    ],
)
def test_what_is_no_record_is_refused_with_its_path(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = records.save(tmp_path, make_record())
    path.write_text(json.dumps(make_record().as_dict() | change))
    with pytest.raises(ValueError, match=said) as caught:
        records.load(tmp_path, TARGET, SPEC)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"choices": {"step": "rows", "lanes": 12345}},
        {"latency_us": {**vars(Latency(1.5, 12.0, 13.0, 31))}},
        {"record_id": "0" * 16},
        {"record_id": ""},
    ],
)
def test_a_record_that_was_edited_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = records.save(tmp_path, make_record())
    path.write_text(json.dumps(make_record().as_dict() | change))
    with pytest.raises(ValueError, match="was changed after it was written") as caught:
        records.load(tmp_path, TARGET, SPEC)
    assert str(path) in str(caught.value)


def test_a_record_without_a_field_says_which(tmp_path: Path) -> None:
    path = records.save(tmp_path, make_record())
    data = make_record().as_dict()
    for name in ("choices", "latency_us", "schema_version"):
        path.write_text(json.dumps({each: data[each] for each in data if each != name}))
        with pytest.raises(ValueError, match=r"is no record: ") as caught:
            records.load(tmp_path, TARGET, SPEC)
        said = "schema version None" if name == "schema_version" else f"{name} missing"
        assert said in str(caught.value)


def test_half_a_record_is_refused(tmp_path: Path) -> None:
    path = records.save(tmp_path, make_record())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is no record"):
        records.load(tmp_path, TARGET, SPEC)


def test_a_record_of_the_first_schema_is_read_with_what_it_knew(tmp_path: Path) -> None:
    data = make_record().as_dict()
    for name in ("roof_gb_per_s", "roof_gflop_per_s", "roof_fraction", "gpu"):
        del data[name]
    path = records.save(tmp_path, make_record())
    path.write_text(json.dumps(data | {"schema_version": 1}))
    found = records.load(tmp_path, TARGET, SPEC)
    assert found is not None
    assert found == replace(make_record(), roof_gb_per_s=None, roof_fraction=None)
    assert found.record_id == data["record_id"]
    path.write_text(json.dumps(data | {"schema_version": 2}))
    with pytest.raises(ValueError, match="roof_gb_per_s"):
        records.load(tmp_path, TARGET, SPEC)


def test_changing_any_field_changes_the_record_id() -> None:
    first = make_record()
    other: dict[str, Any] = {
        "spec": replace(SPEC, block_size=32),
        "target": TargetKey("cpu", "znver4"),
        "choices": {"step": "rows", "lanes": 8},
        "is_default": True,
        "latency_us": Latency(740.0, 720.0, 790.0, 32),
        "default_latency_us": Latency(881.0, 860.0, 930.0, 31),
        "caches_bytes": {},
        "workload": {},
        "failures": {},
        "mlflow_run_id": "r2",
        "gb_per_s": None,
        "gflop_per_s": 1.0,
        "roof_gflop_per_s": 1.0,
        "gpu": {"driver_version": "595.58"},
    }
    for each in fields(Record):
        if each.name != "record_id":
            value = getattr(first, each.name)
            changed = other.get(each.name, value + value if isinstance(value, str) else None)
            if changed is None and isinstance(value, int | float):
                changed = value + 1
            assert make_record(**{each.name: changed}).record_id != first.record_id, each.name


def test_the_folder_of_a_spec_changes_with_any_of_its_fields() -> None:
    changed = {
        "kernel": "prefill",
        "q_dtype": "float16",
        "kv_dtype": "float16",
        "out_dtype": "float16",
        "head_dim": 80,
        "head_dim_v": 80,
        "block_size": 17,
        "group_size": 4,
        "layout": "NHD",
    }
    folders = {records.folder(Path(), TARGET, SPEC)}
    folders |= {records.folder(Path(), TARGET, replace(SPEC, **{k: v})) for k, v in changed.items()}  # type: ignore[arg-type]
    assert len(folders) == 1 + len(changed)


def test_percentiles_are_of_the_times() -> None:
    assert Latency.of([3.0, 1.0, 2.0], disturbed=4) == Latency(2.0, 1.2, 2.8, 3, 4)


def test_a_record_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self.name} {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    path = records.save(tmp_path, make_record())
    new = done[0].removeprefix("sync ")
    assert new != "record.json"
    assert done == [f"sync {new}", f"rename {new} record.json", f"sync {path.parent.name}"]
