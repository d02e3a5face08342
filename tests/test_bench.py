"""``bench`` measures what it says, and says what it measured."""

import json
from pathlib import Path

import pytest

from tvmpaged.bench import Case, bench
from tvmpaged.cli.app import main
from tvmpaged.spec import AttentionSpec

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)


def test_bytes_and_operations_of_a_case_by_hand() -> None:
    decode = Case(SPEC, num_kv_heads=2, batch=3, context=10, q_len=1)
    assert decode.kv_bytes == 3 * 10 * 2 * (64 + 64) * 4
    assert decode.flops == 2 * 3 * 6 * 10 * 128
    prefill = Case(SPEC, num_kv_heads=1, batch=1, context=4, q_len=4)
    assert prefill.flops == 2 * 3 * (1 + 2 + 3 + 4) * 128


def test_rows_name_the_artifact_and_its_times_are_ordered(base_bundle: Path) -> None:
    (row,) = bench([Case(SPEC, 2, 2, 40, 1)], bundle=str(base_bundle), rounds=5)
    assert row.kind == "generic"
    assert len(row.artifact) == 64
    assert 0 < row.p10_us <= row.median_us <= row.p90_us
    assert row.torch_ratio is not None


def test_a_spec_without_sizes_is_refused(base_bundle: Path) -> None:
    with pytest.raises(ValueError, match="name its sizes"):
        bench([Case(SPEC.generic(), 2, 2, 40, 1)], bundle=str(base_bundle))


def _rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["bench", *arguments, "--context", "64", "--rounds", "5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema_version"] == 1
    return list(printed["rows"])


def test_the_command_prints_json_alone(
    base_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = _rows(capsys, str(base_bundle), "--spec", str(SPEC))
    assert row["spec"] == str(SPEC)
    assert row["num_kv_heads"] == 8


def test_the_heads_that_were_named_are_the_ones_measured(
    base_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-qo-heads", "6", "--num-kv-heads", "2", "--head-dim", "64"]
    (row,) = _rows(capsys, str(base_bundle), *sizes, "--dtype", "float32", "--kernel", "decode")
    assert (row["spec"], row["num_kv_heads"]) == (str(SPEC), 2)


def test_a_bundle_alone_is_measured_whole(
    base_bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(base_bundle))
    arguments = ["package", "--spec", str(SPEC), "--out", str(tmp_path / "bundle")]
    assert main([*arguments, "--records", str(tmp_path / "none")]) == 0
    capsys.readouterr()
    (row,) = _rows(capsys, str(tmp_path / "bundle"))
    assert (row["spec"], row["kind"]) == (str(SPEC), "default")


def test_a_bundle_without_sizes_needs_specs(
    base_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(base_bundle)]) == 2
    assert "name specs" in capsys.readouterr().err
