"""A workload as tensors, and a candidate bound to them: what the measuring process calls.

Never random numbers in index arrays: block tables are a permutation of the pool's blocks, lengths
are those of the workload. Everything is 64-byte aligned, as the kernels take on trust.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tvmpaged.host_memory import zero_pages
from tvmpaged.layout import from_hnd, inner_shape, layout_of
from tvmpaged.planning.indices import IntArray
from tvmpaged.planning.items import Shape, balance, make_items, workers_on
from tvmpaged.planning.step import Step, check_step
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.workload import Workload

Call = Callable[..., Any]
#: Random elements made for a cache; a larger one repeats them.
_FRESH_ELEMENTS = 1 << 22


@dataclass
class Case:
    """Tensors of one workload.

    Parameters
    ----------
    spec, workload
        What they are for.
    q, k_cache, v_cache, out, lse : torch.Tensor
        As the kernels take them; caches of a native spec as HND.
    steps : list of Step
        The same lengths over different blocks of the pool, one after the other: K and V that were
        just read are not read again until all others were.
    poison : bool
        Whether unused slots hold NaN.
    turn : int
        Calls so far, of all that are bound to it: which step is next.
    """

    spec: AttentionSpec
    workload: Workload
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    steps: list[Step]
    poison: bool
    turn: int = 0

    @classmethod
    def make(
        cls,
        spec: AttentionSpec,
        workload: Workload,
        *,
        num_steps: int = 1,
        seed: int = 0,
        poison: bool = False,
        device: str | torch.device = "cpu",
    ) -> Case:
        """Allocate and fill.

        Parameters
        ----------
        spec, workload
            Sizes.
        num_steps : int
            Disjoint sets of blocks.
        seed : int
            Of the values and of the blocks' order.
        poison : bool
            Whether unused slots, unowned blocks, out and lse hold NaN.
        device : str or torch.device
            Where all tensors lie; their values are the same everywhere.
        """
        generator = torch.Generator().manual_seed(seed)
        heads = workload.num_kv_heads * spec.group_size
        num_tokens = sum(workload.q_lens)
        blocks = [-(-length // spec.block_size) for length in workload.seq_lens]
        num_blocks = sum(blocks) * num_steps + (1 if poison else 0)  # one that nobody owns
        order = np.random.default_rng(seed).permutation(num_blocks)
        steps = []
        for index in range(num_steps):
            table = np.full((len(blocks), max(1, *blocks)), -1, np.int32)
            owned = iter(order[index * sum(blocks) :])
            for row, count in zip(table, blocks, strict=True):
                row[:count] = [next(owned) for _ in range(count)]
            steps.append(_step(workload, table, spec.block_size))
        out_shape = (num_tokens, heads, spec.head_dim_v)
        k_shape, v_shape = (_cache_shape(spec, workload, num_blocks, which) for which in (0, 1))

        def random(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
            return _random(shape, dtype, generator, device)

        case = cls(
            spec=spec,
            workload=workload,
            q=random((num_tokens, heads, spec.head_dim), spec.q_dtype),
            k_cache=random(k_shape, spec.kv_dtype),
            v_cache=random(v_shape, spec.kv_dtype),
            out=torch.zeros(out_shape, dtype=_dtype(spec.out_dtype), device=device),
            lse=torch.zeros(num_tokens, heads, device=device),
            steps=steps,
            poison=poison,
        )
        if poison:
            case._poison_unused()
        return case

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.q.device

    def _poison_unused(self) -> None:
        used = torch.zeros(self.k_cache.shape[0], self.spec.block_size, dtype=torch.bool)
        for step in self.steps:
            for table, length in zip(step.block_table, step.seq_lens, strict=True):
                position = torch.arange(int(length))
                blocks = torch.from_numpy(table)[position // self.spec.block_size].long()
                used[blocks, position % self.spec.block_size] = True
        used = used.to(self.device)
        for cache in (self.k_cache, self.v_cache):
            by_slot = cache if self.spec.layout == "NHD" else cache.transpose(1, 2)
            by_slot[~used] = torch.nan

    def _caches(self, choices: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the caches in the layout that a candidate reads."""
        layout = layout_of(self.spec, choices)
        caches = {"k": self.k_cache, "v": self.v_cache}
        if layout == _stored(self.spec):
            k_cache, v_cache = caches.values()
        elif self.poison:
            k_cache, v_cache = (from_hnd(each, which, layout) for which, each in caches.items())
        else:  # random values are as good in any order, and a large pool is not copied
            k_cache, v_cache = (
                each.view(len(each), *inner_shape(layout, each.shape[1], *each.shape[2:]))
                for each in caches.values()
            )
        return k_cache, v_cache

    def bind(
        self, attention: Call, merge: Call, choices: dict[str, Any], num_workers: int
    ) -> Callable[[], None]:
        """Return a call that does all steps as serving would, each time over the next blocks.

        Contenders share the turns: what one has just read would be in the caches of the next.

        Parameters
        ----------
        attention, merge : callable
            Loaded functions.
        choices : dict
            The candidate's; they shape its work lists.
        num_workers : int
            Threads; of a GPU its multiprocessors.
        """
        cuts = [self._cut(sequences, choices) for sequences in self.workload.batches]
        rows = max(1, *(partials for _, _, partials in cuts))
        heads = self.q.shape[1]
        partial_out = torch.empty(rows, heads, self.spec.head_dim_v, device=self.device)
        partial_lse = torch.empty(rows, heads, device=self.device)
        works = []
        for items, merges, _ in cuts:
            work = balance(items, workers_on(num_workers, choices))
            merge_items = self._aligned(merges) if len(merges) else None
            works.append((self._aligned(work.items), self._aligned(work.offsets), merge_items))
        tables = [self._aligned(step.block_table) for step in self.steps]
        k_cache, v_cache = self._caches(choices)
        scale = float(self.spec.head_dim**-0.5)

        def call() -> None:
            table = tables[self.turn % len(tables)]
            self.turn += 1
            for work_items, work_offsets, merge_items in works:
                attention(
                    self.q,
                    k_cache,
                    v_cache,
                    table,
                    work_items,
                    work_offsets,
                    self.out,
                    self.lse,
                    partial_out,
                    partial_lse,
                    scale,
                )
                if merge_items is not None:
                    merge(partial_out, partial_lse, merge_items, self.out, self.lse)

        return call

    def _cut(self, sequences: list[int], choices: dict[str, Any]) -> tuple[IntArray, IntArray, int]:
        """Return the items, merges and partial rows of one step of some sequences."""
        split = Shape(_row_tile(self.spec, choices), int(choices["split_length"]))
        heads = self.workload.num_kv_heads, self.spec.group_size
        return make_items(self.steps[0], np.array(sequences), split, *heads, True, 0)

    def _aligned(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        copy = torch.empty(array.shape, dtype=torch.int32, device=self.device)
        return copy.copy_(torch.from_numpy(array.astype("int32")))


def _row_tile(spec: AttentionSpec, choices: dict[str, Any]) -> int:
    # A decode item holds its whole group, whatever the row tile that walks it.
    return spec.group_size if spec.kernel == "decode" else int(choices["row_tile"])


def _step(workload: Workload, table: np.ndarray[Any, Any], block_size: int) -> Step:
    starts = np.concatenate([[0], np.cumsum(workload.q_lens)])
    return check_step(starts, np.array(workload.seq_lens), table, block_size)


def _cache_shape(
    spec: AttentionSpec, workload: Workload, num_blocks: int, which: int
) -> tuple[int, ...]:
    dim = (spec.head_dim, spec.head_dim_v)[which]
    inner = inner_shape(_stored(spec), workload.num_kv_heads, spec.block_size, dim)
    return (num_blocks, *inner)


def _stored(spec: AttentionSpec) -> str:
    """Return the layout in which a case keeps its caches."""
    return "HND" if spec.layout == "native" else spec.layout


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _random(
    shape: tuple[int, ...], dtype: str, generator: torch.Generator, device: str | torch.device
) -> torch.Tensor:
    if torch.device(device).type == "cpu":
        result = zero_pages(shape, _dtype(dtype))  # as a cache that serves
    else:
        result = torch.empty(shape, dtype=_dtype(dtype), device=device)
    flat = result.view(-1)
    fresh = torch.randn(min(len(flat), _FRESH_ELEMENTS), generator=generator).to(result)
    for begin in range(0, len(flat), len(fresh)):
        part = flat[begin : begin + len(fresh)]
        part.copy_(fresh[: len(part)])
    return result
