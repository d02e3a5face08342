"""Where a model's files are: a folder, a GGUF file, a hub id, or an installed Python package."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = "package:"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


@dataclass(frozen=True)
class ModelSource:
    """Where a model is.

    Parameters
    ----------
    folder : str
        A local folder, or a hub id.
    gguf_file : str or None
        The file in it, for GGUF.
    is_local : bool
        False for a hub id.
    """

    folder: str
    gguf_file: str | None = None
    is_local: bool = True

    @property
    def arguments(self) -> dict[str, Any]:
        """What `from_pretrained` takes besides the folder."""
        # Set, because without it transformers asks at the terminal.
        arguments: dict[str, Any] = {"trust_remote_code": False}
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        return arguments

    @property
    def has_tokenizer(self) -> bool:
        """False when a local folder surely holds none."""
        if not self.is_local or self.gguf_file is not None:
            return True
        return any((Path(self.folder) / name).is_file() for name in _TOKENIZER_FILES)


def find_model(model: str | os.PathLike[str]) -> ModelSource:
    """Find a model's files.

    Parameters
    ----------
    model : str or path
        A folder, a GGUF file, a hub id (``owner/name``), or ``package:NAME`` for an installed
        Python package that holds one GGUF file; the package is not imported.

    Raises
    ------
    FileNotFoundError
        When it is a path, and nothing is there; or a package without a GGUF file.
    """
    text = os.fspath(model)
    if text.startswith(_PACKAGE):
        return _in_package(text.removeprefix(_PACKAGE))
    path = Path(text).expanduser()
    if path.is_dir():
        return ModelSource(str(path))
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model={text!r} is a file; allowed: a folder or a .gguf file")
        return ModelSource(str(path.parent), path.name)
    if isinstance(model, os.PathLike) or text.count("/") != 1 or text[0] in "./~":
        if text and "/" not in text and path.suffix != ".gguf":
            return ModelSource(text, is_local=False)
        raise FileNotFoundError(
            f"model={text!r} does not exist; allowed: a folder, a .gguf file, a hub id, "
            "or package:NAME"
        )
    return ModelSource(text, is_local=False)


def _in_package(name: str) -> ModelSource:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = "is not installed" if spec is None else f"holds {len(files)} .gguf files, not one"
        raise FileNotFoundError(f"model='{_PACKAGE}{name}': the Python package {name!r} {found}")
    return ModelSource(str(files[0].parent), files[0].name)
