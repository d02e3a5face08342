"""``Plan``: one step's work list as tensors, made once and shared by all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tvmpaged.planning.items import Shape, WorkList, balance, make_items
from tvmpaged.planning.step import Step
from tvmpaged.runtime.kernel_set import Kernel

#: Kernels of one step by the sequences they take.
PHASES = ("decode", "prefill")


@dataclass
class Plan:
    """What one step does; from `PagedAttention.plan`, for its `run` and `append_kv`.

    Holds copies of its inputs and its own scratch. Valid for the `PagedAttention` that made it
    until a block table of its sequences changes or its memory is given to another plan, with any
    layer's cache.

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
    buffers : Buffers
        The memory behind all of these.
    generation : int
        Which of the plans made in that memory this is.
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
    buffers: Buffers = field(repr=False, compare=False)
    generation: int

    @property
    def is_current(self) -> bool:
        """False once a later plan has taken this one's memory over (``into=``)."""
        return self.generation == self.buffers.generation


class Buffers:
    """Memory of a plan, and of those made ``into`` it: flat tensors by name, of fixed capacity.

    Parameters
    ----------
    elements : dict
        Name -> number of elements and their dtype.
    """

    def __init__(self, elements: dict[str, tuple[int, torch.dtype]]) -> None:
        self.generation = 0
        # One element at least: an empty tensor has no address to align.
        self.flat = {
            name: torch.empty(max(1, count), dtype=dtype)
            for name, (count, dtype) in elements.items()
        }

    def take_over(self, elements: dict[str, tuple[int, torch.dtype]]) -> None:
        """Hand the memory to a new plan; the one before is no longer current.

        Raises
        ------
        ValueError
            When it is too small. Nothing has been written then.
        """
        for name, (count, _) in elements.items():
            capacity = len(self.flat[name])
            if capacity < count:
                raise ValueError(
                    f"into: its buffer {name!r} holds {capacity} elements, this step needs "
                    f"{count}; make the plan that is reused from the largest step"
                )
        self.generation += 1


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
        A plan whose memory is reused; it is not current any more then.

    Raises
    ------
    ValueError
        When that memory is too small; `into` stays as it was.
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
    rows = max(1, partials)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        **{f"{phase}_items": each.items for phase, each in work.items()},
        **{f"{phase}_offsets": each.offsets for phase, each in work.items()},
        "slot_mapping": step.slot_mapping,
        "merges": np.concatenate(merges),
        "block_table": step.block_table,
    }
    scratch = {
        "partial_out": (rows, num_qo_heads, head_dim_v),
        "partial_lse": (rows, num_qo_heads),
        "lse": (step.num_tokens, num_qo_heads),
    }
    buffers, views = _lay_out(arrays, scratch, None if into is None else into.buffers)
    return Plan(
        signature=signature,
        slot_mapping=views["slot_mapping"],
        num_tokens=step.num_tokens,
        max_block_id=step.max_block_id,
        max_slot=step.max_slot,
        slot_version=views["slot_mapping"]._version,
        block_table=views["block_table"],
        work={
            phase: (views[f"{phase}_items"], views[f"{phase}_offsets"])
            for phase in PHASES
            if not work[phase].is_empty
        },
        merge_items=views["merges"] if len(views["merges"]) else None,
        partial_out=views["partial_out"],
        partial_lse=views["partial_lse"],
        lse=views["lse"],
        buffers=buffers,
        generation=buffers.generation,
    )


def _lay_out(
    arrays: dict[str, np.ndarray[Any, Any]],
    scratch: dict[str, tuple[int, ...]],
    reused: Buffers | None,
) -> tuple[Buffers, dict[str, torch.Tensor]]:
    """Copy arrays into new or reused memory, beside float32 scratch; return both by name."""
    contents = {name: torch.from_numpy(array) for name, array in arrays.items()}
    shapes = {name: tuple(each.shape) for name, each in contents.items()} | scratch
    elements = {name: (each.numel(), each.dtype) for name, each in contents.items()}
    elements |= {name: (math.prod(shape), torch.float32) for name, shape in scratch.items()}
    if reused is None:
        buffers = Buffers(elements)
    else:
        buffers = reused
        buffers.take_over(elements)
    views = {
        name: buffers.flat[name][:count].view(shapes[name]) for name, (count, _) in elements.items()
    }
    for name, content in contents.items():
        views[name].copy_(content)
    return buffers, views
