"""Defaults from ``tvmpaged.toml`` or ``[tool.tvmpaged]`` of ``pyproject.toml``.

Precedence is flag > environment > file > default, for every option of every command alike: an
option ``--work-dir`` of ``tune`` is ``TVMPAGED_TUNE_WORK_DIR`` in the environment and ``work-dir``
in the file's table ``[tune]``. The parser does the rest through its default map.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tvmpaged.errors import UserError

ENVIRONMENT_PREFIX = "TVMPAGED"


@dataclass(frozen=True)
class Config:
    """What a configuration file says: one table per command.

    Parameters
    ----------
    file : Path or None
        Where it was read; None when there is no file.
    tables : mapping
        Command name -> option name -> value, as written.
    """

    file: Path | None = None
    tables: Mapping[str, Any] = field(default_factory=dict)

    def check_tables(self, commands: Iterable[str]) -> None:
        """Refuse a table that no command has.

        Raises
        ------
        UserError
            Naming the file and the nearest command.
        """
        known = list(commands)
        for name, table in self.tables.items():
            if name not in known:
                raise UserError(f"{self.file}: no command is called [{name}]{nearest(name, known)}")
            if not isinstance(table, dict):
                raise UserError(f"{self.file}: {name} = {table!r} must be a table, [{name}]")

    def defaults(self, command: str, options: Mapping[str, bool]) -> dict[str, Any]:
        """Return one command's defaults under the parser's names.

        Parameters
        ----------
        command : str
            The command, which is the table's name.
        options : mapping
            Its options, and whether each is repeatable. A repeatable one takes a list or one value.

        Raises
        ------
        UserError
            For a key that is no option; it names the file and the nearest one.
        """
        found: dict[str, Any] = {}
        for key, value in self.tables.get(command, {}).items():
            name = key.replace("-", "_")
            if name not in options:
                spelt = [option.replace("_", "-") for option in options]
                raise UserError(
                    f"{self.file}: [{command}] has no option {key!r}"
                    f"{nearest(name.replace('_', '-'), spelt)}"
                )
            repeatable = options[name]
            if isinstance(value, dict) or (isinstance(value, list) and not repeatable):
                raise UserError(f"{self.file}: [{command}] {key} = {value!r} must be one value")
            found[name] = [value] if repeatable and not isinstance(value, list) else value
        return found


def load_config(file: Path | None, folder: Path) -> Config:
    """Read `file`, or else what `folder` has: ``tvmpaged.toml``, then ``pyproject.toml``.

    Raises
    ------
    UserError
        When the file is missing or is no TOML.
    """
    if file is not None:
        if not file.is_file():
            raise UserError(f"the configuration file {file} does not exist")
        return _read(file)
    for candidate in (folder / "tvmpaged.toml", folder / "pyproject.toml"):
        if candidate.is_file():
            config = _read(candidate)
            if config.tables or candidate.name == "tvmpaged.toml":
                return config
    return Config()


def _read(file: Path) -> Config:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no valid TOML: {error}") from error
    if file.name == "pyproject.toml":
        tables = tables.get("tool", {}).get("tvmpaged", {})
    return Config(file, tables)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest one, or all there are."""
    options = sorted(known)
    close = get_close_matches(name, options, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(options)}"
