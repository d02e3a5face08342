"""``tvmpaged mlflow-sync``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmpaged.cli.console import JsonFlag, print_json, print_table, progress, say
from tvmpaged.cli.errors import ExitCode
from tvmpaged.cli.mlflow_flags import MlflowUriFlag

if TYPE_CHECKING:
    from tvmpaged.mlflow_fetch import Fetched
    from tvmpaged.mlflow_sync import Synced

EXAMPLE = """
tvmpaged mlflow-sync tuning_logs --mlflow-uri http://tracking:5000
tvmpaged mlflow-sync tuning_logs --from-run 0123456789abcdef0123456789abcdef
"""


def run(
    dir: Annotated[Path, typer.Argument(help="A folder of tuning logs.", metavar="DIR")],  # noqa: A002
    mlflow_uri: MlflowUriFlag = None,
    from_run: Annotated[
        list[str] | None,
        typer.Option(
            help="Rebuild DIR from this run's artifacts instead; repeatable.", metavar="RUN"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what the server lacks.")
    ] = False,
    json: JsonFlag = False,
) -> ExitCode:
    """Upload to MLflow what an unreachable tracking server missed of the logs in DIR.

    What is there already is not sent again. With --from-run it goes the other way: log and record
    of a run (or of all runs of one tune) are checked and written where tune --resume and package
    look for them; a file that is there already is never replaced.
    """
    from tvmpaged.mlflow_fetch import fetch
    from tvmpaged.mlflow_sync import SCHEMA_VERSION, sync
    from tvmpaged.tuning.searches import log_folders
    from tvmpaged.tuning.tracking import tracking_uri

    if from_run and dry_run:
        raise ValueError("--dry-run and --from-run: give one of the two")
    uri = tracking_uri(mlflow_uri)
    found: Sequence[Fetched] | Sequence[Synced]
    if from_run:
        with progress("fetch", len(from_run)) as advance:
            found = fetch(dir, uri, from_run, progress=advance)
    else:
        with progress("sync", len(log_folders(dir))) as advance:
            found = sync(dir, uri, dry_run=dry_run, progress=advance)
    for each in found:
        if each.failure:
            say(f"error: {each.failure}")
    if json:
        print_json({"runs": list(map(asdict, found))}, SCHEMA_VERSION)
    else:
        _print(found)
    failed = sum(1 for each in found if each.failure)
    if not failed:
        return ExitCode.DONE
    return ExitCode.FAILED if failed == len(found) else ExitCode.PARTLY_FAILED


def _print(found: Sequence[Fetched] | Sequence[Synced]) -> None:
    from tvmpaged.mlflow_fetch import Fetched

    rows = []
    for each in found:
        if isinstance(each, Fetched):
            state = "failed" if each.failure else "fetched" if each.files else "complete"
            what = ", ".join(each.files) or "-"
        else:
            state = each.state
            what = ", ".join(f"{n} {name}" for name, n in each.added.items() if n) or "-"
        rows.append((each.target, each.spec, state, what, each.run_id or "-"))
    print_table(("target", "spec", "state", "what was missing", "run"), rows)
