"""Writing one target's folder of a bundle, so that a crash at any moment leaves a usable one.

A file's name holds a part of its digest, so an old artifact and its successor stand side by side
until the manifest has changed. What a killed write leaves is named by the list of changes, which
readers allow for and the next write sweeps up::

    .lock                                        one writer per folder
    .changing          names that come or go     readers allow for them
    NAME.DIGEST.so     each with fsync           the old manifest is in force
    manifest.json.sig  old lines and new line    whichever manifest is there is signed
    manifest.json      rename, fsync             the new manifest is in force
    manifest.json.sig  new line only
    what goes is unlinked, then .changing
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from tvmpaged.bundle import signature, trust
from tvmpaged.bundle.codec import encode
from tvmpaged.bundle.errors import BundleError
from tvmpaged.bundle.folder import read_artifact, read_changing, read_manifest
from tvmpaged.bundle.manifest import (
    CHANGING_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    TEMPORARY_NAMES,
    Artifact,
    Manifest,
)
from tvmpaged.bundle.merge import Merge, merge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from tvmpaged.spec import AttentionSpec, TargetKey

LOCK_TIMEOUT_S = 60.0
_DIGITS = 16


@dataclass(frozen=True)
class Built:
    """A new artifact (its file and digest are filled in by the write) and its bytes."""

    artifact: Artifact
    data: bytes

    def named(self) -> Built:
        """Return it with the digest of its bytes and the file name that follows from it."""
        digest = trust.sha256(self.data)
        name = file_name(self.artifact.spec, digest)
        return Built(replace(self.artifact, file=name, sha256=digest), self.data)


def file_name(spec: AttentionSpec, sha256: str) -> str:
    """Return an artifact's file name: the spec, and enough of the digest to tell builds apart."""
    return f"{spec}.{sha256[:_DIGITS]}.so"


def utc_now() -> str:
    """Return the time as the manifest spells it: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).replace(microsecond=0).isoformat()


def read_existing(bundle: Path, target: TargetKey, replace_existing: bool) -> Manifest | None:
    """Return what a write would add to; None when there is nothing.

    Parameters
    ----------
    bundle : Path
        The bundle's top folder.
    target : TargetKey
        Which of its folders.
    replace_existing : bool
        Pass over artifacts, or a whole folder, that cannot be read or are not what was packaged.

    Raises
    ------
    BundleError
        When there is such a one and it may not be passed over.
    """
    path = bundle / str(target)
    if not (path / MANIFEST_NAME).exists():
        return None
    intact = []
    try:
        manifest = read_manifest(bundle, target)
        for each in manifest.artifacts:
            try:
                read_artifact(bundle, target, each)
            except BundleError:
                if not replace_existing:
                    raise
            else:
                intact.append(each)
    except BundleError as error:
        if replace_existing:
            return None
        raise BundleError(f"nothing was written: {error} (--replace writes it anew)") from error
    return manifest.with_artifacts(intact)


def write(
    header: Manifest,
    new: Sequence[Built],
    bundle: Path,
    *,
    replace_existing: bool = False,
    key: Ed25519PrivateKey | None = None,
) -> Merge:
    """Add artifacts to a bundle; readers see all of them or none.

    Parameters
    ----------
    header : Manifest
        The target, and what its artifacts share; artifacts in it are not looked at.
    new : sequence of Built
        One per spec.
    bundle : Path
        The bundle's top folder; made when it is missing.
    replace_existing : bool
        See `merge`; also starts anew where a folder cannot be read.
    key : Ed25519PrivateKey, optional
        Signs the manifest. A folder that is signed already is only written with its own key.

    Raises
    ------
    BundleError
        When the folder cannot be read, trusted or locked; nothing is changed then.
    """
    path = _make_folder(bundle, header.target)
    with _locked(path), trust.open_folder(bundle, header.target) as folder_fd:
        existing = read_existing(bundle, header.target, replace_existing)
        decision = merge(existing, header, [each.artifact for each in new], replace_existing)
        old_lines = _old_signature(folder_fd, path, key, replace_existing)
        nothing_new = not decision.taken and (key is None or existing is None)
        if nothing_new and not read_changing(folder_fd, path):
            return decision
        taken = {each.spec for each in decision.taken}
        built = [each.named() for each in new if each.artifact.spec in taken]
        manifest = header if built or existing is None else existing
        manifest = manifest.with_artifacts([*decision.stays, *(each.artifact for each in built)])
        _commit(folder_fd, path, manifest, built, key, old_lines)
        read_manifest(bundle, header.target)  # as a reader would: says what else is in the way
        return replace(decision, taken=tuple(each.artifact for each in built))


def _commit(
    folder_fd: int,
    path: Path,
    manifest: Manifest,
    built: Sequence[Built],
    key: Ed25519PrivateKey | None,
    old_lines: bytes,
) -> None:
    files = {each.artifact.file: each.data for each in built}
    listed = {each.file for each in manifest.artifacts}
    there = {name for name in os.listdir(folder_fd) if name.endswith(".so")}
    goes = there - listed
    data = encode(manifest)
    line = signature.sign(key, data) if key is not None else b""

    changing = sorted(files.keys() | goes | read_changing(folder_fd, path))
    _put(folder_fd, CHANGING_NAME, "\n".join(changing).encode())
    for name, content in files.items():
        if name not in there or trust.read_file(folder_fd, name, path / name) != content:
            _write_synced(folder_fd, name, content)
    if line:
        _put(folder_fd, SIGNATURE_NAME, old_lines + line)
    _put(folder_fd, MANIFEST_NAME, data)
    if line:
        _put(folder_fd, SIGNATURE_NAME, line)
    for name in (*sorted(goes), *TEMPORARY_NAMES, *([] if line else [SIGNATURE_NAME])):
        _unlink(folder_fd, name)
    os.fsync(folder_fd)
    _unlink(folder_fd, CHANGING_NAME)


def _old_signature(
    folder_fd: int, path: Path, key: Ed25519PrivateKey | None, replace_existing: bool
) -> bytes:
    """Return the signature lines in force, after a check that this key may go on from them."""
    try:
        lines = trust.read_file(folder_fd, SIGNATURE_NAME, path / SIGNATURE_NAME)
        data = trust.read_file(folder_fd, MANIFEST_NAME, path / MANIFEST_NAME)
    except BundleError:
        there = (path / SIGNATURE_NAME).exists() and (path / MANIFEST_NAME).exists()
        if replace_existing or not there:
            return b""
        raise
    if key is None and not replace_existing:
        raise BundleError(
            f"{path} is signed: give --sign KEY (or --replace, to drop the signature)"
        )
    if key is not None:
        try:
            signature.check_signature(key.public_key(), data, lines)
        except BundleError as error:
            if not replace_existing:
                raise BundleError(f"{path} is signed with another key, or was changed") from error
    return lines if lines.endswith(b"\n") else lines + b"\n"


def _make_folder(bundle: Path, target: TargetKey) -> Path:
    """Make the folders that are missing, with modes that let nobody else write."""
    path = bundle / str(target)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):  # another writer may be making it
            each.mkdir(mode=0o755)
            each.chmod(0o755)
            _sync_folder(each.parent)
    return path


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel frees the lock when its holder dies, so nothing has to be taken over.
    lock = FileLock(path / LOCK_NAME, timeout=LOCK_TIMEOUT_S, mode=0o644)
    try:
        lock.acquire()
    except Timeout as error:
        raise BundleError(
            f"{path} is being written by another process; waited {LOCK_TIMEOUT_S:.0f} s"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _put(folder_fd: int, name: str, content: bytes) -> None:
    """Replace a file in one step, and make it last."""
    _write_synced(folder_fd, f"{name}.new", content)
    os.rename(f"{name}.new", name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    os.fsync(folder_fd)


def _write_synced(folder_fd: int, name: str, content: bytes) -> None:
    # Removed first, so that neither a link nor the mode of what was there has a say.
    _unlink(folder_fd, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o644, dir_fd=folder_fd)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o644)
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _unlink(folder_fd: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder_fd)
