"""Folders for the time of a command; those of commands that were killed go when the next begins."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "tvmpaged-scratch-"
#: A younger one may not have been locked yet.
_MIN_AGE_S = 30.0


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a private folder that is locked, and removed after the block."""
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        # The kernel frees the lock when its holder dies; no child inherits it.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(descriptor)


def _sweep(root: Path) -> None:
    """Remove the folders of this user that nobody holds any more."""
    for path in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, in use, or gone meanwhile
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(descriptor)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _MIN_AGE_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
