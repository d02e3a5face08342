"""``tvmpaged tune``."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmpaged.cli.console import JsonFlag, percent, print_json, print_table, say, warn
from tvmpaged.cli.errors import ExitCode
from tvmpaged.cli.spec_options import SpecFlags, kv_heads, takes_specs

if TYPE_CHECKING:
    from tvmpaged.tune import Estimate, Tuned

EXAMPLE = (
    "tvmpaged tune --group-size 3 --head-dim 64 --dtype float32 --trials 64 --time-limit 3m\n"
    "tvmpaged tune --model ./SmolLM2-135M --kernel decode --resume"
)

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


@takes_specs
def run(
    specs: SpecFlags,
    target: Annotated[str, typer.Option(help="native, or this machine by name.")] = "native",
    trials: Annotated[int, typer.Option(min=2, help="Candidates per spec and kernel.")] = 64,
    time_limit: Annotated[
        str | None, typer.Option(help="Of the whole run: 90s, 10m, 2h.", metavar="TIME")
    ] = None,
    work_dir: Annotated[Path, typer.Option(help="Where logs and records go.")] = Path(
        "tuning_logs"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the logs.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of proposals and inputs.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run.")] = False,
    mlflow_uri: Annotated[
        str | None,
        typer.Option(help="Tracking server [$MLFLOW_TRACKING_URI, else sqlite:///mlflow.db]."),
    ] = None,
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Log no runs.")] = False,
    json: JsonFlag = False,
) -> ExitCode:
    """Search the choices of decode and prefill kernels on this machine, and write records.

    Every candidate is checked against the reference before it is timed. At the end the best ones
    are measured in turns with the untuned default, which wins ties. Ctrl-C loses no finished
    trial: go on with --resume.
    """
    wanted = specs.required()
    seconds = parse_seconds(time_limit)
    from tvmpaged import tune as tuning
    from tvmpaged.cli.tune_view import show_progress

    key = tuning.parse_target(target)
    settings = tuning.Settings(
        trials=trials,
        time_limit_s=seconds,
        work_dir=work_dir,
        seed=seed,
        resume=resume,
        num_kv_heads=kv_heads(specs),
        mlflow_uri=mlflow_uri,
        use_mlflow=not no_mlflow,
    )
    if dry_run:
        _print_plan(tuning.estimate(wanted, key, settings), json)
        return ExitCode.DONE
    with show_progress() as on_status:
        results = tuning.tune(wanted, key, settings, on_status=on_status, on_warning=warn)
    _print_results(results, json)
    failed = [each for each in results if each.record is None]
    if not failed:
        return ExitCode.DONE
    return ExitCode.FAILED if len(failed) == len(results) else ExitCode.PARTLY_FAILED


def parse_seconds(text: str | None) -> float | None:
    """Return the seconds of a time such as ``90s``, ``10m`` or ``2h``.

    Raises
    ------
    ValueError
        When it is none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"--time-limit {text!r} cannot be read; write 90s, 10m or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def _print_plan(plan: "list[Estimate]", json: bool) -> None:
    if json:
        from tvmpaged.tune import SCHEMA_VERSION

        print_json({"dry_run": True, "specs": [each.as_dict() for each in plan]}, SCHEMA_VERSION)
        return
    columns = ("spec", "K/V heads", "combinations", "trials", "in the log", "estimate s")
    print_table(
        columns,
        [
            (
                each.spec,
                each.num_kv_heads,
                each.combinations,
                each.trials,
                each.known_trials,
                f"{each.seconds:.0f}",
            )
            for each in plan
        ],
    )


def _print_results(results: "list[Tuned]", json: bool) -> None:
    for each in results:
        if each.failure:
            say(f"error: {each.failure}")
    if json:
        from tvmpaged.tune import SCHEMA_VERSION

        print_json({"specs": [each.as_dict() for each in results]}, SCHEMA_VERSION)
        return
    measured = ("median us", "default us", "speed-up", "rate", "of roof")
    columns = ("spec", "winner", *measured, "trials", "failed")
    print_table(columns, [_row(each) for each in results])


def _row(result: "Tuned") -> tuple[Any, ...]:
    record = result.record
    if record is None:
        return (result.spec, "failed", *"-------")
    rate = (
        f"{record.gb_per_s:.1f} GB/s"
        if record.gb_per_s is not None
        else f"{record.gflop_per_s:.1f} GFLOP/s"
    )
    return (
        result.spec,
        "default" if record.is_default else "tuned",
        f"{record.latency_us.median:.0f}",
        f"{record.default_latency_us.median:.0f}",
        f"{record.speedup:.2f}",
        rate,
        percent(record.roof_fraction),
        record.trials,
        sum(record.failures.values()),
    )
