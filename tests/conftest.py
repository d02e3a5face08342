"""Fixtures that several files share."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tvmpaged.cli import app


@pytest.fixture
def install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., None]]:
    """Return a function that installs ``run`` as the command `tune`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TVMPAGED_"):
            monkeypatch.delenv(name)

    def install(run: Callable[..., object], example: str = "tvmpaged tune --trials 8") -> None:
        module = ModuleType("tvmpaged.cli.tune")
        module.run, module.EXAMPLE = run, example  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tvmpaged.cli.tune", module)
        app.load_command.cache_clear()

    yield install
    app.load_command.cache_clear()
