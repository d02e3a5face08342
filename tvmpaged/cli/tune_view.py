"""What ``tvmpaged tune`` shows while it works: a live table on a terminal, else plain lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tvmpaged.cli.console import percent, say, stderr_console
from tvmpaged.roofs import UNITS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tvmpaged.tune import Status


@contextmanager
def show_progress() -> "Iterator[Callable[[Status], None]]":
    """Show each spec's status; yields what is to be told of one."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda status: say(plain_line(status))
        return
    from rich.live import Live

    seen: dict[str, Status] = {}
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def update(status: "Status") -> None:
            seen[str(status.spec)] = status
            live.update(_latest(list(seen.values()), console), refresh=True)

        yield update


def _latest(statuses: "list[Status]", console: "Console") -> "Table":
    """Return the table of the latest statuses: as many as the terminal has lines for, now."""
    for first in range(len(statuses)):
        table = _table(statuses[first:])
        if len(console.render_lines(table)) < console.height:
            break
    return table


def _table(statuses: "list[Status]") -> "Table":
    """Return two lines for each spec, for a spec's name alone nearly fills a terminal's width."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    for each in statuses:
        head = Table.grid(padding=(0, 1))
        head.add_column(overflow="fold")  # what tells specs apart is at their names' ends
        head.add_column()
        bar = ProgressBar(each.num_trials, min(each.trials, each.num_trials), width=16)
        head.add_row(Text(str(each.spec)), bar)
        table.add_row(head)
        table.add_row(Text(f"  {progress_text(each)}"))
    return table


def progress_text(status: "Status") -> str:
    """Return how far a search is, without its spec."""
    best, rate, speedup, left = (
        "-" if value is None else form.format(value)
        for value, form in (
            (status.best_us, "{:.0f}"),
            (status.rate, "{:.1f} " + UNITS.get(status.rate_name, "")),
            (status.speedup, "{:.2f}"),
            (status.eta_s, "{:.0f} s"),
        )
    )
    return (
        f"{status.phase}: trials {status.trials}/{status.num_trials}, failed {status.failures}, "
        f"best {best} us, {rate}, {percent(status.roof_fraction)} of the roof, "
        f"speed-up {speedup}, left {left}"
    )


def plain_line(status: "Status") -> str:
    """Return a status as one line."""
    return f"{status.spec} {progress_text(status)}"
