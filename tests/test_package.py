"""Packaging: from specs and records to a bundle, in compiler processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bundle_tools import OTHER_SPEC, SPEC, V3, V4, build_with_gcc, call
from record_tools import edited, make_record

from tvmpaged import bundle, records
from tvmpaged import package as package_module
from tvmpaged.build import source_sha256
from tvmpaged.bundle import BundleError, read_manifest
from tvmpaged.cli.app import main
from tvmpaged.cpu import cpu_model, num_threads
from tvmpaged.package import Packaged, base_specs, package, parse_target
from tvmpaged.provenance import git_state
from tvmpaged.records import Record
from tvmpaged.schedules import default_choices
from tvmpaged.show import show_bundles
from tvmpaged.spec import AttentionSpec, TargetKey, native_family

CHOICES = default_choices(SPEC, V3)


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most libraries here are made by gcc and compute nothing."""
    monkeypatch.setattr(package_module, "try_out", lambda *_: ({}, ""))


def pack(tmp_path: Path, *specs: AttentionSpec, **options: Any) -> Packaged:
    options = {"compile_with": build_with_gcc, "records_dir": tmp_path / "logs"} | options
    (found,) = package(specs, [V3], tmp_path / "bundle", **options)
    return found


def record(folder: Path, **changes: Any) -> Record:
    """Write a record; changes are of its file, so that it may be wrong."""
    choices = CHOICES | {"split_length": 256}
    made = make_record(spec=SPEC, target=V3, choices=choices, source_sha256=source_sha256("cpu"))
    path = records.save(folder, made)
    data = edited(made, **changes)
    path.write_text(json.dumps(data))
    return replace(made, record_id=data["record_id"])


def test_untuned_specs_become_defaults_and_generic_ones_generic(tmp_path: Path) -> None:
    done = pack(tmp_path, SPEC, SPEC.generic(), jobs=2)
    assert not done.failures
    found = read_manifest(tmp_path / "bundle", V3)
    kinds = {each.spec: each.kind for each in found.artifacts}
    assert kinds == {SPEC: "default", SPEC.generic(): "generic"}
    assert found.artifacts[0].source_sha256 == source_sha256("cpu")
    assert found.git.commit == git_state().commit
    assert found.built_with.tvm.startswith("0.27")
    assert found.built_with.linker
    entry = found.find(SPEC)
    assert entry is not None
    assert entry.choices == CHOICES
    with bundle.open_artifact(tmp_path / "bundle", V3, entry) as path:
        assert call(path) == 116


def test_a_record_becomes_a_tuned_artifact(tmp_path: Path) -> None:
    made = record(tmp_path / "logs")
    pack(tmp_path, SPEC)
    entry = read_manifest(tmp_path / "bundle", V3).artifacts[0]
    assert (entry.kind, entry.record_id, entry.mlflow_run_id) == ("tuned", made.record_id, "run")
    assert (entry.measured_us, entry.measured_on, entry.num_threads) == (12.5, "A CPU", 2)
    assert entry.choices["split_length"] == 256


def test_a_stale_record_gives_its_choices_but_no_time(tmp_path: Path) -> None:
    made = record(tmp_path / "logs", source_sha256="0" * 64)
    done = pack(tmp_path, SPEC)
    entry = read_manifest(tmp_path / "bundle", V3).artifacts[0]
    assert (entry.kind, entry.record_id, entry.measured_us) == ("tuned", made.record_id, None)
    assert "the record is stale" in done.notes[0]
    assert done.states == {SPEC: "stale"}
    assert entry.state(V3) == "stale"  # nothing says how fast it is
    ((row,), _) = show_bundles(tmp_path / "bundle")
    assert row.state == "stale"


def test_a_record_of_another_device_or_thread_count_is_said(tmp_path: Path) -> None:
    here = {"device": cpu_model(), "num_threads": num_threads()}
    record(tmp_path / "logs", **here)
    done = pack(tmp_path, SPEC, OTHER_SPEC)
    assert (done.states, done.notes) == ({SPEC: "current"}, ())
    for changes in ({"device": "Z80"}, {"num_threads": num_threads() + 1}):
        record(tmp_path / "logs", **(here | changes))
        done = pack(tmp_path, SPEC)
        assert done.states == {SPEC: "tuned elsewhere"}
        (note,) = done.notes
        assert f"tuned elsewhere: on {changes.get('device', cpu_model())} with" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 3}, "schema version 3, not 2"),
        ({"spec": str(OTHER_SPEC)}, "is the record of prefill"),
        ({"target": str(V4)}, "for cpu/x86-64-v4"),
        ({"choices": 3}, "is no record"),
        (
            {"choices": CHOICES | {"prefetch_keys": 12345}},
            "prefetch_keys=12345 is not in the space",
        ),
        ({"choices": {"step": "rows"}}, "its options are not those of the space"),
    ],
)
def test_a_wrong_record_fails_its_spec_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    record(tmp_path / "logs", **changes)
    done = pack(tmp_path, SPEC, OTHER_SPEC)
    assert message in done.failures[SPEC]
    assert [each.spec for each in done.merge.taken] == [OTHER_SPEC]


def test_a_spec_that_fails_is_not_called_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "logs", schema_version=3)
    monkeypatch.chdir(tmp_path)
    code = main(["package", "--target", str(V3), "--spec", str(SPEC), "--records", "logs"])
    assert code == 1
    err = capsys.readouterr().err
    assert "schema version 3" in err
    assert "already there" not in err
    assert "bundles" not in err


def test_only_the_targets_own_records_are_used(tmp_path: Path) -> None:
    record(tmp_path / "logs")
    assert records.load(tmp_path / "logs", V4, SPEC) is None
    assert records.specs(tmp_path / "logs", V3) == [SPEC]
    assert records.specs(tmp_path / "logs", V4) == []


def test_a_spec_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    specs = [replace(SPEC, block_size=size) for size in (12, 13, 14, 15)]
    notes: list[tuple[int, int, str]] = []
    done = pack(tmp_path, *specs, jobs=2, progress=lambda *args: notes.append(args))
    assert done.failures == {
        specs[1]: "the compiler's process died",
        specs[2]: "choices cannot be built: no",
    }
    assert done.num_refused == 2
    assert len(read_manifest(tmp_path / "bundle", V3).artifacts) == 2
    assert [each[:2] for each in notes] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_what_is_there_is_not_compiled_again(tmp_path: Path) -> None:
    pack(tmp_path, SPEC)
    again = pack(tmp_path, SPEC, compile_with=must_not_be_called)
    assert [each.spec for each in again.merge.unchanged] == [SPEC]
    assert not again.num_refused
    record(tmp_path / "logs")
    kept = pack(tmp_path, SPEC, compile_with=must_not_be_called)
    assert "kind is 'default' and would be 'tuned' now" in str(kept.merge.kept[0])
    assert kept.num_refused == 1
    done = pack(tmp_path, SPEC, OTHER_SPEC, replace_existing=True)
    assert [each.kind for each in done.merge.replaced] == ["default"]


def must_not_be_called(*args: object) -> None:
    raise AssertionError("compiled again")


def test_a_failed_compilation_never_costs_what_is_there(tmp_path: Path) -> None:
    pack(tmp_path, SPEC, OTHER_SPEC)
    record(tmp_path / "logs")
    done = pack(tmp_path, SPEC, replace_existing=True, compile_with=must_not_be_called)
    assert done.failures[SPEC] == "AssertionError: compiled again"
    assert len(read_manifest(tmp_path / "bundle", V3).artifacts) == 2


def test_several_targets_and_the_base_set(tmp_path: Path) -> None:
    specs = base_specs()
    assert len(specs) == len(set(specs))
    assert all(each.is_generic for each in specs)
    for each in (
        AttentionSpec.make("decode", "float32", 80, 7, 3, kv_dtype="bfloat16", layout="NHD"),
        AttentionSpec.make("prefill", "float16", 512, 71, 256),
        AttentionSpec.make("append_kv", "float32", kv_dtype="float16"),
        AttentionSpec.make("merge", "bfloat16"),
        AttentionSpec.make("copy_blocks", "float32"),
    ):
        assert each.generic() in specs
    found = package([SPEC], [V3, V4, V3], tmp_path, compile_with=build_with_gcc)
    assert [each.target for each in found] == [V3, V4]
    assert not any(each.failures for each in found)


def test_one_kernel_of_a_native_cache_brings_those_that_share_it(tmp_path: Path) -> None:
    native = replace(SPEC, layout="native")
    done = pack(tmp_path, native)
    assert not done.failures
    found = read_manifest(tmp_path / "bundle", V3).artifacts
    assert {each.spec for each in found} == set(native_family(native).values())
    assert {each.choices["layout"] for each in found} == {"HND"}  # of a CPU without tiles


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to package"):
        pack(tmp_path)
    with pytest.raises(ValueError, match="jobs=0"):
        pack(tmp_path, SPEC, jobs=0)
    with pytest.raises(ValueError, match="target=cpu/pentium is not known; allowed: native, cpu/"):
        package([SPEC], [TargetKey("cpu", "pentium")], tmp_path)
    with pytest.raises(BundleError, match="cannot be read as a private key"):
        pack(tmp_path, SPEC, sign=tmp_path / "none")
    assert parse_target("native").kind == "cpu"
    assert parse_target("cpu/x86-64-v3") == V3
    assert str(parse_target("cuda/sm_90a/nvidia-h200")) == "cuda/sm_90a/nvidia-h200"


def test_compiler_processes_end_with_their_parent(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from bundle_tools import SPEC, V3\n"
        "from tvmpaged.compile_pool import Job, compile_all\n"
        "import test_package\n"
        "if __name__ == '__main__':\n"
        "    for _ in compile_all([Job(SPEC, V3, {})], 1, test_package.tell_and_sleep): pass\n"
    )
    (tmp_path / "main.py").write_text(code)
    tests = str(Path(__file__).parent)
    environment = {**os.environ, "TELL": str(tmp_path / "pid"), "PYTHONPATH": tests}
    parent = subprocess.Popen([sys.executable, tmp_path / "main.py", tests], env=environment)
    worker = int(wait_for(lambda: (tmp_path / "pid").read_text()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{worker}").exists() or is_zombie(worker))


def tell_and_sleep(spec: object, target: object, choices: object, path: Path) -> None:
    Path(os.environ["TELL"] + ".new").write_text(str(os.getpid()))
    Path(os.environ["TELL"] + ".new").rename(os.environ["TELL"])
    time.sleep(60)


def is_zombie(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(condition: Any, seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.02)
    raise TimeoutError


def test_killed_while_packaging_the_bundle_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    """The whole command's work, killed at random moments; the next run finishes it."""
    pack(tmp_path, SPEC)
    code = (
        "import sys; from pathlib import Path\n"
        "from bundle_tools import OTHER_SPEC, SPEC, V3, build_with_gcc\n"
        "from tvmpaged.package import package\n"
        "if __name__ == '__main__':\n"
        "    print('go', flush=True)\n"
        "    package([OTHER_SPEC], [V3], Path(sys.argv[1]), compile_with=build_with_gcc)\n"
    )
    (tmp_path / "main.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for delay in (0.02, 0.3, 0.8):
        command = [sys.executable, str(tmp_path / "main.py"), str(tmp_path / "bundle")]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(delay)
            child.send_signal(signal.SIGKILL)
        found = {each.spec for each in read_manifest(tmp_path / "bundle", V3).artifacts}
        assert found in ({SPEC}, {SPEC, OTHER_SPEC})
    pack(tmp_path, OTHER_SPEC)
    assert len(read_manifest(tmp_path / "bundle", V3).artifacts) == 2
