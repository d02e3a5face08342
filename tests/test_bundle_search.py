"""Where bundles are looked for, and what happens when one of them is not what was packaged."""

import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from bundle_tools import OTHER_SPEC, SPEC, V3, artifact, call, host, library, put

from tvmpaged import bundle
from tvmpaged.bundle import BundleError, find, host_for, search, user_cache
from tvmpaged.cpu import cpu_flags

pytestmark = pytest.mark.runtime

MODULE = sys.modules["tvmpaged.bundle.search"]


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TVMPAGED_BUNDLE", raising=False)
    monkeypatch.delenv("TVMPAGED_REQUIRE_SIGNATURE", raising=False)


def entry_point(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    points = [EntryPoint("some", value, "tvmpaged.bundles")]
    monkeypatch.setattr(MODULE, "entry_points", lambda group: points)


def sources() -> list[str]:
    return [each.source for each in search("/argument")]


def test_the_search_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry_point(monkeypatch, "os:getcwd")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVMPAGED_BUNDLE", os.pathsep.join(("/first", "", "/second")))
    (tmp_path / "mine").mkdir()
    folders = search(tmp_path / "mine")
    assert [(each.source, str(each.bundle)) for each in folders[:5]] == [
        ("argument", str(tmp_path / "mine")),
        ("TVMPAGED_BUNDLE", "/first"),
        ("TVMPAGED_BUNDLE", "/second"),
        ("user cache", str(tmp_path / "cache" / "tvmpaged" / "bundles")),
        ("entry point some", str(tmp_path)),
    ]
    assert {each.source for each in folders[5:]} == {"inside tvmpaged"}


def test_the_working_directory_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(tmp_path / "bundles", library(7, tmp_path), artifact())
    monkeypatch.chdir(tmp_path)
    assert all(tmp_path / "bundles" != each.bundle for each in search())


def test_an_entry_point_names_a_package_or_a_function(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (
        ("tp_package", ""),
        ("tp_function", "def where():\n    return __file__.rpartition('/')[0]\n"),
        ("tp_broken", "raise RuntimeError('no')\n"),
        ("tp_wrong", "where = 3\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        put(tmp_path / name, library(7, tmp_path), artifact())
    monkeypatch.syspath_prepend(tmp_path)
    for value, problem in (
        ("tp_package", ""),
        ("tp_function:where", ""),
        ("tp_broken", "tp_broken failed: RuntimeError: no"),
        ("tp_wrong:where", "names neither a package nor a function"),
    ):
        entry_point(monkeypatch, value)
        (found,) = [each for each in search() if each.source == "entry point some"]
        assert problem in found.problem
        if not problem:
            assert found.bundle == tmp_path / value.partition(":")[0]
            assert find(SPEC, host()).accepted.folder == found


def test_what_is_found_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "one", library(1, tmp_path), artifact())
    put(tmp_path / "two", library(2, tmp_path), artifact())
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(tmp_path / "two"))
    for argument, answer in ((tmp_path / "one", 1), (str(tmp_path / "one"), 1), (None, 2)):
        with find(SPEC, host(), argument).open() as path:
            assert call(path) == answer


def test_tuned_in_the_cache_beats_default_in_the_argument(tmp_path: Path) -> None:
    put(tmp_path / "mine", library(1, tmp_path), artifact())
    put(user_cache(), library(2, tmp_path), artifact(SPEC, "tuned"))
    put(user_cache(), library(3, tmp_path), artifact(OTHER_SPEC.generic(), "generic"))
    found = find(SPEC, host(), tmp_path / "mine")
    assert (found.accepted.kind, found.accepted.folder.source) == ("tuned", "user cache")
    assert find(OTHER_SPEC, host(), tmp_path / "mine").accepted.kind == "generic"


def test_a_bundle_that_was_tampered_with_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = put(tmp_path / "mine", library(1, tmp_path), artifact(SPEC, "tuned"))
    (file,) = folder.glob("*.so")
    file.write_bytes(library(666, tmp_path))
    with pytest.raises(FileNotFoundError, match=r"has sha256 .*, its manifest says"):
        find(SPEC, host(), tmp_path / "mine")
    put(user_cache(), library(2, tmp_path), artifact())
    found = find(SPEC, host(), tmp_path / "mine")
    assert found.accepted.folder.source == "user cache"
    assert "has sha256" in str(found.resolution.rejected[0])
    assert "has sha256" in caplog.text


def test_a_replaced_artifact_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer replaces the artifact between the manifest's reading and its own."""
    root = tmp_path / "mine"
    put(root, library(1, tmp_path), artifact())
    resolve = MODULE.resolve

    def then_replace(*args: object) -> object:
        decided = resolve(*args)
        new = bundle.Built(artifact(choices={"split_length": 256}), library(2, tmp_path))
        bundle.write(bundle.read_manifest(root, V3), [new], root, replace_existing=True)
        return decided

    monkeypatch.setattr(MODULE, "resolve", then_replace)
    with find(SPEC, host(), root).open() as path:
        assert call(path) == 2


def test_a_signature_can_be_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "mine", library(1, tmp_path), artifact())
    monkeypatch.setenv("TVMPAGED_REQUIRE_SIGNATURE", str(tmp_path / "missing.pem"))
    with pytest.raises(BundleError, match=r"missing.pem cannot be read as a public key"):
        find(SPEC, host(), tmp_path / "mine")


def test_this_machines_facts() -> None:
    found = host_for(V3)
    assert found.target == V3
    assert found.cpu_flags == cpu_flags()
    assert found.tvm_ffi_version.startswith("0.1.")
    assert found.runtime_version.startswith("0.27")
    assert host_for(V3, "0.28.1").runtime_version == "0.28.1"


def test_an_argument_that_names_no_folder_is_no_bundle_to_pass_over(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nope' is no folder"):
        search(tmp_path / "nope")
