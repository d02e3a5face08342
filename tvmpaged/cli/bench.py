"""``tvmpaged bench``."""

from typing import Annotated

import typer

from tvmpaged.cli.console import JsonFlag, print_json, print_table, say
from tvmpaged.cli.errors import ExitCode
from tvmpaged.cli.spec_options import SpecFlags, kv_heads, takes_specs

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
    against: Annotated[str, typer.Option(help="torch, or none.")] = "torch",
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: JsonFlag = False,
) -> ExitCode:
    """Measure kernels as they are served, beside torch and a sum over the same bytes.

    A decode spec is measured on --batch sequences, a prefill spec on one whole prompt of --context
    tokens. K/V heads are those of the flags or the model, else 8. Read the ratios: both sides of
    one were timed in turns, in one run.
    """
    if against not in ("torch", "none"):
        raise ValueError(f"--against {against!r} is not supported; allowed: torch, none")
    wanted = specs.specs()
    if not wanted and bundle is None:
        wanted = specs.required()  # says how to give some
    from tvmpaged.bench import SCHEMA_VERSION, Case, bench, specs_in

    if bundle is not None:
        wanted = wanted or specs_in(bundle)
    heads = kv_heads(specs)
    cases = []
    for spec in wanted:
        count = heads.get(spec.group_size, _NUM_KV_HEADS)
        if spec.kernel == "decode":
            cases.append(Case(spec, count, batch, context, 1))
        else:
            cases.append(Case(spec, count, 1, context, context))
    rows = bench(
        cases,
        bundle=bundle,
        against_torch=against == "torch",
        rounds=rounds,
        seed=seed,
        on_row=lambda row: say(f"{row.spec}: {row.median_us:.0f} us"),
    )
    if json:
        print_json({"rows": [row.as_dict() for row in rows]}, SCHEMA_VERSION)
        return ExitCode.DONE
    columns = (
        "spec",
        "kind",
        "kv heads",
        "batch",
        "context",
        "median us",
        "p10..p90",
        "GB/s",
        "GFLOP/s",
        "time / sum",
        "time / torch",
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
                f"{row.gb_per_s:.1f}",
                f"{row.gflop_per_s:.1f}",
                f"{row.sum_ratio:.2f}",
                "-" if row.torch_ratio is None else f"{row.torch_ratio:.2f}",
            )
            for row in rows
        ],
    )
    return ExitCode.DONE
