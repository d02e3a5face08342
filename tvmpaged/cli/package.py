"""``tvmpaged package``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvmpaged.cli.console import JsonFlag, print_json, print_table, progress, say, warn
from tvmpaged.cli.errors import ExitCode
from tvmpaged.cli.spec_options import SpecFlags, takes_specs

if TYPE_CHECKING:
    from tvmpaged.package import Packaged

EXAMPLE = """
tvmpaged package --target native --model ./SmolLM2-135M --base --install
tvmpaged package --target cpu/x86-64-v3 --target cuda/sm_90/nvidia-h200 --all-records --out bundles
"""


@takes_specs
def run(
    specs: SpecFlags,
    target: Annotated[
        list[str] | None, typer.Option(help="native, cpu/NAME, cuda or cuda/ARCH/GPU [native].")
    ] = None,
    all_records: Annotated[
        bool, typer.Option("--all-records", help="Package every record of the targets.")
    ] = False,
    base: Annotated[
        bool, typer.Option("--base", help="Add the kernels that serve every spec, untuned.")
    ] = False,
    records: Annotated[Path, typer.Option(help="Where records lie.")] = Path("tuning_logs"),
    out: Annotated[Path, typer.Option(help="The bundle to write.")] = Path("bundles"),
    install: Annotated[
        bool, typer.Option("--install", help="Write into the user cache instead of --out.")
    ] = False,
    ptx: Annotated[
        bool,
        typer.Option("--ptx", help="Put PTX beside code for GPUs, which newer ones then run, too."),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compiler processes [the usable cores].")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace artifacts that differ from the new ones.")
    ] = False,
    sign: Annotated[
        Path | None, typer.Option(help="Sign with this Ed25519 private key (PEM).")
    ] = None,
    json: JsonFlag = False,
) -> ExitCode:
    """Compile records (or untuned defaults) into a bundle that needs no compiler."""
    from tvmpaged import package as work
    from tvmpaged.bundle import user_cache

    targets = [work.parse_target(text) for text in target or ["native"]]
    wanted = specs.specs()
    if all_records:
        wanted += work.recorded_specs(records, targets)
    if not wanted and not base:
        wanted = specs.required()  # says how to give some
    total = len(targets) * (len(set(wanted)) + (len(work.base_specs()) if base else 0))
    with progress("package", total) as advance:
        done = work.package(
            wanted,
            targets,
            user_cache() if install else out,
            records_dir=records,
            base=base,
            jobs=jobs or len(os.sched_getaffinity(0)),
            replace_existing=replace,
            sign=sign,
            ptx=ptx,
            progress=lambda count, _total, what: advance(count, what),
        )
    if json:
        print_json({"targets": [_plain(each) for each in done]}, work.SCHEMA_VERSION)
    else:
        _print(done)
    refused = sum(each.num_refused for each in done)
    if not refused:
        return ExitCode.DONE
    held = sum(len(each.merge.taken) + len(each.merge.unchanged) for each in done)
    return ExitCode.PARTLY_FAILED if held else ExitCode.FAILED


def _print(done: list[Packaged]) -> None:
    for each in done:
        for note in each.notes:
            warn(note)
        for kept in each.merge.kept:
            warn(str(kept))
        for spec, reason in each.failures.items():
            warn(f"{spec}: failed: {reason}")
        for artifact in each.merge.dropped:
            warn(f"{artifact.spec}: dropped, it was built under another ABI")
    rows = [
        (
            state,
            artifact.kind,
            artifact.spec,
            each.states.get(artifact.spec, "-"),
            artifact.sha256[:16],
        )
        for each in done
        for state, artifacts in (("new", each.merge.taken), ("unchanged", each.merge.unchanged))
        for artifact in artifacts
    ]
    if rows:
        print_table(("state", "kind", "spec", "record", "sha256"), rows)
    for each in done:
        if each.merge.taken or each.merge.unchanged or each.merge.kept:
            say(f"{each.target}: {each.folder}")


def _plain(each: Packaged) -> dict[str, object]:
    return {
        "target": str(each.target),
        "folder": str(each.folder),
        "taken": {str(artifact.spec): artifact.file for artifact in each.merge.taken},
        "unchanged": [str(artifact.spec) for artifact in each.merge.unchanged],
        "replaced": [str(artifact.spec) for artifact in each.merge.replaced],
        "dropped": [str(artifact.spec) for artifact in each.merge.dropped],
        "kept": [str(kept) for kept in each.merge.kept],
        "failures": {str(spec): reason for spec, reason in each.failures.items()},
        "notes": list(each.notes),
        "records": {str(spec): state for spec, state in each.states.items()},
    }
