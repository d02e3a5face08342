"""One target's folder of a bundle, checked as far as it can be without reading its artifacts."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvmpaged.bundle import signature, trust
from tvmpaged.bundle.codec import decode
from tvmpaged.bundle.errors import BundleError
from tvmpaged.bundle.manifest import (
    CHANGING_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    TEMPORARY_NAMES,
    Artifact,
    Manifest,
)
from tvmpaged.spec import TargetKey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_OWN_NAMES = {MANIFEST_NAME, SIGNATURE_NAME, LOCK_NAME, CHANGING_NAME, *TEMPORARY_NAMES}


@dataclass(frozen=True)
class Folder:
    """One target's folder: its manifest, or the reason why it cannot be used.

    Parameters
    ----------
    bundle : Path
        The bundle it belongs to.
    source : str
        Where the bundle was named: an argument, a variable, the user cache ...
    target : TargetKey or None
        None when the bundle as a whole cannot be used.
    manifest : Manifest or None
        None exactly when there is a `problem`.
    problem : str
        Why it cannot be used; empty when it can.
    """

    bundle: Path
    source: str
    target: TargetKey | None
    manifest: Manifest | None
    problem: str = ""

    @property
    def path(self) -> Path:
        """The folder that holds ``manifest.json``."""
        return self.bundle / str(self.target) if self.target else self.bundle


def list_targets(bundle: Path) -> list[TargetKey]:
    """Return the targets that have a folder in a bundle, in order; odd names are passed over.

    Raises
    ------
    OSError
        When the bundle cannot be listed.
    """
    found = []
    for pattern in ("cpu/*", "cuda/*/*"):
        for path in sorted(bundle.glob(pattern)):
            try:
                found.append(TargetKey.parse(path.relative_to(bundle).as_posix()))
            except ValueError:
                continue
    return found


def scan(
    bundle: Path, source: str = "argument", public_key: Ed25519PublicKey | None = None
) -> list[Folder]:
    """Check all target folders of a bundle; a problem becomes a reason, never an exception."""
    try:
        bundle.stat()
        targets = list_targets(bundle)
    except OSError as error:
        return [Folder(bundle, source, None, None, f"cannot be opened: {error.strerror}")]
    if not targets:
        reason = "holds no target folder such as cpu/x86-64-v3"
        return [Folder(bundle, source, None, None, reason)]
    folders = []
    for target in targets:
        try:
            manifest = read_manifest(bundle, target, public_key)
        except BundleError as error:
            folders.append(Folder(bundle, source, target, None, str(error)))
        else:
            folders.append(Folder(bundle, source, target, manifest))
    return folders


def read_manifest(
    bundle: Path, target: TargetKey, public_key: Ed25519PublicKey | None = None
) -> Manifest:
    """Read a target folder's manifest, and check the folder against it.

    Raises
    ------
    BundleError
        When the folder, the manifest, its signature or the list of files is not as it must be.
    """
    path = bundle / str(target)
    with trust.open_folder(bundle, target) as folder_fd:
        # The order matters beside writers: what one adds or removes stands in the list of changes
        # before it appears and until it is gone. Read before the manifest, the list knows what is
        # added; read after it, what a writer that came since removes.
        names = os.listdir(folder_fd)  # noqa: PTH208, a descriptor
        changing = read_changing(folder_fd, path)
        data = trust.read_file(folder_fd, MANIFEST_NAME, path / MANIFEST_NAME)
        manifest = decode(data)
        if manifest.target != target:
            raise BundleError(f"{path / MANIFEST_NAME} is for target {manifest.target}")
        if public_key is not None:
            lines = trust.read_file(folder_fd, SIGNATURE_NAME, path / SIGNATURE_NAME)
            signature.check_signature(public_key, data, lines)
        changing |= read_changing(folder_fd, path)
        known = {each.file for each in manifest.artifacts} | changing | _OWN_NAMES
        unlisted = [
            name for name in sorted(names) if name not in known and _exists(folder_fd, name)
        ]
        if unlisted:
            raise BundleError(f"{path} holds files its manifest does not list: {unlisted}")
    return manifest


def read_changing(folder_fd: int, path: Path) -> set[str]:
    """Return the names that an unfinished write adds or removes; empty when there is none.

    Raises
    ------
    BundleError
        As `trust.read_file`.
    """
    try:
        data = trust.read_file(folder_fd, CHANGING_NAME, path / CHANGING_NAME)
    except BundleError as error:
        # By the cause, and not by another look: the next writer may have made one since.
        if isinstance(error.__cause__, FileNotFoundError):
            return set()
        raise
    return set(data.decode(errors="replace").splitlines())


def _exists(folder_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def read_artifact(bundle: Path, target: TargetKey, artifact: Artifact) -> bytes:
    """Return an artifact's bytes, which have the manifest's digest.

    Raises
    ------
    BundleError
        When they do not, or the file may not be trusted.
    """
    path = bundle / str(target)
    with trust.open_folder(bundle, target) as folder_fd:
        return trust.read_hashed(folder_fd, artifact.file, path / artifact.file, artifact.sha256)


@contextmanager
def open_artifact(bundle: Path, target: TargetKey, artifact: Artifact) -> Iterator[Path]:
    """Give a path that loads exactly the bytes whose digest the manifest states.

    Parameters
    ----------
    bundle, target
        Where the artifact stands.
    artifact : Artifact
        From that folder's manifest.

    Yields
    ------
    Path
        Absolute, ends in ``.so``; valid inside the block, what was loaded stays.

    Raises
    ------
    BundleError
        As `read_artifact`.
    """
    with trust.sealed_copy(read_artifact(bundle, target, artifact), artifact.file) as path:
        yield path
