"""Whole steps on a device against torch in float32: at once, on a stream, and from a CUDA graph.

Prints JSON; exits with 1 when anything is wrong. On a CPU, which has neither streams nor graphs,
the same steps run one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import tvmpaged
from tvmpaged.bench import specs_in
from tvmpaged.bundle.search import BUNDLE_VARIABLE
from tvmpaged.spec import AttentionSpec

#: Greatest ||out - truth|| / ||truth|| by dtype.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
NUM_KV_HEADS = 2
#: Lengths of a decode batch: its longest, and the steps that a captured graph is replayed for.
LONGEST = 1300
STEPS = ([1, 300, 1300, 17], [1299, 1, 0, 900], [64, 65, 513, 2])
SMALL_LONGEST, SMALL_STEPS = 40, ([1, 40, 17], [5, 1, 33])


@dataclass(frozen=True)
class Check:
    """One comparison: its error, and the greatest that passes."""

    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit


class Steps:
    """Random steps of one spec, and the truth about them.

    Parameters
    ----------
    spec : AttentionSpec
        A decode kernel's; prefill's sizes are the same.
    bundle, device : str
        Where the kernels are, and where they run.
    """

    def __init__(self, spec: AttentionSpec, bundle: str, device: str) -> None:
        heads = NUM_KV_HEADS * spec.group_size
        sizes = (heads, NUM_KV_HEADS, spec.head_dim, spec.block_size, spec.q_dtype)
        self.attn = tvmpaged.PagedAttention(*sizes, device=device, bundle=bundle, strict=True)
        self.spec = spec
        self.random = torch.Generator().manual_seed(0)
        self.limit = TOLERANCE[spec.out_dtype]

    def rows(self, count: int, heads: int) -> torch.Tensor:
        """Return random rows."""
        made = torch.randn(count, heads, self.spec.head_dim, generator=self.random)
        return made.to(self.attn.dtype).to(self.attn.device)

    def fill(self, lengths: list[int], blocks: int) -> tuple[Any, Any, torch.Tensor]:
        """Return caches that hold random K and V of sequences, and their block table."""
        num_blocks = blocks * len(lengths)
        table = torch.randperm(num_blocks, generator=self.random).view(len(lengths), blocks)
        k_cache, v_cache = self.attn.new_cache(num_blocks)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        whole = self.attn.plan(starts, lengths, table)
        k, v = (self.rows(int(starts[-1]), NUM_KV_HEADS) for _ in range(2))
        self.attn.append_kv(k, v, k_cache, v_cache, whole.slot_mapping)
        return k_cache, v_cache, table

    def truth(
        self, q: torch.Tensor, q_lens: list[int], lengths: list[int], table: Any, caches: Any
    ) -> torch.Tensor:
        """Return torch's attention in float32, sequence by sequence."""
        found, begin = [], 0
        for row, (q_len, length) in enumerate(zip(q_lens, lengths, strict=True)):
            rows = q[begin : begin + q_len].transpose(0, 1).float()
            begin += q_len
            positions = torch.arange(length)
            slots = table[row][positions // self.spec.block_size] * self.spec.block_size
            k, v = self.attn.read_kv(*caches, slots + positions % self.spec.block_size)
            k, v = (each.transpose(0, 1).float() for each in (k, v))
            seen = torch.arange(length) <= torch.arange(q_len)[:, None] + length - q_len
            if not length:
                found.append(torch.zeros_like(rows).transpose(0, 1))
                continue
            out = torch.nn.functional.scaled_dot_product_attention(
                rows[None], k[None], v[None], attn_mask=seen.to(q.device), enable_gqa=True
            )
            found.append(out[0].nan_to_num().transpose(0, 1))
        return torch.cat(found)

    def error(self, out: torch.Tensor, truth: torch.Tensor) -> float:
        """Return ||out - truth|| / ||truth||."""
        return float((out.float() - truth).norm() / truth.norm())


def prefill(steps: Steps) -> Iterator[Check]:
    """Check a whole prompt, a chunk over a context, and both in one step with a decode row."""
    block = steps.spec.block_size
    q_lens, lengths = [3 * block + 5, 4, 1], [3 * block + 5, 2 * block + 4, block]
    k_cache, v_cache, table = steps.fill(lengths, 4)
    q = steps.rows(sum(q_lens), steps.attn.num_qo_heads)
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    out = steps.attn.run(steps.attn.plan(starts, lengths, table), q, k_cache, v_cache)
    truth = steps.truth(q, q_lens, lengths, table, (k_cache, v_cache))
    yield Check(f"{steps.spec}: prefill", steps.error(out, truth), steps.limit)


def copies_and_merge(steps: Steps) -> Iterator[Check]:
    """Check copied blocks, bit by bit, and two halves of a context merged."""
    block = steps.spec.block_size
    k_cache, v_cache, table = steps.fill([2 * block], 4)
    expected = [each.clone() for each in (k_cache, v_cache)]
    for each in expected:
        each[table[0, 3]] = each[table[0, 0]]
    steps.attn.copy_blocks(k_cache, v_cache, [(int(table[0, 0]), int(table[0, 3]))])
    same = all(map(torch.equal, (k_cache, v_cache), expected))
    yield Check(f"{steps.spec}: copy_blocks", 0.0 if same else 1.0, 0.0)

    q = steps.rows(1, steps.attn.num_qo_heads)
    caches = (k_cache, v_cache)

    def part(first: int, length: int) -> Any:
        plan = steps.attn.plan([0, 1], [length], table[:, first:])
        return steps.attn.run(plan, q, *caches, return_lse=True)

    out, _ = tvmpaged.merge_states(*part(0, block), *part(1, block))
    truth = steps.truth(q, [1], [2 * block], table, caches)
    yield Check(f"{steps.spec}: merge_states", steps.error(out, truth), 2 * steps.limit)


def decode(steps: Steps, longest: int, lengths_of: tuple[list[int], ...]) -> Iterator[Check]:
    """Check append and run: at once, on a stream of torch's, and captured once for all steps."""
    attn, count = steps.attn, len(lengths_of[0])
    blocks = -(-longest // steps.spec.block_size)
    caches = steps.fill([longest] * count, blocks)
    k_cache, v_cache, table = caches
    q, out = steps.rows(count, attn.num_qo_heads), steps.rows(count, attn.num_qo_heads)
    k, v = steps.rows(count, NUM_KV_HEADS), steps.rows(count, NUM_KV_HEADS)
    starts = torch.arange(count + 1)
    plan = attn.plan(starts, lengths_of[0], table, max_seq_len=longest)

    def step() -> None:
        attn.append_kv(k, v, k_cache, v_cache, plan.slot_mapping)
        attn.run(plan, q, k_cache, v_cache, out=out)

    def check(what: str, lengths: list[int]) -> Check:
        truth = steps.truth(q, [1] * count, lengths, table, (k_cache, v_cache))
        return Check(f"{steps.spec}: {what}", steps.error(out, truth), steps.limit)

    step()  # loads the kernels, which a capture must not
    yield check("decode", lengths_of[0])
    with another_stream(attn.device):
        out.zero_()
        step()
    yield check("decode on another stream", lengths_of[0])
    replay = capture(step, attn.device)
    for lengths in lengths_of:
        plan = attn.plan(starts, lengths, table, into=plan)
        for each in (q, k, v):
            each.copy_(steps.rows(*each.shape[:2]))
        out.fill_(torch.nan)
        replay()
        yield check(f"decode replayed from one graph, lengths {lengths}", lengths)


@contextmanager
def another_stream(device: torch.device) -> Iterator[None]:
    """Make another stream torch's current one; what follows the block waits for it."""
    if device.type == "cpu":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def capture(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return what does a step again as it was launched now."""
    if device.type == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> None:
    """Check every size of the bundle, or the smallest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="one size, short: for a sanitizer")
    given = parser.parse_args()
    if given.device != "cpu":
        torch.cuda.set_device(given.device)  # streams and graphs are those of the current one
    os.environ[BUNDLE_VARIABLE] = given.bundle  # merge_states takes no bundle
    found = {replace(spec, kernel="decode") for spec in specs_in(given.bundle, given.device)}
    specs = sorted(found, key=lambda spec: (spec.head_dim, spec.group_size, spec.block_size))
    checks: list[Check] = []
    for spec in specs[:1] if given.small else specs:
        steps = Steps(spec, given.bundle, given.device)
        lengths = (SMALL_LONGEST, SMALL_STEPS) if given.small else (LONGEST, STEPS)
        checks += [*prefill(steps), *copies_and_merge(steps), *decode(steps, *lengths)]
    failed = [each for each in checks if not each.passed]
    print(json.dumps({"failed": len(failed), "checks": list(map(asdict, checks))}, indent=1))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
