"""Small models for engine tests, and what transformers itself makes of them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from kernel_bundles import bundle

from tvmpaged.runtime.engine import Engine
from tvmpaged.runtime.model import CausalModel, load_model

VOCAB_SIZE = 260  # the 256 bytes and four special tokens
EOS = 258
GREEDY: dict[str, Any] = {"temperature": 0.0}

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)

# Sizes that differ from one another, so that a mixed-up pair of them cannot pass.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": EOS,
    "pad_token_id": 256,
    # Large, so that tokens depend on what is before them and greedy output does not repeat itself.
    "initializer_range": 0.4,
}


def byte_tokenizer() -> Any:
    """Return a tokenizer whose token ids are UTF-8 bytes (in an order of its own)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|start|>", "<|end|>", "<|other|>"]
    base.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_model(folder: Path, config: Any, *, seed: int = 0, tokenizer: Any = None) -> Path:
    """Write a random model of this config."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@cache
def tiny_folder() -> Path:
    """Return the folder of a random Llama with a byte tokenizer; made once per process."""
    from transformers import LlamaConfig

    folder = Path(tempfile.mkdtemp(prefix="tvmpaged-tiny-"))
    return save_model(folder, LlamaConfig(**SIZES), tokenizer=byte_tokenizer())


@cache
def tiny_model() -> CausalModel:
    """Return that model, loaded."""
    return load_model(tiny_folder())


def tiny_engine(**options: Any) -> Engine:
    """Return an engine on that model, with real kernels."""
    defaults = {"num_blocks": 256, "block_size": 4, "bundle": bundle("base")}
    engine = Engine.from_loaded(tiny_model(), **defaults | options)
    assert engine.attention.describe()["kind"] != "reference"
    return engine


@cache
def tiny_reference() -> Any:
    """Return that model with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder(), attn_implementation="sdpa")


def generate_with(
    model: Any, prompt: list[int], max_tokens: int, **options: Any
) -> list[list[int]]:
    """Return transformers' own output tokens, greedy, cut after the end-of-sequence token."""
    with torch.inference_mode():
        rows = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            **options,
        )
    outputs = [row[len(prompt) :].tolist() for row in rows]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in outputs]


@cache
def greedy_tokens(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Return what transformers makes of the tiny model and a prompt."""
    return generate_with(tiny_reference(), list(prompt), max_tokens)[0]


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths, of printable ASCII."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 94, (length,), generator=generator).tolist() for length in lengths]


def tokens_of(results: list[Any]) -> list[list[list[int]]]:
    """Return the token ids of each output of each result."""
    return [[output.token_ids for output in result.outputs] for result in results]


def run_to_end(engine: Engine) -> dict[str, Any]:
    """Step until nothing is left; return each request's last output."""
    last = {}
    while engine.has_unfinished_requests():
        for result in engine.step():
            last[result.request_id] = result
    engine.block_manager.check_integrity()
    return last
