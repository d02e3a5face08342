"""``tvmpaged measure``."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmpaged.cli.console import JsonFlag, print_json, print_table, say
from tvmpaged.cli.devices import AllowBusyFlag, DevicesFlag, parse_devices
from tvmpaged.cli.duration import TimeLimitFlag, parse_seconds
from tvmpaged.cli.errors import ExitCode, exit_code
from tvmpaged.cli.tune_view import show_progress

if TYPE_CHECKING:
    from tvmpaged.measure import SpecMeasured

EXAMPLE = """
tvmpaged measure ./candidates --time-limit 30m
# before: tvmpaged tune --group-size 3 --head-dim 64 --trials 64 --export ./candidates
# after: tvmpaged tune --import-results ./candidates
"""


def run(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What tvmpaged tune --export wrote.")
    ],
    time_limit: TimeLimitFlag = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            help="Go on where an earlier run with as many threads stopped, or measure all anew.",
        ),
    ] = True,
    devices: DevicesFlag = None,
    allow_busy: AllowBusyFlag = False,
    json: JsonFlag = False,
) -> ExitCode:
    """Check and time exported candidates on this machine, which needs no compiler.

    Hashes are checked before anything is loaded, and every candidate is checked against the
    reference before it is timed. The results are written into the same folder: take it back and
    run tvmpaged tune --import-results there. Ctrl-C, or a machine that dies, loses no answer: run
    it again.
    """
    seconds = parse_seconds(time_limit)
    from tvmpaged.measure import SCHEMA_VERSION, measure

    with show_progress() as on_status:
        found = measure(
            folder,
            resume=resume,
            time_limit_s=seconds,
            devices=parse_devices(devices),
            allow_busy=allow_busy,
            on_status=on_status,
        )
    failures = [each.failure for each in found.specs if each.failure]
    for each in failures:
        say(f"error: {each}")
    if json:
        specs = [each.as_dict() for each in found.specs]
        payload = {"results": str(found.path), "device": vars(found.device), "specs": specs}
        print_json(payload, SCHEMA_VERSION)
    else:
        columns = ("spec", "winner", "median us", "default us", "speed-up", "trials", "failed")
        print_table(columns, [_row(each) for each in found.specs])
        say(
            f"wrote {found.path}; take the folder back and run there: "
            f"tvmpaged tune --import-results {shlex.quote(str(folder))}"
        )
    return exit_code(len(failures), len(found.specs))


def _row(measured: "SpecMeasured") -> tuple[Any, ...]:
    won = measured.result
    if won is None:
        return (measured.spec, "failed", "-", "-", "-", "-", "-")
    return (
        measured.spec,
        "default" if won.is_default else "a candidate",
        f"{won.latency_us.median:.0f}",
        f"{won.default_latency_us.median:.0f}",
        f"{won.speedup:.2f}",
        measured.trials,
        sum((measured.failures or {}).values()),
    )
