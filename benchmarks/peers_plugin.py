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
    layout = "HND"

    def prepare(self, c: Any, d: Any) -> None:
        """Make the instance, copy the pages, and plan the step."""
        self.attention = PagedAttention(
            c.heads, c.kv_heads, c.dim, c.block, dtype=c.dtype, kv_layout=self.layout
        )
        self.caches = self.attention.new_cache(d.pages.shape[0])
        for cache in self.caches:
            cache.fill_(torch.nan)
        positions = torch.arange(c.ctx)
        for blocks in d.block_table.long():
            block, offset = blocks[positions // c.block], positions % c.block
            k, v = (d.pages[block, index, :, offset] for index in range(2))
            self.attention.write_kv(k, v, *self.caches, block * c.block + offset)
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
        kinds = "/".join(kernels[name]["kind"] for name in self.plan.work)
        return f"{kinds} {self.attention.kv_layout}"


class TvmPagedNative(TvmPaged):
    """The same on a cache in the bundle's own layout, as the engine holds it."""

    name = "tvmpaged-native"
    layout = "native"

    def supports(self, c: Any) -> str | None:
        """Only bfloat16 has a layout of its own."""
        return None if c.dtype == "bfloat16" else "the native layout is HND here"


PEERS = [TvmPaged, TvmPagedNative]
