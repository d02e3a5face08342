"""``tvmpaged bench``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmpaged.cli.console import JsonFlag, percent, print_json, print_table, say, warn
from tvmpaged.cli.devices import AllowBusyFlag
from tvmpaged.cli.errors import ExitCode
from tvmpaged.cli.mlflow_flags import MlflowUriFlag, NoMlflowFlag
from tvmpaged.cli.spec_options import SpecFlags, kv_heads, takes_specs

if TYPE_CHECKING:
    from tvmpaged.bench import Row
    from tvmpaged.spec import AttentionSpec
    from tvmpaged.tuning.device import Watch

EXAMPLE = """
tvmpaged bench bundles
tvmpaged bench --num-qo-heads 9 --num-kv-heads 3 --head-dim 64 --dtype float32 --kernel decode
"""

#: Of a spec that came without a number of heads.
_NUM_KV_HEADS = 8


@takes_specs
def run(
    specs: SpecFlags,
    bundle: Annotated[
        str | None,
        typer.Argument(help="Measure its kernels; with specs, only look here first."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a decode step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Keys of each sequence.")] = 1024,
    rounds: Annotated[int, typer.Option(min=5, help="How often each is timed.")] = 15,
    against: Annotated[
        str, typer.Option(help="torch (on a GPU FlashInfer too, where it is installed), or none.")
    ] = "torch",
    device: Annotated[str, typer.Option(help="cpu, or a GPU such as cuda:0.")] = "cpu",
    allow_busy: AllowBusyFlag = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Only print the command lines for a profiler.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    mlflow_uri: MlflowUriFlag = None,
    no_mlflow: NoMlflowFlag = False,
    json: JsonFlag = False,
) -> ExitCode:
    """Measure kernels as they are served, beside torch and the machine's measured roof.

    A decode spec is measured on --batch sequences, a prefill spec on one whole prompt of --context
    tokens. K/V heads are those of the flags, matrix or model, else 8. The roof is a plain read of
    as many bytes for decode (on a GPU a large copy), torch's matrix product for prefill. Read the
    ratios: both sides of one were timed in turns, in one run. On a GPU by its own events, with its
    second-level cache overwritten before each call.
    """
    if against not in ("torch", "none"):
        raise ValueError(f"--against {against!r} is not supported; allowed: torch, none")
    wanted = specs.specs()
    if not wanted and bundle is None:
        wanted = specs.required()  # says how to give some
    watch = None if profile else _watch(device, allow_busy)  # before we compute there ourselves
    from tvmpaged.bench import Case, bench, specs_in

    if bundle is not None:
        wanted = wanted or specs_in(bundle, device)
    if profile:
        _print_profile(wanted, json, bundle=bundle, device=device, batch=batch, context=context)
        return ExitCode.DONE
    heads = kv_heads(specs)
    cases = []
    for spec in wanted:
        count = heads.get(spec, _NUM_KV_HEADS)
        if spec.kernel == "decode":
            cases.append(Case(spec, count, batch, context, 1))
        else:
            cases.append(Case(spec, count, 1, context, context))
    rows = bench(
        cases,
        bundle=bundle,
        device=device,
        against_torch=against == "torch",
        rounds=rounds,
        seed=seed,
        on_row=lambda row: say(f"{row.spec}: {row.median_us:.0f} us"),
    )
    if not no_mlflow:
        _log(rows, mlflow_uri, {"rounds": rounds, "seed": seed, "bundle": bundle})
    _print(rows, watch.state() if watch else None, json)
    return ExitCode.DONE


def _print_profile(specs: "list[AttentionSpec]", json: bool, **options: Any) -> None:
    from tvmpaged.bench import SCHEMA_VERSION
    from tvmpaged.bench_profile import profile_commands

    commands = profile_commands(specs, **options)
    if json:
        print_json({"commands": commands}, SCHEMA_VERSION)
    else:
        print("\n".join(commands))


def _watch(device: str, allow_busy: bool) -> "Watch":
    from tvmpaged.gpu import find_gpu
    from tvmpaged.tuning.device import Watch

    gpus = [find_gpu(device)] if device.startswith("cuda") else []
    return Watch(gpus, allow_busy=allow_busy)


def _log(rows: "list[Row]", mlflow_uri: str | None, params: dict[str, Any]) -> None:
    from tvmpaged import bench_log

    if mlflow_uri is not None or bench_log.is_installed():
        bench_log.log_rows(rows, params, mlflow_uri, warn)


def _print(rows: "list[Row]", gpu: dict[str, str] | None, json: bool) -> None:
    from tvmpaged.bench import SCHEMA_VERSION

    if json:
        print_json({"gpu": gpu, "rows": [row.as_dict() for row in rows]}, SCHEMA_VERSION)
        return
    columns = (
        "spec",
        "kind",
        "kv heads",
        "batch",
        "context",
        "median us",
        "p10..p90",
        "rounds",
        "rate",
        "of roof",
        "time / torch",
        "time / FlashInfer",
        "error",
    )
    print_table(
        columns,
        [
            (
                row.spec,
                row.kind,
                row.num_kv_heads,
                row.batch,
                row.context,
                f"{row.median_us:.0f}",
                f"{row.p10_us:.0f}..{row.p90_us:.0f}",
                row.rounds,
                f"{row.gb_per_s:.1f} GB/s"
                if row.roof_gb_per_s is not None
                else f"{row.gflop_per_s:.1f} GFLOP/s",
                percent(row.roof_fraction),
                "-" if row.torch_ratio is None else f"{row.torch_ratio:.2f}",
                "-" if row.flashinfer_ratio is None else f"{row.flashinfer_ratio:.2f}",
                "-" if row.error is None else f"{row.error:.1e}",
            )
            for row in rows
        ],
    )
