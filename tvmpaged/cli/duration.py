"""The flag that limits a run's time, the same for every command that has one."""

import re
from typing import Annotated

import typer

#: The ``--time-limit`` flag, as parameter ``time_limit``; read with `parse_seconds`.
TimeLimitFlag = Annotated[
    str | None, typer.Option(help="Of the whole run: 90s, 10m, 2h.", metavar="TIME")
]

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def parse_seconds(text: str | None) -> float | None:
    """Return the seconds of a time such as ``90s``, ``10m`` or ``2h``.

    Raises
    ------
    ValueError
        When it is none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"--time-limit {text!r} cannot be read; write 90s, 10m or 2h")
    return float(match[1]) * _SECONDS[match[2]]
