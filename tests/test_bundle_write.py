"""Writing: whole or not at all, one writer at a time, nothing overwritten unasked."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bundle_tools import OTHER_SPEC, SPEC, V3, artifact, call, header, host, key_pair, library, put
from filelock import FileLock

from tvmpaged import bundle
from tvmpaged.bundle import (
    Abi,
    Built,
    BundleError,
    find,
    load_private_key,
    load_public_key,
    read_manifest,
    scan,
    write,
)
from tvmpaged.spec import AttentionSpec

pytestmark = pytest.mark.runtime


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Memory instead of a disk: every write waits for fsync, and there are thousands here."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def answers(root: Path) -> dict[str, int]:
    """Load all artifacts and return what they answer, by spec."""
    found = {}
    for each in read_manifest(root, V3).artifacts:
        with bundle.open_artifact(root, V3, each) as path:
            found[str(each.spec)] = call(path)
    return found


def names(root: Path) -> set[str]:
    return {path.name for path in (root / str(V3)).iterdir()}


def test_a_second_write_adds(tmp_path: Path) -> None:
    put(tmp_path, library(1, tmp_path), artifact())
    done = write(header(), [Built(artifact(OTHER_SPEC), library(2, tmp_path))], tmp_path)
    assert [each.spec for each in done.taken] == [OTHER_SPEC]
    assert answers(tmp_path) == {str(SPEC): 1, str(OTHER_SPEC): 2}


def test_modes_let_nobody_else_write_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        put(tmp_path / "new", library(1, tmp_path), artifact())
    finally:
        os.umask(before)
    assert not any(each.problem for each in scan(tmp_path / "new"))
    for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, library(1, tmp_path), artifact())
    before = (tmp_path / str(V3) / "manifest.json").read_bytes()
    again = replace(artifact(), created_at="later", measured_us=3.0)
    done = write(header(), [Built(again, library(2, tmp_path))], tmp_path)
    assert [each.spec for each in done.unchanged] == [SPEC]
    assert (tmp_path / str(V3) / "manifest.json").read_bytes() == before


def test_another_one_is_kept_and_both_values_printed_unless_it_may_be_replaced(
    tmp_path: Path,
) -> None:
    put(tmp_path, library(1, tmp_path), artifact())
    new = [Built(artifact(SPEC, "tuned", record_id="r"), library(2, tmp_path))]
    done = write(header(), new, tmp_path)
    assert not done.taken
    assert str(done.kept[0]) == (
        f"{SPEC}: kept, because its kind is 'default' and would be 'tuned' now; "
        "--replace takes the new one"
    )
    assert answers(tmp_path) == {str(SPEC): 1}
    done = write(header(), new, tmp_path, replace_existing=True)
    assert [each.kind for each in done.replaced] == ["default"]
    assert answers(tmp_path) == {str(SPEC): 2}
    assert len([name for name in names(tmp_path) if name.endswith(".so")]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_sha256": "2" * 64}, "source_sha256 is '1111"),
        ({"choices": {"split_length": 1}}, "'isa': 'avx2'} and would be {'split_length': 1} now"),
        (
            {"built_with": replace(header().built_with, tvm="0.28.0")},
            "built_with.tvm is '0.27.0.post1' and would be '0.28.0' now",
        ),
    ],
)
def test_what_differs_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    put(tmp_path, library(1, tmp_path), artifact())
    done = write(header(), [Built(artifact(**changes), library(2, tmp_path))], tmp_path)
    assert message in str(done.kept[0])


def test_another_abi_cannot_join_a_folder(tmp_path: Path) -> None:
    put(tmp_path, library(1, tmp_path), artifact(), artifact(OTHER_SPEC))
    later = replace(header(), abi=Abi(tvm_runtime="0.28"))
    new = [Built(artifact(choices={}), library(2, tmp_path))]
    done = write(later, new, tmp_path)
    assert "abi.tvm_runtime is '0.27' and would be '0.28' now" in str(done.kept[0])
    assert answers(tmp_path) == {str(SPEC): 1, str(OTHER_SPEC): 1}
    done = write(later, new, tmp_path, replace_existing=True)
    assert [each.spec for each in done.dropped] == [OTHER_SPEC]
    assert answers(tmp_path) == {str(SPEC): 2}


def test_new_metadata_for_the_same_bytes(tmp_path: Path) -> None:
    """A search may end at the default choices: the file stays, its kind does not."""
    put(tmp_path, library(1, tmp_path), artifact())
    new = [Built(artifact(SPEC, "tuned"), library(1, tmp_path))]
    write(header(), new, tmp_path, replace_existing=True)
    assert answers(tmp_path) == {str(SPEC): 1}
    assert read_manifest(tmp_path, V3).artifacts[0].kind == "tuned"


def test_a_broken_folder_is_only_written_anew_when_asked(tmp_path: Path) -> None:
    folder = put(tmp_path, library(1, tmp_path), artifact(), artifact(OTHER_SPEC))
    next(folder.glob("decode*.so")).write_bytes(b"torn")
    new = [Built(artifact(), library(2, tmp_path))]
    with pytest.raises(BundleError, match=r"nothing was written: .*sha256.*--replace"):
        write(header(), new, tmp_path)
    write(header(), new, tmp_path, replace_existing=True)
    assert answers(tmp_path) == {str(SPEC): 2, str(OTHER_SPEC): 1}
    (folder / "manifest.json").write_text("torn")
    with pytest.raises(BundleError, match=r"nothing was written: .*no JSON"):
        write(header(), new, tmp_path)
    write(header(), new, tmp_path, replace_existing=True)
    assert answers(tmp_path) == {str(SPEC): 2}


def test_foreign_files_are_neither_deleted_nor_accepted(tmp_path: Path) -> None:
    folder = put(tmp_path, library(1, tmp_path), artifact())
    (folder / "thesis.txt").write_text("important")
    new = [Built(artifact(choices={}), library(2, tmp_path))]
    with pytest.raises(BundleError, match=r"thesis.txt"):
        write(header(), new, tmp_path, replace_existing=True)
    assert (folder / "thesis.txt").read_text() == "important"


EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "os.listdir"}


def die_while_writing(root: Path, new: list[Built], step: int, key: Path | None = None) -> bool:
    """Write in a child that is killed just before the n-th thing it does to a file.

    Returns whether it got to the end.
    """
    child = os.fork()
    if child == 0:
        left = step

        def count(event: str, args: tuple[object, ...]) -> None:
            nonlocal left
            left -= event in EVENTS
            if left == 0:
                left = -1  # killing is an event too
                os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            private = load_private_key(key) if key else None
            sys.addaudithook(count)
            write(header(), new, root, replace_existing=True, key=private)
            left, status = -1, 0
        finally:
            os._exit(status)
    _, result = os.waitpid(child, 0)
    assert result in (0, signal.SIGKILL)
    return result == 0


OLD = {str(SPEC): 1}
NEW = {str(SPEC): 3, str(OTHER_SPEC): 4}


def new_ones(tmp_path: Path) -> list[Built]:
    changed = {"choices": {"split_length": 256}}
    return [
        Built(artifact(SPEC, **changed), library(3, tmp_path)),
        Built(artifact(OTHER_SPEC, **changed), library(4, tmp_path)),
    ]


def test_killed_at_any_step_it_is_the_old_bundle_or_the_new_one(tmp_path: Path) -> None:
    seen, finished = [], False
    while not finished:
        step = len(seen) + 1
        root = tmp_path / f"at-{step}"
        put(root, library(1, tmp_path), artifact())
        finished = die_while_writing(root, new_ones(tmp_path), step)
        seen.append(answers(root))
        assert seen[-1] in (OLD, NEW), step
        # What was left is swept up by the next write.
        last = [Built(artifact(OTHER_SPEC, choices={}), library(2, tmp_path))]
        write(header(), last, root, replace_existing=True)
        files = {each.file for each in read_manifest(root, V3).artifacts}
        assert names(root) == files | {"manifest.json", ".lock"}, step
    assert seen[0] == OLD
    assert seen[-1] == NEW
    assert seen == sorted(seen, key=lambda each: each == NEW), "it went back to the old one"
    assert len(seen) > 20


def test_killed_at_any_step_of_the_first_write_there_is_nothing_or_all(tmp_path: Path) -> None:
    step, finished = 0, False
    while not finished:
        step += 1
        root = tmp_path / f"at-{step}" / "bundle"
        finished = die_while_writing(root, new_ones(tmp_path), step)
        if not (root / str(V3) / "manifest.json").exists():
            assert all(each.problem for each in scan(root))
            put(root, library(1, tmp_path), artifact())
            assert answers(root) == OLD
        else:
            assert answers(root) == NEW
    assert answers(root) == NEW


def test_killed_at_any_step_while_only_the_metadata_changes(tmp_path: Path) -> None:
    """The new artifact has the old one's bytes and so its name: it must not be written again."""
    step, finished = 0, False
    while not finished:
        step += 1
        root = tmp_path / f"at-{step}"
        put(root, library(1, tmp_path), artifact())
        tuned = [Built(artifact(SPEC, "tuned"), library(1, tmp_path))]
        finished = die_while_writing(root, tuned, step)
        assert answers(root) == OLD
    assert read_manifest(root, V3).artifacts[0].kind == "tuned"


@pytest.mark.parametrize("moment", ["listdir", "read_changing", "read_file"])
def test_a_writer_that_comes_while_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It may stand at any of its steps, or have ended, when the reader goes on."""
    folder = sys.modules["tvmpaged.bundle.folder"]
    place = {"listdir": os, "read_changing": folder, "read_file": folder.trust}[moment]
    plain = getattr(place, moment)
    step, finished = 0, False

    def then_write(*args: object) -> object:
        nonlocal finished
        monkeypatch.undo()  # only the reader waits for this one
        try:
            return plain(*args)
        finally:
            finished = die_while_writing(root, new_ones(tmp_path), step)

    while not finished:
        step += 1
        root = tmp_path / f"at-{step}"
        put(root, library(1, tmp_path), artifact())
        monkeypatch.setattr(place, moment, then_write)
        assert len(read_manifest(root, V3).artifacts) in (1, 2), step
    assert step > 20


def test_two_writers_at_once_both_get_in(tmp_path: Path) -> None:
    specs = [replace(SPEC, block_size=size) for size in range(1, 17)]
    data = library(1, tmp_path)

    def add(spec: AttentionSpec) -> None:
        write(header(), [Built(artifact(spec), data)], tmp_path / "bundle")

    children = []
    for half in (specs[::2], specs[1::2]):
        children.append(os.fork())
        if children[-1] == 0:
            status = 1
            try:
                for spec in half:
                    add(spec)
                status = 0
            finally:
                os._exit(status)
    # A reader beside them never sees anything but a sound bundle.
    while any(children):
        for index, child in enumerate(children):
            done, status = os.waitpid(child, os.WNOHANG) if child else (0, 0)
            if done:
                assert status == 0
                children[index] = 0
        if (tmp_path / "bundle" / str(V3) / "manifest.json").exists():
            assert answers(tmp_path / "bundle")
    assert sorted(answers(tmp_path / "bundle")) == sorted(map(str, specs))


def test_a_reader_beside_a_replacing_writer_finds_a_sound_bundle(tmp_path: Path) -> None:
    put(tmp_path, library(1, tmp_path), artifact())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for count in range(40):
                changed = artifact(choices={"count": count})
                data = library(1, tmp_path) + bytes([count])
                write(header(), [Built(changed, data)], tmp_path, replace_existing=True)
            status = 0
        finally:
            os._exit(status)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert find(SPEC, host(), tmp_path, strict=True).accepted.folder.bundle == tmp_path


def test_the_lock_of_a_killed_writer_is_free_and_a_live_ones_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path, library(1, tmp_path), artifact())
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        lock = FileLock(folder / ".lock")
        lock.acquire()
        os.write(go, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    new = [Built(artifact(OTHER_SPEC), library(2, tmp_path))]
    monkeypatch.setattr(sys.modules["tvmpaged.bundle.write"], "LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(BundleError, match="is being written by another process"):
        write(header(), new, tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    write(header(), new, tmp_path)
    assert answers(tmp_path) == {str(SPEC): 1, str(OTHER_SPEC): 2}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path / "mine")


def test_a_signed_bundle(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = load_private_key(keys[0]), load_public_key(keys[1])
    other = load_public_key(key_pair(tmp_path / "other")[1])
    root = tmp_path / "bundle"
    folder = put(root, library(1, tmp_path), artifact())
    with pytest.raises(BundleError, match=r"manifest.json.sig cannot be opened"):
        read_manifest(root, V3, public)
    write(header(), [Built(artifact(OTHER_SPEC), library(2, tmp_path))], root, key=private)
    read_manifest(root, V3, public)
    with pytest.raises(BundleError, match="not by the required key"):
        read_manifest(root, V3, other)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"dirty": false', '"dirty": true '))
    read_manifest(root, V3)
    with pytest.raises(BundleError, match="not by the required key"):
        read_manifest(root, V3, public)
    # Signing again would vouch for the edit.
    new = [Built(artifact(choices={}), library(3, tmp_path))]
    with pytest.raises(BundleError, match="signed with another key, or was changed"):
        write(header(), new, root, key=private, replace_existing=False)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match="is signed: give --sign"):
        write(header(), new, root)


def test_signing_alone_signs_what_is_there(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    root = tmp_path / "bundle"
    put(root, library(1, tmp_path), artifact())
    same = [Built(artifact(), library(1, tmp_path))]
    write(header(), same, root, key=load_private_key(keys[0]))
    read_manifest(root, V3, load_public_key(keys[1]))
    assert answers(root) == OLD


@pytest.mark.parametrize("text", ["", "not a key", "-----BEGIN PRIVATE KEY-----\n"])
def test_what_is_no_key_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    for load in (load_private_key, load_public_key):
        with pytest.raises(BundleError, match="cannot be read as"):
            load(tmp_path / "key")


def test_killed_at_any_step_a_signed_bundle_stays_signed(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    public = load_public_key(keys[1])
    step, finished = 0, False
    while not finished:
        step += 1
        root = tmp_path / f"at-{step}"
        private = load_private_key(keys[0])
        write(header(), [Built(artifact(), library(1, tmp_path))], root, key=private)
        finished = die_while_writing(root, new_ones(tmp_path), step, keys[0])
        read_manifest(root, V3, public)
        assert answers(root) in (OLD, NEW)
    assert answers(root) == NEW
    assert len((root / str(V3) / "manifest.json.sig").read_text().splitlines()) == 1
