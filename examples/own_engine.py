"""An engine of one's own on `PagedAttention` and `BlockManager`: no transformers, no weights.

A toy model of one attention layer decodes a prompt, forks, and decodes both. At the end dense
attention over the same tokens must say the same.

python examples/own_engine.py
"""

import torch

import tvmpaged

VOCAB_SIZE, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 100, 6, 2, 64, 16


class Toy:
    """Embedding, one attention layer, head; random weights."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        heads = NUM_QO_HEADS + 2 * NUM_KV_HEADS
        self.embedding = torch.randn(VOCAB_SIZE, heads, HEAD_DIM, generator=generator)
        self.head = torch.randn(NUM_QO_HEADS * HEAD_DIM, VOCAB_SIZE, generator=generator)

    def qkv(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v ``[num_tokens, heads, head_dim]``, views of one fused tensor."""
        rows = self.embedding[token_ids]
        return (
            rows[:, :NUM_QO_HEADS],
            rows[:, NUM_QO_HEADS : NUM_QO_HEADS + NUM_KV_HEADS],
            rows[:, NUM_QO_HEADS + NUM_KV_HEADS :],
        )


def main() -> None:
    """Decode, fork, decode, compare."""
    toy = Toy()
    attention = tvmpaged.PagedAttention(
        NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype="float32"
    )
    k_cache, v_cache = attention.new_cache(num_blocks=16)
    manager = tvmpaged.BlockManager(num_blocks=16, block_size=BLOCK_SIZE)
    tokens: dict[str, list[int]] = {}

    def step(new: dict[str, list[int]]) -> torch.Tensor:
        """Compute each sequence's new tokens; return the logits after its last one."""
        for name, part in new.items():
            if name in tokens:
                manager.append(name, part)
            else:
                manager.allocate(name, part)
            tokens.setdefault(name, []).extend(part)
        copies = manager.take_copies()
        if copies:
            print(f"copied on write: {copies}")
            attention.copy_blocks(k_cache, v_cache, torch.tensor(copies))
        tables = [manager.block_table(name) for name in new]
        width = max(map(len, tables))
        ends = torch.tensor([len(part) for part in new.values()]).cumsum(0)
        plan = attention.plan(
            torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
            torch.tensor([len(tokens[name]) for name in new]),
            torch.tensor([table + [-1] * (width - len(table)) for table in tables]),
        )
        q, k, v = toy.qkv(torch.tensor([token for part in new.values() for token in part]))
        attention.append_kv(k, v, k_cache, v_cache, plan.slot_mapping)
        out = attention.run(plan, q, k_cache, v_cache)
        for name in new:
            manager.commit(name)
        return out[ends - 1].flatten(1) @ toy.head

    best = step({"trunk": list(range(20))}).argmax(-1).tolist()
    for _ in range(5):
        best = step({"trunk": best}).argmax(-1).tolist()
    manager.fork("trunk", "branch")
    tokens["branch"] = tokens["trunk"].copy()
    second = {"trunk": best, "branch": [(best[0] + 1) % VOCAB_SIZE]}
    for _ in range(5):
        logits = step(second)
        second = {name: [int(row.argmax())] for name, row in zip(second, logits, strict=True)}
    for name, ids in tokens.items():
        print(f"{name}: {ids[20:]} in blocks {manager.block_table(name)}")

    for row, (name, ids) in zip(logits, tokens.items(), strict=True):
        q, k, v = (tensor.transpose(0, 1) for tensor in toy.qkv(torch.tensor(ids)))
        dense = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        error = (row - dense[:, -1].flatten() @ toy.head).norm() / row.norm()
        print(f"{name} against dense attention: relative error {float(error):.1e}")
        if error > 1e-5:
            raise SystemExit("they differ")


if __name__ == "__main__":
    main()
