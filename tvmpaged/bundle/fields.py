"""Reading JSON that decides which code is run: strictly, a field at a time.

An unknown or missing field, a wrong type, a duplicate key or a file name that is no plain name is
an error, never a guess.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

from tvmpaged.bundle.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.so", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REQUIRED = object()


class Fields:
    """One JSON object, whose fields are taken one by one until none is left."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data = dict(data)
        self.where = where

    def take(self, name: str, kind: type | tuple[type, ...], default: object = _REQUIRED) -> Any:
        """Return the field; null only where the default is None."""
        if name not in self._data:
            raise BundleError(f"{self.where}.{name} is missing")
        value = self._data.pop(name)
        if value is None and default is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(each.__name__ for each in kinds)
            raise BundleError(f"{self.where}.{name}={value!r} must be of type {wanted}")
        return value

    def take_list(self, name: str, kind: type) -> list[Any]:
        """Return a list whose elements all are of a type."""
        values: list[Any] = self.take(name, list)
        for value in values:
            if not isinstance(value, kind):
                raise BundleError(f"{self.where}.{name} holds {value!r}, not a {kind.__name__}")
        return values

    def match(self, name: str, pattern: re.Pattern[str], wanted: str) -> str:
        """Return a text of a form, which `wanted` says in words."""
        value: str = self.take(name, str)
        if pattern.fullmatch(value) is None:
            raise BundleError(f"{self.where}.{name}={value!r} must be {wanted}")
        return value

    def file(self, name: str = "file") -> str:
        """Return the name of a library beside the manifest."""
        return self.match(name, _FILE, "a plain name that ends in .so, without folders")

    def sha256(self, name: str = "sha256") -> str:
        """Return a digest."""
        return self.match(name, _SHA256, "64 hexadecimal digits")

    def choices(self, name: str = "choices") -> dict[str, int | str]:
        """Return a choice list."""
        choices: dict[str, int | str] = self.take(name, dict)
        for option, value in choices.items():
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise BundleError(f"{self.where}.{name}.{option}={value!r} must be an int or a str")
        return choices

    def fields(self, name: str) -> Fields:
        """Return an object inside this one."""
        return Fields(self.take(name, dict), f"{self.where}.{name}")

    def end(self) -> None:
        """Refuse what was not taken."""
        if self._data:
            raise BundleError(f"{self.where} holds unknown fields: {', '.join(sorted(self._data))}")


def parsed(parse: Callable[[str], _T], text: str, where: str) -> _T:
    """Return a text parsed; what it is not becomes a `BundleError`."""
    try:
        return parse(text)
    except (TypeError, ValueError) as error:
        raise BundleError(f"{where}: {error}") from error


def load_object(data: bytes, what: str = "manifest") -> dict[str, Any]:
    """Return the object that JSON text holds.

    Raises
    ------
    BundleError
        When it holds something else, a key twice, or NaN or infinity, which are no JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BundleError(f"{what} holds a key twice")
        return found

    def refuse(constant: str) -> None:
        raise BundleError(f"{what} holds {constant}, which is no JSON")

    try:
        loaded = json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{what} is no JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise BundleError(f"{what} is a {type(loaded).__name__}, not an object")
    return loaded
