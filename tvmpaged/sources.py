"""The sources that decide an artifact's code: their hash, without importing any of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).parent
#: What decides an artifact's code, besides spec, choices and the compiler: of all kinds of target,
#: and of each. So what is changed for one kind makes no record of the other stale.
_SHARED = ("spec.py", "layout.py", "worklist.py", "build.py", "kernels/*.py")
_SOURCES = {
    "cpu": ("cpu.py", "kernels/cpu/*.py"),
    "cuda": ("sm.py", "nvcc.py", "cuda_build.py", "cuda_child.py", "kernels/cuda/*.py"),
}
#: The same among the schedules.
_SCHEDULES = ("__init__.py", "choices.py")


def source_sha256(kind: str) -> str:
    """Return the hash of the sources that decide the code of a kind of target, as 64 hex digits.

    A record or artifact made from other sources is *stale*: its choices may mean something else.

    Parameters
    ----------
    kind : str
        "cpu" or "cuda".
    """
    digest = hashlib.sha256()
    for name, file in _files(kind):
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _files(kind: str) -> Iterator[tuple[str, Path]]:
    """Yield each source with its name."""
    schedules = _schedules()
    for folder, patterns in (
        (_PACKAGE, (*_SHARED, *_SOURCES[kind])),
        (schedules, (*_SCHEDULES, f"{kind}*.py")),
    ):
        for pattern in patterns:
            for file in sorted(folder.glob(pattern)):
                yield f"{folder.name}/{file.relative_to(folder)}", file


def _schedules() -> Path:
    found = find_spec("tvmpaged.schedules")  # in a checkout it lies beside this folder
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
