"""``tvmpaged verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvmpaged.cli.console import JsonFlag, print_json, print_table, say
from tvmpaged.cli.errors import ExitCode

EXAMPLE = """
tvmpaged verify bundles
tvmpaged verify bundles --numbers --require-signature release.pem
"""


def run(
    bundle: Annotated[Path, typer.Argument(help="The bundle to check.")],
    static: Annotated[
        bool, typer.Option("--static", help="Load nothing: hashes, versions, modes [the default].")
    ] = False,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Also compare each artifact with the reference.")
    ] = False,
    require_signature: Annotated[
        Path | None, typer.Option(help="Ed25519 public key (PEM) that must have signed it.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where: cpu, or a GPU such as cuda:0.")] = "cpu",
    json: JsonFlag = False,
) -> ExitCode:
    """Check a bundle: hashes, versions, modes, signature; with --numbers what it computes."""
    from dataclasses import asdict
    from functools import partial

    from tvmpaged import verify

    if static and numbers:
        raise ValueError("--static loads nothing and --numbers loads everything: give one of them")
    make_attention = target = None
    if numbers:
        from tvmpaged.runtime.attention import PagedAttention
        from tvmpaged.runtime.place import place_of

        make_attention = partial(PagedAttention, device=device)
        target = place_of(device).target
    checks = verify.verify(
        bundle, make_attention=make_attention, require_signature=require_signature, target=target
    )
    counts = {
        outcome: sum(each.outcome == outcome for each in checks)
        for outcome in ("ok", "failed", "not run")
    }
    if json:
        payload = {"bundle": str(bundle), **counts, "checks": list(map(asdict, checks))}
        print_json(payload, verify.SCHEMA_VERSION)
    else:
        rows = [(each.outcome, each.name, each.what, each.detail or "-") for each in checks]
        print_table(("outcome", "check", "what", "detail"), rows)
        say(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return ExitCode.FAILED if counts["failed"] else ExitCode.DONE
