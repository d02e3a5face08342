"""``tvmpaged tune``."""

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmpaged.cli import tune_offline
from tvmpaged.cli.console import JsonFlag, percent, print_json, print_table, say, warn
from tvmpaged.cli.devices import AllowBusyFlag, DevicesFlag, parse_devices
from tvmpaged.cli.duration import TimeLimitFlag, parse_seconds
from tvmpaged.cli.errors import ExitCode, exit_code
from tvmpaged.cli.mlflow_flags import MlflowUriFlag, NoMlflowFlag
from tvmpaged.cli.spec_options import SpecFlags, kv_heads, takes_specs
from tvmpaged.cli.tune_view import show_progress
from tvmpaged.errors import UserError

if TYPE_CHECKING:
    from tvmpaged.spec import AttentionSpec, TargetKey
    from tvmpaged.tune import Estimate, Settings, Tuned

EXAMPLE = (
    "tvmpaged tune --group-size 3 --head-dim 64 --dtype float32 --trials 64 --time-limit 3m\n"
    "tvmpaged tune --model ./SmolLM2-135M --kernel decode --resume\n"
    "tvmpaged tune --target cuda --devices cuda:0,cuda:1 --group-size 4 --head-dim 128\n"
    "tvmpaged tune --target cuda --devices all --group-size 4 --head-dim 128"
)


@takes_specs
def run(
    specs: SpecFlags,
    target: Annotated[
        str,
        typer.Option(help="native, cuda, or this machine by name; with --export any by name."),
    ] = "native",
    devices: DevicesFlag = None,
    allow_busy: AllowBusyFlag = False,
    trials: Annotated[int, typer.Option(min=2, help="Candidates per spec and kernel.")] = 64,
    time_limit: TimeLimitFlag = None,
    work_dir: Annotated[Path, typer.Option(help="Where logs and records go.")] = Path(
        "tuning_logs"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the logs.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of proposals and inputs.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would run.")] = False,
    mlflow_uri: MlflowUriFlag = None,
    no_mlflow: NoMlflowFlag = False,
    export: Annotated[
        Path | None,
        typer.Option(help="Measure nothing: write compiled candidates there.", metavar="DIR"),
    ] = None,
    import_results: Annotated[
        Path | None,
        typer.Option(help="Take in what tvmpaged measure found there.", metavar="DIR"),
    ] = None,
    json: JsonFlag = False,
) -> ExitCode:
    """Search the choices of decode and prefill kernels on this machine, and write records.

    Every candidate is checked against the reference before it is timed. At the end the best ones
    are measured in turns with the untuned default, which wins ties. Ctrl-C loses no finished
    trial: go on with --resume.

    A device without compiler or network is tuned in three steps: --export here, tvmpaged measure
    there, --import-results here; each export goes on from what was taken in before.
    """
    _check_modes(export, import_results, dry_run, devices, specs)
    wanted = specs.required() if import_results is None else []
    from tvmpaged import tune as tuning

    settings = tuning.Settings(
        trials=trials,
        time_limit_s=parse_seconds(time_limit),
        work_dir=work_dir,
        seed=seed,
        resume=resume,
        num_kv_heads=kv_heads(specs),
        mlflow_uri=mlflow_uri,
        use_mlflow=not no_mlflow,
        devices=parse_devices(devices),
        allow_busy=allow_busy,
    )
    if export is not None:
        return tune_offline.export(wanted, target, export, settings, json)
    if import_results is not None:
        return _finish(tune_offline.import_results(import_results, settings), json)
    key = tuning.parse_target(target, settings.devices)
    if dry_run:
        _print_plan(tuning.estimate(wanted, key, settings), json)
        return ExitCode.DONE
    return _search(wanted, key, settings, json)


def _search(
    wanted: "list[AttentionSpec]", target: "TargetKey", settings: "Settings", json: bool
) -> ExitCode:
    """Tune, and say what was found; when it is cut short, how to go on."""
    from tvmpaged.tune import tune

    done: list[Tuned] = []
    try:
        with show_progress() as on_status:
            results = tune(
                wanted,
                target,
                settings,
                on_status=on_status,
                on_result=done.append,
                on_warning=warn,
            )
    except KeyboardInterrupt:
        if len(done) == len(wanted):
            say(f"every spec was done before the signal; what was found is in {settings.work_dir}")
            _finish(done, json)
        else:
            say(
                f"given up; the trials so far are in {settings.work_dir}: the same command goes on "
                "with --resume"
            )
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"no space is left to write {error.filename or settings.work_dir}; make room, then the "
            "same command goes on with --resume"
        ) from error
    return _finish(results, json)


def _check_modes(
    export: Path | None,
    import_results: Path | None,
    dry_run: bool,
    devices: str | None,
    specs: SpecFlags,
) -> None:
    if export is not None and import_results is not None:
        raise ValueError("--export and --import-results are steps of their own: give one of them")
    if dry_run and (export is not None or import_results is not None):
        raise ValueError("--dry-run says what a search here would do: give no --export with it")
    if devices and (export is not None or import_results is not None):
        raise ValueError(
            "--devices measures here, which --export and --import-results do not: name GPUs to "
            "tvmpaged measure, where they are"
        )
    if import_results is not None and specs.specs():
        raise ValueError("--import-results takes all specs of the export: give none with it")


def _finish(results: "list[Tuned]", json: bool) -> ExitCode:
    failures = [each.failure for each in results if each.failure]
    for each in failures:
        say(f"error: {each}")
    _print_results(results, json)
    return exit_code(len(failures), len(results))


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
