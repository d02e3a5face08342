"""``tvmpaged tune`` as a user calls it: a small real search, and what the command line says."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from tvmpaged import records, schedules, tune
from tvmpaged.build import source_sha256
from tvmpaged.cli import app, tune_view
from tvmpaged.cli.tune import kv_heads, parse_seconds
from tvmpaged.cli.tune_view import _latest, _table, plain_line
from tvmpaged.cpu import cpu_model, native_target, num_threads
from tvmpaged.roofs import CREDIBLE
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.status import Status
from tvmpaged.tuning.workload import Workload

SPEC = AttentionSpec.make("decode", "float32", 64, 3, 16)
TARGET = native_target()
FLAGS = "--num-qo-heads 9 --num-kv-heads 3 --head-dim 64 --dtype float32 --kernel decode".split()


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any], str]:
    """Return folder, exit code, JSON and stderr of one real search."""
    folder = tmp_path_factory.mktemp("tune")
    arguments = [*FLAGS, "--trials", "5", "--time-limit", "60s", "--no-mlflow", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tvmpaged", "tune", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return folder, done.returncode, json.loads(done.stdout), done.stderr


def test_a_search_writes_a_record_that_says_all_it_holds_for(
    searched: tuple[Path, int, dict[str, Any], str],
) -> None:
    folder, code, _, _ = searched
    assert code == 0
    record = records.load(folder / "tuning_logs", TARGET, SPEC)
    assert record is not None
    assert schedules.reject(SPEC, TARGET, record.choices) is None
    assert list(record.choices) == list(schedules.space(SPEC, TARGET))
    assert record.source_sha256 == source_sha256("cpu")
    assert (record.device, record.num_threads) == (cpu_model(), num_threads())
    assert record.workload == json.loads(json.dumps(Workload.representative(SPEC, 3).as_dict()))
    assert record.trials == 5
    assert record.latency_us.repeats >= 5
    assert record.latency_us.p10 <= record.latency_us.median <= record.latency_us.p90
    expected = Workload.representative(SPEC, 3).kv_bytes(SPEC) / record.median_us / 1e3
    assert record.gb_per_s == pytest.approx(expected, abs=1e-3)
    assert record.roof_gflop_per_s is None
    # On a busy machine what was measured beside the winner may be no roof.
    assert (record.roof_gb_per_s is None) == (record.roof_fraction is None)
    if record.roof_fraction is not None:
        assert 0.0 < record.roof_fraction <= CREDIBLE
    assert record.gpu is None
    default = schedules.default_choices(SPEC, TARGET)
    assert record.is_default == (record.choices == default)
    assert record.speedup >= 1.0


def test_stdout_holds_json_alone_and_stderr_plain_lines(
    searched: tuple[Path, int, dict[str, Any], str],
) -> None:
    folder, _, printed, stderr = searched
    (only,) = printed["specs"]
    record = records.load(folder / "tuning_logs", TARGET, SPEC)
    assert printed["schema_version"] == tune.SCHEMA_VERSION
    assert record is not None
    assert only["record"] == json.loads(json.dumps(record.as_dict()))
    assert "\x1b" not in stderr
    busy = f"warning: {SPEC}: the machine was busy"  # as it is where tests run side by side
    lines = [line for line in stderr.splitlines() if not line.startswith(busy)]
    assert all(line.startswith(str(SPEC)) for line in lines), stderr
    assert " of the roof" in lines[-1]


def test_the_folder_holds_record_log_and_summary(
    searched: tuple[Path, int, dict[str, Any], str],
) -> None:
    folder = records.folder(searched[0] / "tuning_logs", TARGET, SPEC)
    assert {file.name for file in folder.iterdir()} == {
        ".lock",
        "record.json",
        "trials.jsonl",
        "summary.md",
    }
    assert "times as fast as the default" in (folder / "summary.md").read_text()
    record = records.load(searched[0] / "tuning_logs", TARGET, SPEC)
    assert record is not None
    has_roof = "of the measured roof: timed in turns with it" in (folder / "summary.md").read_text()
    assert has_roof == (record.roof_fraction is not None)
    roofs = [
        each
        for each in map(json.loads, (folder / "trials.jsonl").read_text().splitlines())
        if each["kind"] == "roof"
    ]
    assert [each["name"] for each in roofs] == ["gb_per_s"] * (1 + has_roof)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: signal.Signals, code: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "tvmpaged", "tune", *FLAGS, "--trials", "500", "--no-mlflow"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = records.folder(tmp_path / "tuning_logs", TARGET, SPEC) / "trials.jsonl"
    try:
        end = time.monotonic() + 120
        while not log.exists() and time.monotonic() < end and child.poll() is None:
            time.sleep(0.1)
        workers = [each.pid for each in psutil.Process(child.pid).children()]
        assert len(workers) > 1
        child.send_signal(number)
        _, said = child.communicate(timeout=60)
        assert child.returncode == code
        assert "goes on with --resume" in said.splitlines()[-1]
    finally:
        child.kill()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert log.read_bytes().endswith(b"\n")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("TVMPAGED_", "MLFLOW_")):
            monkeypatch.delenv(name)

    def call(*argv: str) -> tuple[int, str, str]:
        code = app.main(["tune", *argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_a_dry_run_says_what_would_run_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*FLAGS, "--kernel", "prefill", "--trials", "32", "--dry-run", "--json")
    assert code == 0
    plan = json.loads(out)["specs"]
    assert [each["spec"].split("-")[0] for each in plan] == ["decode", "prefill"]
    assert all(each["num_kv_heads"] == 3 and each["trials"] == 32 for each in plan)
    assert all(each["seconds"] > 0 and each["combinations"] > 1000 for each in plan)
    assert list(tmp_path.iterdir()) == []


ABSENT = "raise ModuleNotFoundError(\"No module named 'xgboost'\", name='xgboost')"


@pytest.mark.parametrize(("module", "said"), [(ABSENT, "not installed"), ("", "not whole")])
def test_without_xgboost_it_says_what_to_install_before_anything_is_searched(
    tmp_path: Path, module: str, said: str
) -> None:
    (tmp_path / "xgboost.py").write_text(module)
    arguments = [*FLAGS, "--trials", "8", "--no-mlflow"]
    done = subprocess.run(
        [sys.executable, "-m", "tvmpaged", "tune", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert said in line
    assert line.endswith("run: pip install 'tvmpaged[tune]'")
    assert not (tmp_path / "tuning_logs").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no spec is given"),
        ((*FLAGS, "--time-limit", "soon"), "write 90s, 10m or 2h"),
        ((*FLAGS, "--target", "cpu/znver4"), "is not this machine"),
        ((*FLAGS, "--target", "gpu"), "cannot be read"),
        ((*FLAGS, "--mlflow-uri", "./mlruns"), "--mlflow-uri sqlite:///./mlruns/mlflow.db"),
        (("--spec", str(SPEC.generic())), "cannot be tuned"),
        (("--spec", str(AttentionSpec.make("merge", "float32"))), "cannot be tuned"),
        ((*FLAGS, "--trials", "1"), "trials"),
    ],
)
def test_bad_arguments_are_named(run: Run, flags: tuple[str, ...], said: str) -> None:
    code, out, err = run(*flags)
    assert code == 2, err
    assert said in err
    assert out == ""
    assert "Traceback" not in err


def fake_tune(*failed: str) -> Any:
    def call(specs: Any, *args: Any, **options: Any) -> list[tune.Tuned]:
        return [
            tune.Tuned(each, failure="it failed")
            if each.kernel in failed
            else tune.Tuned(each, _record(each))
            for each in specs
        ]

    return call


def _record(spec: AttentionSpec) -> records.Record:
    latency = records.Latency(10.0, 9.0, 11.0, 5)
    return records.Record(
        spec=spec, target=TARGET, choices={}, is_default=False, source_sha256="", tvm="",
        tvm_ffi="", device="", num_threads=1, caches_bytes={}, rotation_bytes=0,
        latency_us=latency, default_latency_us=latency, speedup=1.0, gb_per_s=1.0,
        gflop_per_s=None, roof_gb_per_s=None, roof_gflop_per_s=None, roof_fraction=None, gpu=None,
        workload={}, trials=2, failures={}, seed=0, mlflow_run_id=None,
        created_at="",
    )  # fmt: skip


def test_a_full_disk_names_the_file_and_how_to_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "tuning_logs/x/trials.jsonl")

    monkeypatch.setattr(tune, "tune", full)
    code, out, err = run(*FLAGS)
    assert (code, out) == (1, "")
    assert "left to write tuning_logs/x/trials.jsonl" in err
    assert "--resume" in err


def test_a_signal_after_the_last_spec_takes_no_result_away(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closing(specs: Any, *_: Any, on_result: Any, **__: Any) -> None:
        for each in specs[:done]:
            on_result(tune.Tuned(each, _record(each)))
        raise KeyboardInterrupt  # while MLflow is closed

    monkeypatch.setattr(tune, "tune", closing)
    done = 2
    code, out, err = run(*FLAGS, "--kernel", "prefill")
    assert code == 130
    assert len(out.splitlines()) == 3
    assert "every spec was done" in err
    assert "--resume" not in err
    done = 1
    code, out, err = run(*FLAGS, "--kernel", "prefill")
    assert (code, out) == (130, "")
    assert "given up" in err


def test_a_dry_run_refuses_what_the_run_would(run: Run) -> None:
    code, _, err = run(*FLAGS, "--dry-run", "--mlflow-uri", "/tmp/runs")
    assert code == 2
    assert "is a plain folder" in err


@pytest.mark.parametrize(
    ("failed", "code"), [((), 0), (("decode",), 3), (("decode", "prefill"), 1)]
)
def test_exit_codes_tell_some_from_all(
    run: Run, monkeypatch: pytest.MonkeyPatch, failed: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr(tune, "tune", fake_tune(*failed))
    found, out, err = run(*FLAGS, "--kernel", "prefill")
    assert found == code
    assert err.count("error: it failed") == len(failed)
    assert len(out.splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, None), ("90", 90), ("90s", 90), ("1.5m", 90), (" 2h ", 7200)]
)
def test_times_are_read(text: str | None, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-1m", "3 days", "1e3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--time-limit"):
        parse_seconds(text)


def test_kv_heads_come_from_flags_and_matrix_the_first_first(tmp_path: Path) -> None:
    from tvmpaged.cli.spec_options import SpecFlags

    matrix = tmp_path / "m.toml"
    tables = (
        "group_size = 1\nhead_dim = 64",
        "num_qo_heads = 16\nnum_kv_heads = 4\nhead_dim = 256",
    )
    matrix.write_text("".join(f"[[specs]]\n{each}\nkernel = 'decode'\n" for each in tables))
    flags = SpecFlags(
        matrix=[matrix],
        num_qo_heads=[9, 32, 6],
        num_kv_heads=[3, 8, 2],
        head_dim=[64],
        kernel=["decode"],
    )
    found = {(spec.head_dim, spec.group_size): heads for spec, heads in kv_heads(flags).items()}
    # Of one group size, each head_dim has heads of its own; where none are named there are none.
    assert found == {(256, 4): 4, (64, 3): 3, (64, 4): 8}
    assert {spec.group_size for spec in flags.specs()} == {1, 3, 4}


def test_a_status_is_one_plain_line() -> None:
    status = Status(SPEC, "search", 8, 64, 1, 740.2, 881.0, 1.19, "gb_per_s", 16.93, 0.672, 42.4)
    assert plain_line(status) == (
        f"{SPEC} search: trials 8/64, failed 1, best 740 us, 16.9 GB/s, 67% of the roof, "
        "speed-up 1.19, left 42 s"
    )
    start = plain_line(Status(SPEC, "start", 0, 64))
    assert "best - us" in start


def test_a_workload_counts_what_is_read_and_computed() -> None:
    # One sequence, 2 new tokens after 3: they see 4 and 5 keys. 2 heads x 3 rows, 64 + 64 wide.
    prefill = AttentionSpec.make("prefill", "float32", 64, 3, 16)
    workload = Workload(2, (2,), (5,))
    assert workload.flops(prefill) == 2 * (2 * 3) * (4 + 5) * (64 + 64)
    assert workload.kv_bytes(prefill) == 5 * 2 * (64 + 64) * 4
    assert workload.rate(SPEC, 10.0) == ("gb_per_s", 5 * 2 * 128 * 4 / 10.0 / 1e3)
    assert Workload.from_dict(json.loads(json.dumps(workload.as_dict()))) == workload


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_table_names_each_spec_whole_on_a_narrow_terminal(width: int) -> None:
    status = Status(SPEC, "search", 8, 64, 1, 740.2, 881.0, 1.19, "gb_per_s", 16.93, 0.672, 42.4)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(_table([status, Status(SPEC, "start", 0, 64)]))
    text = console.export_text().splitlines()
    first, second = (index for index, line in enumerate(text) if line.startswith(f"{SPEC} "))
    assert (first, second) == (0, 3 if width == 80 else 2)
    assert "━" in text[first]
    for part in ("8/64", " 740 us", "16.9 GB/s", "67%", "1.19", "42 s"):
        assert part in " ".join(text[first:second])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_of_many_specs_the_live_table_shows_the_latest(width: int) -> None:
    specs = [replace(SPEC, head_dim=8 * number) for number in range(1, 31)]
    console = Console(width=width, height=12, record=True, file=io.StringIO())
    for count in (1, 30):
        console.print(_latest([Status(each, "search", 8, 64) for each in specs[:count]], console))
        text = console.export_text().splitlines()
        assert len(text) < 12
        names = "".join(line.replace("━", "").strip() for line in text)
        assert str(specs[count - 1]) in names
        assert (str(specs[0]) in names) == (count < 30)


def test_on_a_terminal_the_spec_that_is_searched_is_in_sight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    console = Console(width=80, height=12, file=screen, force_terminal=True)
    monkeypatch.setattr(tune_view, "stderr_console", lambda: console)
    with tune_view.show_progress() as on_status:
        for number in range(1, 31):
            spec = replace(SPEC, head_dim=8 * number)
            begin = screen.tell()
            on_status(Status(spec, "search", 8, 64))
            assert str(spec) in screen.getvalue()[begin:]
