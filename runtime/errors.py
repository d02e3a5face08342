"""The runtime's own errors, and the argument checks that name what is wrong."""

from __future__ import annotations

import operator
import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class OutOfBlocksError(RuntimeError):
    """The pool has too few free blocks for the call; the call changed nothing."""


class IntegrityError(AssertionError):
    """A recount disagrees with the books: a bug of this package, never a caller's mistake."""


def check_hashable(name: str, value: object) -> None:
    """Raise TypeError unless `value` can name something in a dictionary."""
    try:
        hash(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name}={reprlib.repr(value)} ({kind}) must be hashable") from None


def checked_int(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return `value` as an int in [least, most]; without `most` there is no upper end."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        message = f"{name}={reprlib.repr(value)} ({kind}) must be an integer"
        raise TypeError(message) from None
    if number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={number} must be {allowed}")
    return number


def checked_token_ids(name: str, value: Iterable[int], least: int = 0) -> list[int]:
    """Return `value` as a fresh list of at least `least` token ids, each of which fits int64."""
    try:
        token_ids = [operator.index(token) for token in value]
    except TypeError:
        raise TypeError(f"{name}={reprlib.repr(value)} must be a sequence of integers") from None
    if len(token_ids) < least:
        raise ValueError(f"{name}={token_ids} must have at least {least} token")
    if token_ids and not -(2**63) <= min(token_ids) <= max(token_ids) < 2**63:
        raise ValueError(f"{name}={reprlib.repr(token_ids)} must fit 64-bit signed integers")
    return token_ids
