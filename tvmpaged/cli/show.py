"""``tvmpaged show``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmpaged.cli.console import JsonFlag, percent, print_json, print_table, warn
from tvmpaged.cli.errors import ExitCode

if TYPE_CHECKING:
    from tvmpaged.show import Problem, Row

EXAMPLE = """
tvmpaged show bundles
tvmpaged show --records
"""


def run(
    bundle: Annotated[
        Path | None, typer.Argument(help="A bundle; by default all on the search path.")
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Show the records instead of a bundle.")
    ] = False,
    work_dir: Annotated[Path, typer.Option(help="Where records lie.")] = Path("tuning_logs"),
    json: JsonFlag = False,
) -> ExitCode:
    """Show what a bundle or the records hold: tuned or not, measured on what, stale or not."""
    from tvmpaged import show

    if records and bundle is not None:
        raise ValueError(f"bundle={str(bundle)!r} and --records: give one of the two")
    if records and not work_dir.is_dir():
        raise FileNotFoundError(f"work-dir={str(work_dir)!r} is no folder")
    rows, problems = (show.show_records(work_dir), []) if records else show.show_bundles(bundle)
    if json:
        payload = {"rows": list(map(asdict, rows)), "problems": list(map(asdict, problems))}
        print_json(payload, show.SCHEMA_VERSION)
    else:
        _print(rows, problems)
    # A place of the search path may be empty; a bundle that was named must hold.
    return ExitCode.FAILED if problems and bundle is not None else ExitCode.DONE


def _print(rows: list[Row], problems: list[Problem]) -> None:
    columns = ("kind", "spec", "median us", "of roof", "measured on", "threads", "state", "record")
    for place, target in dict.fromkeys((row.place, row.target) for row in rows):
        cells = [
            (
                row.kind,
                row.spec,
                "-" if row.median_us is None else f"{row.median_us:.1f}",
                percent(row.roof_fraction),
                row.measured_on or "-",
                row.num_threads or "-",
                row.state,
                row.record_id or "-",
            )
            for row in rows
            if (row.place, row.target) == (place, target)
        ]
        print_table(columns, cells, title=f"{target} in {place}")
    for problem in problems:
        warn(f"{problem.place}: {problem.reason}")
