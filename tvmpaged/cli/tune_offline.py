"""``tvmpaged tune --export`` and ``--import-results``: the device is elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tvmpaged.cli.console import print_json, print_table, say, warn
from tvmpaged.cli.errors import ExitCode, exit_code
from tvmpaged.cli.tune_view import show_progress
from tvmpaged.spec import AttentionSpec

if TYPE_CHECKING:
    from tvmpaged.tune import Settings, Tuned
    from tvmpaged.tune_offline import Exported


def export(
    specs: Sequence[AttentionSpec], target: str, folder: Path, settings: "Settings", json: bool
) -> ExitCode:
    """Write an export, and say what is in it and what comes next."""
    from tvmpaged.package import parse_target
    from tvmpaged.sm import limits
    from tvmpaged.tune_offline import export as export_to

    key = parse_target(target)
    guessed = limits(key.arch)[1] if key.kind == "cuda" else ""
    if guessed:
        warn(guessed)
    with show_progress() as on_status:
        found = export_to(specs, key, folder, settings, on_status=on_status)
    failures = [each.failure for each in found if each.failure]
    for each in failures:
        say(f"error: {each}")
    if json:
        from tvmpaged.tune import SCHEMA_VERSION

        payload = {"export": str(folder), "specs": [each.as_dict() for each in found]}
        print_json(payload, SCHEMA_VERSION)
    else:
        print_table(("spec", "candidates", "failed", "from trials"), [_row(each) for each in found])
        if len(failures) < len(found):
            say(f"take {folder} to a machine of {key} and run there: tvmpaged measure {folder}")
    return exit_code(len(failures), len(found))


def _row(exported: "Exported") -> tuple[object, ...]:
    if exported.failure:
        return (exported.spec, "failed", "-", "-")
    return (exported.spec, exported.candidates, exported.failures, exported.known_trials)


def import_results(folder: Path, settings: "Settings") -> "list[Tuned]":
    """Take results in, and return what became of each spec."""
    from tvmpaged.tune_offline import import_results as import_from

    with show_progress() as on_status:
        return import_from(folder, settings, on_status=on_status, on_warning=warn)
