"""The last part of ci/demo.sh: decode three prompts and say what the cache did meanwhile."""

import argparse
import os

# Before torch: its idle OpenMP threads would spin on the cores that the kernels' threads need.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("TQDM_DISABLE", "1")

import tvmpaged

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    [{"role": "user", "content": "Name a fruit, and say in one sentence why you like it."}],
]
GREEDY = tvmpaged.SamplingParams(temperature=0.0, max_tokens=48)
FOUR_SAMPLES = tvmpaged.SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=0, max_tokens=48)


def main() -> None:
    """Decode and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", required=True)
    arguments = parser.parse_args()
    engine = tvmpaged.Engine.from_pretrained(
        arguments.model, num_blocks=64, bundle=arguments.bundle
    )
    results = engine.generate(PROMPTS, [GREEDY, GREEDY, FOUR_SAMPLES])
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"\nprompt: {prompt if isinstance(prompt, str) else prompt[0]['content']!r}")
        for completion in result.outputs:
            print(f"  [{completion.index}] {completion.text!r}")
    print("\nkernels")
    for name, kernel in engine.attention.describe()["kernels"].items():
        print(f"  {name}: {kernel['kind']}, sha256 {kernel['sha256'][:12]}")
    stats = engine.stats()
    print(
        f"\n{stats.tokens_per_s:.1f} tokens/s in {stats.num_steps} packed steps; "
        f"time to first token {stats.time_to_first_token_s:.3f} s (mean)"
    )
    print(
        f"blocks of {stats.block_size} tokens: {stats.num_blocks_used_peak} used at most, "
        f"{stats.num_blocks_shared_peak} shared at most, {stats.num_blocks_copied} copied on write"
    )
    print(
        f"KV-cache utilisation: {stats.kv_cache_utilisation_peak:.1%} at most of "
        f"{stats.num_blocks} blocks ({stats.kv_cache_bytes / 2**20:.0f} MiB)"
    )


if __name__ == "__main__":
    main()
