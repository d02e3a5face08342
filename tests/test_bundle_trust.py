"""A bundle is code: what is not exactly what was packaged is refused before it is loaded."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_tools import SPEC, V3, artifact, call, header, host, library, put, put_raw

from tvmpaged import bundle
from tvmpaged.bundle import BundleError, read_manifest, resolve, scan, trust

pytestmark = pytest.mark.runtime


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path / "bundle", library(7, tmp_path), artifact())
    return tmp_path / "bundle"


@pytest.fixture
def folder(root: Path) -> Path:
    return root / str(V3)


def so_file(folder: Path) -> Path:
    (found,) = folder.glob("*.so")
    return found


def load(root: Path) -> int:
    """Do what serving does, and call the function; this machine's facts are made to fit."""
    accepted = resolve(SPEC, host(), scan(root)).require()
    with bundle.open_artifact(root, accepted.target, accepted.artifact) as path:
        assert path.is_absolute()
        assert path.suffix == ".so"
        return call(path)


def refused(root: Path, message: str) -> None:
    with pytest.raises((BundleError, FileNotFoundError), match=message):
        load(root)


def test_what_was_packaged_is_loaded(root: Path) -> None:
    assert load(root) == 7


def test_a_corrupt_file_is_refused_with_both_digests(root: Path, folder: Path) -> None:
    file = so_file(folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    refused(root, f"has sha256 {trust.sha256(data)}, its manifest says")


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_truncated_file_is_refused(root: Path, folder: Path, size: int) -> None:
    file = so_file(folder)
    file.write_bytes(file.read_bytes()[:size])
    refused(root, "its manifest says")


def test_an_edited_digest_is_refused(root: Path, folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    data["artifacts"][0]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(data))
    refused(root, f"its manifest says {'0' * 64}")


def test_a_torn_manifest_is_refused(root: Path, folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])
    refused(root, "no JSON")


@pytest.mark.parametrize("name", ["../x.so", "/tmp/x.so", "..", "sub/x.so", "x/../../x.so"])
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    data = library(8, tmp_path)
    (tmp_path / "bundle" / "cpu").mkdir(parents=True)
    (tmp_path / "bundle" / "cpu" / "x.so").write_bytes(data)
    put_raw(tmp_path / "bundle" / str(V3), data, name)
    refused(tmp_path / "bundle", "plain name")
    # The reader of files does not rely on the manifest having been read strictly.
    with (
        trust.open_folder(tmp_path / "bundle", V3) as folder_fd,
        pytest.raises(BundleError, match="leaves the folder"),
    ):
        trust.read_file(folder_fd, name, tmp_path)


def test_a_linked_artifact_is_refused(root: Path, folder: Path, tmp_path: Path) -> None:
    file = so_file(folder)
    file.rename(tmp_path / "elsewhere.so")
    file.symlink_to(tmp_path / "elsewhere.so")
    refused(root, "is a symbolic link")


def test_a_linked_manifest_is_refused(root: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "manifest.json").rename(tmp_path / "manifest.json")
    (folder / "manifest.json").symlink_to(tmp_path / "manifest.json")
    refused(root, "manifest.json is a symbolic link")


@pytest.mark.parametrize("part", ["cpu", "cpu/x86-64-v3"])
def test_a_linked_folder_is_refused(root: Path, tmp_path: Path, part: str) -> None:
    shutil.move(root / part, tmp_path / "elsewhere")
    (root / part).symlink_to(tmp_path / "elsewhere")
    refused(root, "is a symbolic link")


def test_the_bundle_itself_may_be_reached_through_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(root)
    assert load(tmp_path / "current") == 7


@pytest.mark.parametrize("where", [".", "cpu", "cpu/x86-64-v3", "manifest", "so"])
@pytest.mark.parametrize(("bit", "who"), [(0o002, "others"), (0o020, "group")])
def test_what_someone_else_may_write_is_refused(
    root: Path, folder: Path, where: str, bit: int, who: str
) -> None:
    path = {"manifest": folder / "manifest.json", "so": so_file(folder)}.get(where, root / where)
    path.chmod(path.stat().st_mode | bit)
    refused(root, f"{path} may be written by {who} .*chmod go-w {path}")
    path.chmod(path.stat().st_mode & ~bit)
    assert load(root) == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("where", ["cpu/x86-64-v3", "manifest", "so"])
def test_what_someone_else_owns_is_refused(root: Path, folder: Path, where: str) -> None:
    path = {"manifest": folder / "manifest.json", "so": so_file(folder)}.get(where, root / where)
    os.chown(path, 12345, -1)
    refused(root, "belongs to user id 12345")


@pytest.mark.parametrize("name", ["extra.so", "notes.txt", ".hidden", "sub"])
def test_unlisted_files_are_refused(root: Path, folder: Path, name: str) -> None:
    if name == "sub":
        (folder / name).mkdir()
    else:
        (folder / name).write_text("x")
    refused(root, rf"holds files its manifest does not list: \['{name}'\]")


def test_a_missing_file_is_refused(root: Path, folder: Path) -> None:
    so_file(folder).unlink()
    refused(root, "No such file")


def test_a_device_or_pipe_is_refused_without_waiting(root: Path, folder: Path) -> None:
    file = so_file(folder)
    file.unlink()
    os.mkfifo(file, 0o644)
    refused(root, "no regular file")


def test_a_folder_moved_to_another_target_is_refused(root: Path) -> None:
    (root / "cpu" / "x86-64-v3").rename(root / "cpu" / "x86-64-v4")
    refused(root, "manifest.json is for target cpu/x86-64-v3")


def test_a_newer_schema_is_refused(root: Path, folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_text()) | {"schema_version": 99}
    (folder / "manifest.json").write_text(json.dumps(data))
    refused(root, "schema version 99 is newer")


def swap_file(folder: Path, data: bytes) -> None:
    so_file(folder).write_bytes(data)


def swap_link(folder: Path, data: bytes) -> None:
    (folder.parent / "evil.so").write_bytes(data)
    file = so_file(folder)
    file.unlink()
    file.symlink_to(folder.parent / "evil.so")


def swap_folder(folder: Path, data: bytes) -> None:
    name = so_file(folder).name
    folder.rename(folder.with_name("old"))
    folder.mkdir()
    (folder / name).write_bytes(data)


@pytest.mark.parametrize("swap", [swap_file, swap_link, swap_folder])
def test_the_bytes_that_were_hashed_are_the_bytes_that_are_loaded(
    root: Path, folder: Path, tmp_path: Path, swap: Callable[[Path, bytes], None]
) -> None:
    found = read_manifest(root, V3).artifacts[0]
    with bundle.open_artifact(root, V3, found) as path:
        swap(folder, library(666, tmp_path))  # after the hash, before the load
        assert call(path) == 7


def test_what_was_hashed_cannot_be_written_any_more(root: Path) -> None:
    found = read_manifest(root, V3).artifacts[0]
    with bundle.open_artifact(root, V3, found) as path:
        with pytest.raises(PermissionError), path.open("r+b") as file:
            file.write(b"x")
        assert path.parent.stat().st_mode & 0o077 == 0
    assert not path.parent.exists()


def test_loading_leaves_no_descriptor_open(root: Path) -> None:
    load(root)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(3):
        load(root)
    assert len(list(descriptors.iterdir())) == before


def test_two_libraries_of_one_name_do_not_answer_for_each_other(tmp_path: Path) -> None:
    for answer in (1, 2):
        put(tmp_path / str(answer), library(answer, tmp_path), artifact())
    assert [load(tmp_path / str(answer)) for answer in (1, 2)] == [1, 2]


def test_problems_are_reasons_not_exceptions(tmp_path: Path) -> None:
    assert "cannot be opened" in scan(tmp_path / "none")[0].problem
    assert "holds no target folder" in scan(tmp_path)[0].problem
    (tmp_path / "file").write_text("")
    assert scan(tmp_path / "file")[0].problem
    put_raw(tmp_path / "cpu" / "x86-64-v3", b"", "x.so", header())
    (tmp_path / "cpu" / "README").write_text("names no target")
    (tmp_path / "cpu" / "x86-64-v4").write_text("no folder")
    good, bad = scan(tmp_path)
    assert not good.problem
    assert "Not a directory" in bad.problem
