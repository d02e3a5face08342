"""Reading a bundle's files without trusting them: a bundle is code.

Every folder from the bundle down and every file is opened once, by descriptor, without following
a symbolic link, and is refused when anyone but its owner may write it or when that owner is neither
root nor this user. What is checked is the open file, so nothing can be swapped between the check
and the read::

    bundle/          may itself be reached through links: its path is the user's word
      cpu/           ) opened relative to the folder above, with O_NOFOLLOW
        x86-64-v3/   )
          manifest.json, *.so
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tvmpaged.bundle.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tvmpaged.spec import TargetKey

_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def check_owner_and_mode(status: os.stat_result, path: Path) -> None:
    """Refuse what someone else may write or owns.

    Raises
    ------
    BundleError
        Naming the path, what is wrong and the command that mends it.
    """
    others = [
        who for who, bit in (("group", stat.S_IWGRP), ("others", stat.S_IWOTH))
        if status.st_mode & bit
    ]  # fmt: skip
    if others:
        raise BundleError(
            f"{path} may be written by {' and '.join(others)} (mode "
            f"{stat.S_IMODE(status.st_mode):04o}); if you trust it: chmod go-w {path}"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise BundleError(
            f"{path} belongs to user id {status.st_uid}, neither root nor this user "
            f"({os.geteuid()}); if you trust it, copy it or change its owner"
        )


def _open_below(name: str, folder_fd: int, path: Path, flags: int = 0) -> int:
    try:
        return os.open(name, _OPEN | os.O_NONBLOCK | flags, dir_fd=folder_fd)
    except OSError as error:
        try:
            status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        except OSError:
            raise BundleError(f"{path} cannot be opened: {error.strerror}") from error
        if stat.S_ISLNK(status.st_mode):
            raise BundleError(f"{path} is a symbolic link") from error
        raise BundleError(f"{path} cannot be opened: {error.strerror}") from error


@contextmanager
def open_folder(bundle: Path, target: TargetKey | None = None) -> Iterator[int]:
    """Open a target's folder of a bundle, or the top folder, and give its descriptor.

    Raises
    ------
    BundleError
        When it is missing, a symbolic link, or writable or owned by someone else.
    """
    opened: list[int] = []
    try:
        try:
            opened.append(os.open(bundle, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY))
        except OSError as error:
            raise BundleError(f"{bundle} cannot be opened: {error.strerror}") from error
        check_owner_and_mode(os.fstat(opened[-1]), bundle)
        path = bundle
        for part in str(target).split("/") if target else ():
            path /= part
            opened.append(_open_below(part, opened[-1], path, os.O_DIRECTORY))
            check_owner_and_mode(os.fstat(opened[-1]), path)
        yield opened[-1]
    finally:
        for each in reversed(opened):
            os.close(each)


def read_file(folder_fd: int, name: str, path: Path) -> bytes:
    """Read a file of an open folder, whole.

    Parameters
    ----------
    folder_fd : int
        From `open_folder`.
    name : str
        A plain name.
    path : Path
        The same file's path, for messages.

    Raises
    ------
    BundleError
        When it is missing, no regular file, or writable or owned by someone else.
    """
    if "/" in name or name in ("", ".", ".."):
        raise BundleError(f"{name!r} leaves the folder {path.parent}")
    with open(_open_below(name, folder_fd, path), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{path} is no regular file")
        check_owner_and_mode(status, path)
        return file.read()


def sha256(data: bytes) -> str:
    """Return the digest as the manifest spells it."""
    return hashlib.sha256(data).hexdigest()


def read_hashed(folder_fd: int, name: str, path: Path, expected: str) -> bytes:
    """Read a file and compare its digest.

    Raises
    ------
    BundleError
        As `read_file`, or with both digests.
    """
    data = read_file(folder_fd, name, path)
    found = sha256(data)
    if found != expected:
        raise BundleError(f"{path} has sha256 {found}, its manifest says {expected}")
    return data


@contextmanager
def sealed_copy(data: bytes, name: str) -> Iterator[Path]:
    """Give a path under which exactly these bytes can be loaded, whatever happens on disk.

    The bytes go to memory that the kernel lets nobody change any more, not even this process. The
    loader chooses by the suffix, hence a link with a ``.so`` name in a private folder; both are
    gone after the block, while what was loaded stays mapped.
    """
    memory = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        with tempfile.TemporaryDirectory(prefix="tvmpaged-") as folder:
            path = Path(folder) / name
            path.symlink_to(f"/proc/self/fd/{memory}")
            yield path
    finally:
        os.close(memory)
