"""What ``tvmpaged tune`` shows while it works: a live table on a terminal, else plain lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tvmpaged.cli.console import percent, say, stderr_console
from tvmpaged.roofs import UNITS

if TYPE_CHECKING:
    from rich.table import Table

    from tvmpaged.tune import Status

_COLUMNS = ("spec", "phase", "trials", "failed", "best us", "rate", "of roof", "speed-up", "left")


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
            live.update(_table(list(seen.values())), refresh=True)

        yield update


def _table(statuses: "list[Status]") -> "Table":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    for column in (*_COLUMNS[:2], "", *_COLUMNS[2:]):
        table.add_column(column, overflow="fold")
    for each in statuses:
        spec, phase, *rest = (Text(cell) for cell in cells(each))
        bar = ProgressBar(each.num_trials, min(each.trials, each.num_trials), width=16)
        table.add_row(spec, phase, bar, *rest)
    return table


def cells(status: "Status") -> tuple[str, ...]:
    """Return a status as text, one cell per column."""
    return (
        str(status.spec),
        status.phase,
        f"{status.trials}/{status.num_trials}",
        str(status.failures),
        "-" if status.best_us is None else f"{status.best_us:.0f}",
        "-" if status.rate is None else f"{status.rate:.1f} {UNITS[status.rate_name]}",
        percent(status.roof_fraction),
        "-" if status.speedup is None else f"{status.speedup:.2f}",
        "-" if status.eta_s is None else f"{status.eta_s:.0f} s",
    )


def plain_line(status: "Status") -> str:
    """Return a status as one line."""
    spec, phase, trials, failed, best, rate, fraction, speedup, left = cells(status)
    return (
        f"{spec} {phase}: trials {trials}, failed {failed}, best {best} us, {rate}, "
        f"{fraction} of the roof, speed-up {speedup}, left {left}"
    )
