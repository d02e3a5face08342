"""Which of this machine's GPUs a command measures on."""

from typing import Annotated

import typer

DevicesFlag = Annotated[
    str | None,
    typer.Option(
        help="GPUs of one kind that measure side by side [the first].", metavar="cuda:0,cuda:1|all"
    ),
]
AllowBusyFlag = Annotated[
    bool, typer.Option("--allow-busy", help="Measure on a GPU that other processes compute on.")
]


def parse_devices(text: str | None) -> tuple[str, ...]:
    """Return the devices that a flag names, in its order."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
