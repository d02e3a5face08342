"""``bench`` measures what it says, and says what it measured."""

import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tvmpaged import PagedAttention
from tvmpaged.bench import SCHEMA_VERSION, Case, _interleave, bench
from tvmpaged.bench_case import Filled
from tvmpaged.cli.app import main
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.clock import CpuClock
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


def test_an_error_is_that_against_torch_in_float32(base_bundle: Path) -> None:
    filled = _filled(base_bundle, q_len=7)
    assert 0 < filled.error() < 1e-6
    filled.v *= 1.01
    assert filled.error() == pytest.approx(0.01, rel=0.05)


def _filled(base_bundle: Path, q_len: int) -> Filled:
    spec = SPEC if q_len == 1 else replace(SPEC, kernel="prefill")
    attn = PagedAttention(6, 2, 64, 16, "float32", bundle=base_bundle)
    return Filled.make(Case(spec, 2, 3, 37, q_len), attn, seed=0)


class FlashInfer(ModuleType):
    """A stand-in that computes from what FlashInfer is given: pages in a list, by sequence."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        self.__spec__ = ModuleSpec("flashinfer", None)
        self.planned: tuple[Any, ...] = ()

    def BatchDecodeWithPagedKVCacheWrapper(self, _work: Any, layout: str, **_: Any) -> Any:
        assert layout == "HND"

        def plan(starts: Any, pages: Any, last: Any, *sizes: int, q_data_type: Any) -> None:
            assert sizes == (6, 2, 64, 16)
            self.planned = torch.arange(len(last) + 1), starts, pages, last, False

        return SimpleNamespace(plan=plan, run=self.run)

    def BatchPrefillWithPagedKVCacheWrapper(self, _work: Any, layout: str) -> Any:
        assert layout == "HND"

        def plan(
            q: Any, starts: Any, pages: Any, last: Any, *sizes: int, causal: bool, q_data_type: Any
        ) -> None:
            assert sizes == (6, 2, 64, 16)
            self.planned = q, starts, pages, last, causal

        return SimpleNamespace(plan=plan, run=self.run)

    def run(self, q: torch.Tensor, caches: Any, out: torch.Tensor) -> torch.Tensor:
        q_starts, starts, pages, last, causal = self.planned
        for seq in range(len(last)):
            own = pages[starts[seq] : starts[seq + 1]].long()
            length = 16 * (len(own) - 1) + int(last[seq])
            k, v = (c[own].transpose(0, 1).reshape(2, -1, 64)[:, :length] for c in caches)
            rows = slice(int(q_starts[seq]), int(q_starts[seq + 1]))
            new = q[rows].transpose(0, 1)
            seen = torch.arange(length) <= torch.arange(new.shape[1])[:, None] + (
                length - new.shape[1] if causal else length
            )
            out[rows] = torch.nn.functional.scaled_dot_product_attention(
                new, k.repeat_interleave(3, 0), v.repeat_interleave(3, 0), attn_mask=seen
            ).transpose(0, 1)
        return out


@pytest.mark.parametrize("q_len", [1, 7])
def test_flashinfer_is_given_the_same_step(
    base_bundle: Path, q_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = _filled(base_bundle, q_len)
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInfer())
    assert filled.flashinfer_attention() is None  # it computes on GPUs alone
    monkeypatch.setattr(Filled, "is_on_gpu", True)
    call = filled.flashinfer_attention()
    assert call is not None
    expected = filled.ours().clone()
    filled.out.zero_()
    assert torch.allclose(call(), expected, atol=1e-5)


def test_a_gpu_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--spec", str(SPEC), "--device", "cuda:0"]) == 2
    assert "the CUDA driver finds none" in capsys.readouterr().err


def test_a_turn_begins_with_a_call_that_is_not_timed() -> None:
    log: list[str] = []
    contenders = {name: lambda name=name: log.append(name) for name in "abc"}
    times = _interleave(contenders, 3, CpuClock)
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
