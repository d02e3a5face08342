"""This project as a contestant of a harness that times paged attention side by side.

The harness gives a class `Peer` with ``supports``, ``prepare``, ``run`` and ``output``, pages
``[num_blocks, 2, num_kv_heads, block_size, head_dim]`` and a block table, and checks each output
against float64. What is timed is the whole of `PagedAttention.run`, under the plan of the step, as
one layer of a model pays for it. ``TVMPAGED_BUNDLE`` names the bundle; unused slots hold NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from bench_peers import Peer

from tvmpaged import PagedAttention


class TvmPaged(Peer):  # type: ignore[misc]
    """`PagedAttention` with what the bundle in the environment has."""

    name = "tvmpaged"

    def prepare(self, c: Any, d: Any) -> None:
        """Make the instance, copy the pages, and plan the step."""
        self.attention = PagedAttention(c.heads, c.kv_heads, c.dim, c.block, dtype=c.dtype)
        num_blocks = d.pages.shape[0]
        self.caches = self.attention.new_cache(num_blocks)
        last = d.block_table[:, (c.ctx - 1) // c.block].long()
        for index, cache in enumerate(self.caches):
            cache.copy_(d.pages[:, index])
            cache[last, :, (c.ctx - 1) % c.block + 1 :] = torch.nan
        query_start_loc = torch.arange(0, c.batch * c.q_len + 1, c.q_len, dtype=torch.int32)
        seq_lens = torch.full((c.batch,), c.ctx, dtype=torch.int32)
        self.plan = self.attention.plan(query_start_loc, seq_lens, d.block_table)
        self.q, self.out, self.scale = d.q, torch.full_like(d.q, torch.nan), d.scale

    def run(self) -> None:
        """One layer's attention."""
        self.attention.run(self.plan, self.q, *self.caches, sm_scale=self.scale, out=self.out)

    def output(self) -> torch.Tensor:
        """``[batch * q_len, heads, dim]``."""
        return self.out

    def note(self) -> str:
        """Say which kernels ran."""
        kernels = self.attention.describe()["kernels"]
        return "/".join(kernels[name]["kind"] for name in self.plan.work)


PEERS = [TvmPaged]
