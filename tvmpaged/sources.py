"""The sources that decide an artifact's code: their hash, without importing any of them."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

#: What decides an artifact's code, besides spec, choices and the compiler.
_PACKAGE = Path(__file__).parent
_SOURCES = (
    "spec.py",
    "layout.py",
    "worklist.py",
    "build.py",
    "cpu.py",
    "sm.py",
    "nvcc.py",
    "cuda_build.py",
    "cuda_child.py",
    "kernels",
    "schedules",
)


def source_sha256() -> str:
    """Return the hash of the sources that decide an artifact's code, as 64 hex digits.

    A record or artifact made from other sources is *stale*: its choices may mean something else.
    """
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = _schedules() if name == "schedules" else _PACKAGE / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{name}/{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _schedules() -> Path:
    found = find_spec("tvmpaged.schedules")  # in a checkout it lies beside this folder
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
