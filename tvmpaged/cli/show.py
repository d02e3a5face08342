"""``tvmpaged show``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmpaged.cli.console import JsonFlag, percent, print_json, print_table, say, warn
from tvmpaged.cli.errors import ExitCode, exit_code

if TYPE_CHECKING:
    from tvmpaged.show import Problem, Row

EXAMPLE = """
tvmpaged show bundles
tvmpaged show --records
tvmpaged show --options
"""


def run(
    bundle: Annotated[
        Path | None, typer.Argument(help="A bundle; by default all on the search path.")
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Show the records instead of a bundle.")
    ] = False,
    options: Annotated[
        bool, typer.Option("--options", help="Show what each option was worth in the searches.")
    ] = False,
    work_dir: Annotated[Path | None, typer.Option(help="Where records lie [tuning_logs].")] = None,
    json: JsonFlag = False,
) -> ExitCode:
    """Show what a bundle or the records hold: tuned or not, measured on what, stale or not."""
    from tvmpaged import show

    if (bundle is not None) + records + options > 1:
        raise ValueError("give one of a bundle, --records and --options")
    # What was named must be there; where nothing was tuned yet there is nothing to show.
    if (records or options) and work_dir is not None and not work_dir.is_dir():
        raise FileNotFoundError(f"work-dir={str(work_dir)!r} is no folder")
    logs = work_dir or Path("tuning_logs")
    if options:
        return _options(logs, json)
    rows, problems = show.show_records(logs) if records else show.show_bundles(bundle)
    if json:
        payload = {"rows": list(map(asdict, rows)), "problems": list(map(asdict, problems))}
        print_json(payload, show.SCHEMA_VERSION)
    else:
        _print(rows, problems)
    if records:
        if not rows and not problems:
            say(f"no record in {logs}; tvmpaged tune writes them")
        return exit_code(len(problems), len(rows) + len(problems))
    if bundle is None and not rows:
        say("no kernel here; tvmpaged package writes some, TVMPAGED_BUNDLE says where they are")
    # A place of the search path may be empty; a bundle that was named must hold.
    return ExitCode.FAILED if problems and bundle is not None else ExitCode.DONE


def _options(work_dir: Path, json: bool) -> ExitCode:
    from tvmpaged.show import SCHEMA_VERSION
    from tvmpaged.tuning.ablation import NOISE, ablation

    rows = ablation(work_dir)
    idle = [row.option for row in rows if row.never_wins]
    if json:
        payload = {"options": list(map(asdict, rows)), "never_win": idle, "noise": NOISE}
        print_json(payload, SCHEMA_VERSION)
        return ExitCode.DONE
    cells = [
        (
            row.option,
            row.searches,
            f"{row.worth_mean:.1%}",
            f"{row.worth_most:.1%}",
            ", ".join(f"{value}: {count}" for value, count in row.winners.items()) or "-",
            row.most_in or "-",
        )
        for row in rows
    ]
    columns = ("option", "searches", "worth", "most", "won", "most in")
    print_table(columns, cells, title=f"searches in {work_dir}")
    if not rows:
        say(f"no search in {work_dir}; tvmpaged tune writes them")
    if idle:
        warn(f"never worth more than the noise of {NOISE:.0%}: {', '.join(idle)}")
    return ExitCode.DONE


def _print_resources(rows: list[Row]) -> None:
    """Print what the kernels take of a GPU, where they are for one."""
    cells = [
        (
            row.spec,
            row.resources.registers,
            row.resources.shared_bytes,
            row.resources.spill_bytes,
            row.resources.stack_bytes,
            percent(row.occupancy),
        )
        for row in rows
        if row.resources is not None
    ]
    if cells:
        columns = ("spec", "registers", "shared bytes", "spill bytes", "stack bytes", "occupancy")
        print_table(columns, cells, title="what a thread and a block take")


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
        _print_resources([row for row in rows if (row.place, row.target) == (place, target)])
    for problem in problems:
        named = problem.reason.startswith(problem.place)
        warn(problem.reason if named else f"{problem.place}: {problem.reason}")
