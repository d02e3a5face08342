"""``Plan``: one step's work list as tensors, made once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tvmpaged.planning.items import Shape, WorkList, balance, make_items
from tvmpaged.planning.step import Step
from tvmpaged.runtime.kernel_set import Kernel
from tvmpaged.worklist import ITEM_FIELDS, MERGE_FIELDS

#: Kernels of one step by the sequences they take.
PHASES = ("decode", "prefill")


@dataclass
class Plan:
    """What one step does; from `PagedAttention.plan`, for its `run` and `append_kv`.

    Holds copies of its inputs and its own scratch. Valid for the `PagedAttention` that made it
    until a block table of its sequences changes, with any layer's cache.

    Parameters
    ----------
    signature : tuple
        Which artifacts and head counts it was made for.
    slot_mapping : torch.Tensor
        ``[num_tokens]`` int64, where each new token's K and V go; -1 skips.
    num_tokens : int
        New tokens of the step.
    max_block_id, max_slot : int
        The largest used; compared with a cache's shape.
    slot_version : int
        torch's version of `slot_mapping` when it was checked; a later one was written to.
    block_table : torch.Tensor
        ``[num_seqs, max_blocks_per_seq]`` int32.
    work : dict
        Phase -> (work_items, work_offsets); phases without work are missing.
    merge_items : torch.Tensor or None
        Rows that several kv ranges make.
    partial_out, partial_lse, lse : torch.Tensor
        Scratch.
    """

    signature: tuple[Any, ...]
    slot_mapping: torch.Tensor
    num_tokens: int
    max_block_id: int
    max_slot: int
    slot_version: int
    block_table: torch.Tensor
    work: dict[str, tuple[torch.Tensor, torch.Tensor]]
    merge_items: torch.Tensor | None
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    lse: torch.Tensor
    buffers: Buffers = field(repr=False, compare=False, default=None)  # type: ignore[assignment]


class Buffers:
    """Memory of a plan by name. With a parent, its memory is reused and its capacity is fixed."""

    def __init__(self, parent: Buffers | None = None) -> None:
        self.parent = parent
        self.flat: dict[str, torch.Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor.

        Raises
        ------
        ValueError
            When the parent's memory is too small.
        """
        elements = int(np.prod(shape, dtype=np.int64))
        if self.parent is None:
            # One element at least: an empty tensor has no address to align.
            flat = torch.empty(max(1, elements), dtype=dtype)
        else:
            found = self.parent.flat.get(name)
            if found is None or len(found) < elements:
                capacity = 0 if found is None else len(found)
                raise ValueError(
                    f"into: its buffer {name!r} holds {capacity} elements, this step needs "
                    f"{elements}; make the plan that is reused from the largest step"
                )
            flat = found
        self.flat[name] = flat
        return flat[:elements].view(shape)

    def copy(self, name: str, array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
        """Return an aligned copy of an array."""
        return self.empty(name, array.shape, dtype).copy_(torch.from_numpy(array))


def make_plan(
    step: Step,
    kernels: dict[str, Kernel],
    *,
    signature: tuple[Any, ...],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_v: int,
    causal: bool,
    num_workers: int,
    into: Plan | None = None,
) -> Plan:
    """Cut a step into work for its kernels.

    Parameters
    ----------
    step : Step
        Checked lengths and block ids.
    kernels : dict
        Phase -> kernel.
    signature : tuple
        Kept in the plan.
    num_qo_heads, num_kv_heads, head_dim_v : int
        Sizes.
    causal : bool
        Whether a row sees only what came before.
    num_workers : int
        Threads to balance over; leaves no trace in the bits.
    into : Plan, optional
        A plan whose memory is reused.
    """
    group_size = num_qo_heads // num_kv_heads
    q_lens = step.q_lens
    sequences = {"decode": np.flatnonzero(q_lens == 1), "prefill": np.flatnonzero(q_lens > 1)}
    work: dict[str, WorkList] = {}
    merges, partials = [], 0
    for phase in PHASES:
        choices = kernels[phase].choices
        # A decode item holds its whole group, whatever the row tile that walks it.
        row_tile = group_size if phase == "decode" else int(choices["row_tile"])
        shape = Shape(row_tile, int(choices["split_length"]))
        items, merge, partials = make_items(
            step, sequences[phase], shape, num_kv_heads, group_size, causal, partials
        )
        work[phase] = balance(items, num_workers)
        merges.append(merge)
    merge_items = np.concatenate(merges)

    buffers = Buffers(None if into is None else into.buffers)
    rows = max(1, partials)
    tensors = {
        phase: (
            buffers.copy(f"{phase}_items", each.items.reshape(-1, ITEM_FIELDS), torch.int32),
            buffers.copy(f"{phase}_offsets", each.offsets, torch.int32),
        )
        for phase, each in work.items()
    }
    slot_mapping = buffers.copy("slot_mapping", step.slot_mapping, torch.int64)
    merge_tensor = buffers.copy("merges", merge_items.reshape(-1, MERGE_FIELDS), torch.int32)
    return Plan(
        signature=signature,
        slot_mapping=slot_mapping,
        num_tokens=step.num_tokens,
        max_block_id=step.max_block_id,
        max_slot=step.max_slot,
        slot_version=slot_mapping._version,
        block_table=buffers.copy("block_table", step.block_table, torch.int32),
        work={phase: tensors[phase] for phase in PHASES if not work[phase].is_empty},
        merge_items=merge_tensor if len(merge_items) else None,
        partial_out=buffers.empty("partial_out", (rows, num_qo_heads, head_dim_v), torch.float32),
        partial_lse=buffers.empty("partial_lse", (rows, num_qo_heads), torch.float32),
        lse=buffers.empty("lse", (step.num_tokens, num_qo_heads), torch.float32),
        buffers=buffers,
    )
