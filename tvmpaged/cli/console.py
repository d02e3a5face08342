"""What commands print: progress and logs to stderr, results to stdout.

A terminal gets tables and a progress bar, anything else plain lines. ``NO_COLOR`` is honoured.
"""

import json
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

#: The ``--json`` flag that every command with a result takes, as parameter ``json``.
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]

_SECONDS_BETWEEN_LINES = 5.0
#: A column that folds to fewer characters is not read any more.
_LEAST_WIDTH = 24


def stderr_console() -> "Console":
    """Return a console on today's stderr (looked up late, so that redirection works)."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """Print one line of progress to stderr."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print one warning to stderr."""
    say(f"warning: {message}")


def percent(fraction: float | None) -> str:
    """Return a fraction as a cell of a table; ``-`` when it is not known."""
    return "-" if fraction is None else f"{fraction:.0%}"


def print_json(payload: Mapping[str, Any], schema_version: int) -> None:
    """Print one JSON object on stdout, its schema version first."""
    json.dump({"schema_version": schema_version, **payload}, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print rows on stdout: a table on a terminal, else tab-separated lines with a header.

    On a terminal that has no room for a table each row is a few lines, its first cell on one.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        if title:
            print(f"# {title}")
        for row in (columns, *cells):
            print("\t".join(row))
        return
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    widest = widths.index(max(widths))
    others = sum(widths) - widths[widest] + 3 * len(widths) + 1  # frames and spaces
    if console.width - others < min(widths[widest], _LEAST_WIDTH):
        print("\n".join([*([title] if title else []), *_lines(columns, cells, console.width)]))
        return
    table = Table(title=title or None, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number != widest)
    for row in cells:
        # Text, because a value may hold square brackets and is no markup.
        table.add_row(*map(Text, row))
    console.print(table)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield each row's first cell, and the others named below it."""
    for first, *rest in rows:
        yield first
        named = [f"{name} {cell}" for name, cell in zip(columns[1:], rest, strict=True) if cell]
        yield from textwrap.wrap(
            ", ".join(named),
            width,
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )


@contextmanager
def progress(task: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Show how far `task` is; yields ``advance(done, note)``.

    A terminal gets a bar; anything else a plain line when some seconds have passed and at the end.
    """
    console = stderr_console()
    if not console.is_terminal:
        yield _plain_progress(task, total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as bar:
        identity = bar.add_task(task, total=total, note="")
        yield lambda done, note: bar.update(identity, completed=done, note=note)


def _plain_progress(task: str, total: int) -> Callable[[int, str], None]:
    last = 0.0

    def advance(done: int, note: str) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total or now - last >= _SECONDS_BETWEEN_LINES:
            last = now
            say(f"{task} {done}/{total} {note}".rstrip())

    return advance


def set_up_logging(verbosity: int) -> None:
    """Send logs to stderr: warnings, with -v what is done, with -vv everything."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    # Only ours: with everyone's debug messages nobody finds ours.
    logging.getLogger("tvmpaged").setLevel(level)
