"""``verify``, ``show`` and ``package`` as a user meets them."""

import json
from pathlib import Path
from typing import Any

import pytest
from bundle_tools import OTHER_SPEC, SPEC, V3, artifact, header, key_pair, library, put

from tvmpaged import records, verify_numbers
from tvmpaged.build import source_sha256
from tvmpaged.bundle import BundleError, load_private_key, read_manifest, write
from tvmpaged.cli.app import main
from tvmpaged.cpu import cpu_model, native_target, num_threads
from tvmpaged.package import package, recorded_specs
from tvmpaged.runtime.attention import PagedAttention
from tvmpaged.show import show_bundles
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.verify import Check, verify

NATIVE = native_target()


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TVMPAGED_BUNDLE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of real kernels: one decode kernel, and what writes, copies and merges."""
    root = tmp_path_factory.mktemp("real") / "bundle"
    others = [AttentionSpec.make(name, "float32") for name in ("merge", "append_kv", "copy_blocks")]
    (done,) = package([SPEC, *others], [NATIVE], root, records_dir=root, jobs=2)
    assert not done.failures
    return root


def outcomes(checks: list[Check], name: str) -> list[str]:
    return [each.outcome for each in checks if each.name == name]


def failures(checks: list[Check]) -> str:
    return "\n".join(each.detail for each in checks if each.outcome == "failed")


def test_a_sound_bundle_passes_and_what_was_not_run_is_said(tmp_path: Path) -> None:
    put(tmp_path / "bundle", library(1, tmp_path), artifact())
    checks = verify(tmp_path / "bundle")
    assert not failures(checks)
    assert outcomes(checks, "files") == outcomes(checks, "hash") == ["ok"]
    assert outcomes(checks, "signature") == outcomes(checks, "numbers") == ["not run"]


def test_every_broken_file_is_found(tmp_path: Path) -> None:
    folder = put(tmp_path / "bundle", library(1, tmp_path), artifact())
    (tmp_path / "bundle" / "cpu" / "stray.so").write_text("")
    next(folder.glob("*.so")).write_bytes(b"other")
    checks = verify(tmp_path / "bundle", make_attention=must_not_be_called)
    assert "its manifest says" in failures(checks)
    assert outcomes(checks, "numbers") == ["not run"]
    assert any(each.what.endswith("stray.so") for each in checks if each.outcome == "failed")
    (folder / "manifest.json").unlink()
    assert "manifest.json cannot be opened" in failures(verify(tmp_path / "bundle"))


def must_not_be_called(*args: object, **options: object) -> None:
    raise AssertionError("loaded")


def test_a_stray_folder_is_found(tmp_path: Path) -> None:
    put(tmp_path / "bundle", library(1, tmp_path), artifact())
    (tmp_path / "bundle" / "cuda" / "sm_90").mkdir(parents=True)
    (tmp_path / "bundle" / "cuda" / "sm_90" / "x.so").write_text("")
    assert "x.so" in failures(verify(tmp_path / "bundle"))


def test_a_signature_can_be_required(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path / "mine")
    _, other = key_pair(tmp_path / "other")
    put(tmp_path / "bundle", library(1, tmp_path), artifact())
    assert "manifest.json.sig" in failures(verify(tmp_path / "bundle", require_signature=public))
    write(header(), [], tmp_path / "bundle", key=load_private_key(private))
    assert outcomes(verify(tmp_path / "bundle", require_signature=public), "signature") == ["ok"]
    assert "not by the required key" in failures(
        verify(tmp_path / "bundle", require_signature=other)
    )
    with pytest.raises(BundleError, match="cannot be read as a public key"):
        verify(tmp_path / "bundle", require_signature=tmp_path / "none.pem")


def test_no_bundle_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder"):
        verify(tmp_path / "none")
    assert failures(verify(tmp_path)) == "holds no target folder such as cpu/x86-64-v3"


@pytest.mark.slow
def test_the_numbers_of_real_kernels(real: Path) -> None:
    checks = verify(real, make_attention=PagedAttention)
    assert outcomes(checks, "numbers") == ["ok"] * 4


class Wrong(PagedAttention):
    def run(self, *args: Any, **options: Any) -> Any:
        return super().run(*args, **options) * 1.001

    def append_kv(self, k: Any, v: Any, *others: Any) -> None:
        super().append_kv(v, k, *others)

    def copy_blocks(self, *args: Any) -> None:
        pass


@pytest.mark.slow
def test_wrong_numbers_are_found(real: Path) -> None:
    checks = verify(real, make_attention=Wrong)
    assert outcomes(checks, "numbers") == ["failed"] * 4
    assert "error 1.00e-03, at most 1.0e-05" in failures(checks)


class Raises(PagedAttention):
    def plan(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel image")


@pytest.mark.slow
def test_a_kernel_that_raises_is_a_failure_and_the_others_are_tried(real: Path) -> None:
    checks = verify(real, make_attention=Raises)
    assert sorted(outcomes(checks, "numbers")) == ["failed", "failed", "ok", "ok"]
    assert "RuntimeError: no kernel image" in failures(checks)


@pytest.mark.slow
def test_an_artifact_that_is_not_served_is_said(real: Path) -> None:
    found = artifact(SPEC, sha256="0" * 64)
    with pytest.raises(verify_numbers.NotServedError, match="another artifact"):
        verify_numbers.attention_of(
            found, lambda *args, **options: PagedAttention(*args, bundle=real, **options)
        )


def test_another_machines_artifacts_are_not_run(tmp_path: Path) -> None:
    target = TargetKey("cuda", "sm_90", "nvidia-h200")
    put(tmp_path / "bundle", library(1, tmp_path), artifact(), target=target)
    checks = verify(tmp_path / "bundle", make_attention=must_not_be_called)
    assert outcomes(checks, "runs here") == outcomes(checks, "numbers") == ["not run"]
    assert not failures(checks)


def test_states(tmp_path: Path) -> None:
    here = {"measured_on": cpu_model(), "num_threads": num_threads(), "measured_us": 1.0}
    for state, changes in (
        ("stale", here),
        ("current", here | {"source_sha256": source_sha256("cpu")}),
        ("stale", {"source_sha256": source_sha256("cpu")}),  # its record was
        ("tuned elsewhere", here | {"source_sha256": source_sha256("cpu"), "measured_on": "Z80"}),
        ("tuned elsewhere", here | {"source_sha256": source_sha256("cpu"), "num_threads": 999}),
    ):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        put(root, library(1, tmp_path), artifact(SPEC, "tuned", **changes))
        rows, problems = show_bundles(root)
        assert [row.state for row in rows] == [state]
        assert not problems


def test_show_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "bundle", library(1, tmp_path), artifact(SPEC, "tuned", measured_us=12.34))
    assert main(["show", "bundle"]) == 0
    text = capsys.readouterr().out
    assert str(SPEC) in text
    assert "12.3" in text
    assert main(["show", "bundle", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"][0]["kind"] == "tuned"
    assert data["problems"] == []
    assert main(["show", "none"]) == 1
    assert main(["show"]) == 0
    err = capsys.readouterr().err
    assert "cannot be opened" in err
    assert "tvmpaged package writes some" in err
    assert main(["show", "bundle", "--records"]) == 2


def test_show_records_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_package import record

    record(tmp_path / "tuning_logs", device=cpu_model(), num_threads=num_threads())
    assert main(["show", "--records", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["kind"], row["state"], row["median_us"]) == ("record", "current", 12.5)


@pytest.mark.parametrize("what", ["--records", "--options"])
def test_where_nothing_was_tuned_yet_there_is_nothing_to_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    assert main(["show", what]) == 0
    assert "tvmpaged tune writes them" in capsys.readouterr().err
    assert main(["show", what, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.get("rows", data.get("options")) == []
    # A folder that was named is another matter.
    assert main(["show", what, "--work-dir", "none"]) == 1
    assert "work-dir='none' is no folder" in capsys.readouterr().err


def test_a_record_that_is_broken_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from test_package import record

    made = record(tmp_path / "tuning_logs", device=cpu_model(), num_threads=num_threads())
    other = records.folder(tmp_path / "tuning_logs", made.target, OTHER_SPEC) / "record.json"
    for text in ("{", "[]", "\x80\x04K\x01."):
        other.parent.mkdir(exist_ok=True)
        other.write_text(text)
        assert main(["show", "--records", "--json"]) == 3
        data = json.loads(capsys.readouterr().out)
        assert [row["spec"] for row in data["rows"]] == [str(SPEC)]
        (problem,) = data["problems"]
        assert problem["place"].endswith(f"{OTHER_SPEC}/record.json")
        assert "is no record" in problem["reason"]
        assert main(["show", "--records"]) == 3
        captured = capsys.readouterr()
        assert str(SPEC) in captured.out
        assert "is no record" in captured.err
        assert captured.err.count("record.json") == 1
    # And it is packaged beside the one that fails by name.
    assert recorded_specs(tmp_path / "tuning_logs", [made.target]) == [SPEC, OTHER_SPEC]


def test_verify_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(tmp_path / "bundle", library(1, tmp_path), artifact())
    assert main(["verify", "bundle", "--static", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["failed"], data["ok"], data["not run"]) == (0, 3, 2)
    folder.chmod(0o777)
    assert main(["verify", "bundle"]) == 1
    assert "may be written by group and others" in capsys.readouterr().out
    assert main(["verify", "bundle", "--static", "--numbers"]) == 2
    assert main(["verify", "none"]) == 1


@pytest.mark.slow
def test_package_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = str(AttentionSpec.make("copy_blocks", "float32"))
    private, public = key_pair(tmp_path / "key")
    command = ["package", "--target", str(V3), "--spec", spec, "--sign", str(private), "--install"]
    assert main([*command, "--json"]) == 0
    (done,) = json.loads(capsys.readouterr().out)["targets"]
    assert list(done["taken"]) == [spec]
    installed = tmp_path / "cache" / "tvmpaged" / "bundles"
    assert str(read_manifest(installed, V3).artifacts[0].spec) == spec
    assert main(["verify", str(installed), "--require-signature", str(public)]) == 0
    assert main([*command]) == 0
    assert "unchanged" in capsys.readouterr().out
    assert main(["package", "--target", "native"]) == 2
    assert "no spec is given" in capsys.readouterr().err
    assert main(["package", "--all-records"]) == 2
    assert "holds no record" in capsys.readouterr().err
