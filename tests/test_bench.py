"""``bench`` measures what it says, and says what it measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tvmpaged.bench import SCHEMA_VERSION, Case, _interleave, bench
from tvmpaged.cli.app import main
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.tracking import Tracking

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
    assert row.gb_per_s == pytest.approx(2 * 40 * 2 * (64 + 64) * 4 / row.median_us / 1e3)
    assert row.roof_gflop_per_s is None
    assert row.roof_gb_per_s is not None
    assert row.roof_fraction == pytest.approx(row.gb_per_s / row.roof_gb_per_s, rel=1.0)
    (prefill,) = bench(
        [Case(replace(SPEC, kernel="prefill"), 1, 1, 40, 40)],
        bundle=str(base_bundle),
        rounds=5,
        against_torch=False,
    )
    assert prefill.roof_gb_per_s is None
    assert prefill.roof_gflop_per_s is not None
    assert prefill.roof_gflop_per_s > prefill.gflop_per_s
    assert prefill.torch_ratio is None


def test_a_turn_begins_with_a_call_that_is_not_timed() -> None:
    log: list[str] = []
    contenders = {name: lambda name=name: log.append(name) for name in "abc"}
    times = _interleave(contenders, 3)
    assert "".join(log) == "aabbcc" + "bbccaa" + "ccaabb"
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_rows_are_logged_once_all_is_measured(
    base_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    arguments = ["bench", str(base_bundle), "--spec", str(SPEC), "--context", "64", "--rounds", "5"]
    assert main([*arguments, "--no-mlflow"]) == 0
    assert list(tmp_path.iterdir()) == []
    uri = f"sqlite:///{tmp_path}/runs.db"
    assert main([*arguments, "--mlflow-uri", uri]) == 0
    client = Tracking(uri).client
    (experiment,) = [e for e in client.search_experiments() if e.name == "tvmpaged"]
    runs = client.search_runs([experiment.experiment_id])
    parent, row = sorted(runs, key=lambda run: run.info.run_name != "bench")
    assert row.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert (row.data.params["spec"], row.data.params["kind"]) == (str(SPEC), "generic")
    assert row.data.metrics["rounds"] == 5
    assert row.data.metrics["roof_fraction"] > 0
    assert [each.path for each in client.list_artifacts(parent.info.run_id)] == ["bench.json"]


def test_a_server_that_is_not_there_costs_a_warning(
    base_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    arguments = ["bench", str(base_bundle), "--spec", str(SPEC), "--context", "64", "--rounds", "5"]
    assert main([*arguments, "--mlflow-uri", "http://127.0.0.1:9"]) == 0
    out, err = capsys.readouterr()
    assert str(SPEC) in out
    assert "what was measured is not logged" in err


def test_a_spec_without_sizes_is_refused(base_bundle: Path) -> None:
    with pytest.raises(ValueError, match="name its sizes"):
        bench([Case(SPEC.generic(), 2, 2, 40, 1)], bundle=str(base_bundle))


def _rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    flags = ["--context", "64", "--rounds", "5", "--no-mlflow", "--json"]
    assert main(["bench", *arguments, *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema_version"] == SCHEMA_VERSION
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
