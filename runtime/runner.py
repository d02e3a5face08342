"""Run one step's rows: one packed forward pass over all sequences, no padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tvmpaged.runtime.hf_attention import PagedStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvmpaged.runtime.attention import PagedAttention
    from tvmpaged.runtime.block_manager import BlockManager
    from tvmpaged.runtime.model import CausalModel
    from tvmpaged.runtime.scheduler import Row


@dataclass
class Runner:
    """The model, the kernels and the cache they share.

    Parameters
    ----------
    model : CausalModel
        What computes.
    attention : PagedAttention
        Its attention.
    block_manager : BlockManager
        Which blocks hold which tokens.
    """

    model: CausalModel
    attention: PagedAttention
    block_manager: BlockManager

    def __post_init__(self) -> None:
        self.k_caches, self.v_caches = self.attention.new_cache(
            self.block_manager.num_blocks, num_layers=self.model.num_layers
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the whole cache."""
        return sum(
            cache.numel() * cache.element_size() for cache in (*self.k_caches, *self.v_caches)
        )

    def run(self, rows: Sequence[Row]) -> torch.Tensor:
        """Copy what is shared and written, then compute the rows' K/V and logits.

        Parameters
        ----------
        rows : sequence of Row
            Not empty; their blocks are allocated.

        Returns
        -------
        torch.Tensor
            ``[num_ends, vocab_size]`` float32: one row for each row that reaches its end, in order.
        """
        copies = self.block_manager.pending_copies()
        if copies:
            pairs = np.asarray(copies, dtype=np.int32)
            self.attention.copy_blocks(self.k_caches, self.v_caches, pairs)
            self.block_manager.take_copies()  # only now: an interrupt before loses none
        starts = np.array([row.seq.num_computed for row in rows])
        counts = np.array([row.num_new for row in rows])
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        seq_lens = (starts + counts).astype(np.int32)
        plan = self.attention.plan(query_start_loc, seq_lens, self._block_table(rows), causal=True)
        step = PagedStep(
            attention=self.attention,
            plan=plan,
            k_caches=self.k_caches,
            v_caches=self.v_caches,
            max_seq_len=int(seq_lens.max()),
        )
        token_ids = [
            token
            for row, end in zip(rows, seq_lens, strict=True)
            for token in row.seq.token_ids[row.seq.num_computed : end]
        ]
        positions = np.arange(len(token_ids)) - np.repeat(query_start_loc[:-1] - starts, counts)
        ends = [
            int(end) - 1
            for row, end in zip(rows, query_start_loc[1:], strict=True)
            if row.reaches_end
        ]
        return self.model.forward(
            self._tensor(token_ids), self._tensor(positions), self._tensor(ends), step
        )

    def _block_table(self, rows: Sequence[Row]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        tables = [self.block_manager.block_table(row.seq.seq_id) for row in rows]
        padded = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
        for line, table in zip(padded, tables, strict=True):
            line[: len(table)] = table
        return padded

    def _tensor(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.model.device)
