"""``tvmpaged generate``."""

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvmpaged.cli.console import JsonFlag, print_json, say

if TYPE_CHECKING:
    from tvmpaged.runtime.engine import Engine
    from tvmpaged.runtime.outputs import RequestOutput
    from tvmpaged.runtime.params import BeamSearchParams, SamplingParams
    from tvmpaged.runtime.stats import EngineStats

EXAMPLE = """\
tvmpaged generate --model ./SmolLM2-135M-Instruct --chat "What is paging?"
tvmpaged generate --model model.gguf --prompt "The sea is" --n 4 --temperature 0.8 --seed 0
tvmpaged generate --model model.gguf --prompt "One, two," --beam-width 4 --json"""

SCHEMA_VERSION = 1

_TEMPERATURE_OF_SEVERAL = 0.8


def run(
    model: Annotated[
        str, typer.Option(metavar="PATH|ID", help="Folder, GGUF file, hub id or package:NAME.")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Text to go on from; repeatable.")
    ] = None,
    chat: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Message to answer; repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of output.")] = 64,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="FLOAT",
            help="0 is greedy.",
            show_default=f"0; {_TEMPERATURE_OF_SEVERAL} if n > 1",
        ),
    ] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely this much.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many; 0 is all.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ends the output; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="INT", help="Of the draws.")] = None,
    n: Annotated[int, typer.Option(help="Samples per prompt.")] = 1,
    beam_width: Annotated[int, typer.Option(help="Search this many beams; 0 draws.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16.", show_default="the model's")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block of the KV cache.")] = 16,
    num_blocks: Annotated[
        int | None, typer.Option(metavar="INT", help="Blocks of the KV cache.", show_default="auto")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    bundle: Annotated[
        str | None, typer.Option(metavar="DIR", help="Kernels to look at first.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Decode text with a model; the text goes to stdout, numbers about it to stderr."""
    prompts: list[Any] = [*(prompt or ())]
    prompts += [[{"role": "user", "content": text}] for text in chat or ()]
    if not prompts:
        raise ValueError("nothing to decode: give --prompt TEXT or --chat TEXT")
    params = _params(
        beam_width,
        n=n,
        max_tokens=max_tokens,
        temperature=_TEMPERATURE_OF_SEVERAL
        if temperature is None and n > 1
        else temperature or 0.0,
        top_p=top_p,
        top_k=top_k,
        stop=stop,
        seed=seed,
    )
    engine = _load(
        model,
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        device=device,
        bundle=bundle,
    )
    streams = not json and sys.stdout.isatty() and len(prompts) == 1 and n == 1 and not beam_width
    results = _decode(engine, prompts, params, streams)
    stats = engine.stats()
    if json:
        report = {
            "model": model,
            "results": [asdict(result) for result in results],
            "stats": asdict(stats),
            "attention": engine.attention.describe(),
        }
        print_json(report, SCHEMA_VERSION)
        return
    if not streams:
        _print(results)
    _say_stats(stats, engine.attention.describe()["kind"])


def _params(beam_width: int, **sampling: Any) -> "SamplingParams | BeamSearchParams":
    from tvmpaged.runtime.params import BeamSearchParams, SamplingParams

    if not beam_width:
        return SamplingParams(**sampling)
    unused = {"n": 1, "top_p": 1.0, "top_k": 0, "stop": None}
    for name, value in unused.items():
        if sampling[name] not in (value, []):
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag}={sampling[name]} says how to draw; --beam-width draws nothing"
            )
    return BeamSearchParams(
        beam_width=beam_width,
        max_tokens=sampling["max_tokens"],
        temperature=sampling["temperature"],
    )


def _load(model: str, **options: Any) -> "Engine":
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries that load the weights
    from tvmpaged.runtime.engine import Engine

    return Engine.from_pretrained(model, **options)


def _decode(
    engine: "Engine", prompts: list[Any], params: "SamplingParams | BeamSearchParams", streams: bool
) -> "list[RequestOutput]":
    names = [engine.add_request(None, prompt, params) for prompt in prompts]
    results: dict[str, RequestOutput] = {}
    num_printed = 0
    while engine.has_unfinished_requests():
        for result in engine.step():
            results[result.request_id] = result
            if streams:
                text = result.outputs[0].text
                print(text[num_printed:], end="", flush=True)
                num_printed = len(text)
    if streams:
        print()
    return [results[name] for name in names]


def _print(results: "list[RequestOutput]") -> None:
    alone = len(results) == 1 and len(results[0].outputs) == 1
    for place, result in enumerate(results, start=1):
        for output in result.outputs:
            if not alone:
                print(f"== prompt {place}, output {output.index + 1}")
            print(output.text)


def _say_stats(stats: "EngineStats", kind: str) -> None:
    say(
        f"{stats.num_generated_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s, "
        f"first token after {stats.time_to_first_token_s:.3f} s"
    )
    say(
        f"blocks: {stats.num_blocks_used_peak} used / {stats.num_blocks_shared_peak} shared / "
        f"{stats.num_blocks_copied} copied of {stats.num_blocks}; "
        f"KV-cache utilisation {stats.kv_cache_utilisation_peak:.1%}; kernels: {kind}"
    )
