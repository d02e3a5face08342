"""``Plan``: one step's work list as tensors, made once and shared by all layers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tvmpaged.planning.indices import LongArray
from tvmpaged.planning.items import Shape, balance, make_items
from tvmpaged.planning.step import Step
from tvmpaged.runtime.kernel_set import Kernel
from tvmpaged.runtime.tensors import ALIGNMENT_BYTES

#: Kernels of one step by the sequences they take.
PHASES = ("decode", "prefill")

Array = np.ndarray[Any, np.dtype[Any]]

#: What a plan's memory is counted in.
_WORD_BYTES = 4
_FLOAT32 = np.dtype(np.float32)


@dataclass
class Plan:
    """What one step does; from `PagedAttention.plan`, for its `run` and `append_kv`.

    Holds copies of its inputs and its own scratch. Valid for the `PagedAttention` that made it
    until a block table of its sequences changes or its memory is given to another plan, with any
    layer's cache.

    `slot_mapping` is yours: `append_kv` sees whatever is written to it, and checks it again then.
    The other tensors are what kernels read on trust; never write to them.

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
    slots : torch.Tensor
        A copy of `slot_mapping` for the kernel.
    block_table : torch.Tensor
        ``[num_seqs, max_blocks_per_seq]`` int32.
    work : dict
        Phase -> (work_items, work_offsets); phases without work are missing.
    merge_items : torch.Tensor or None
        Rows that several kv ranges make.
    partial_out, partial_lse, lse : torch.Tensor
        Scratch.
    buffers : Buffers
        The memory behind all of these but `slot_mapping`.
    """

    signature: tuple[Any, ...]
    slot_mapping: torch.Tensor
    num_tokens: int
    max_block_id: int
    max_slot: int
    slots: torch.Tensor
    block_table: torch.Tensor
    work: dict[str, tuple[torch.Tensor, torch.Tensor]]
    merge_items: torch.Tensor | None
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    lse: torch.Tensor
    buffers: Buffers = field(repr=False, compare=False)

    @property
    def is_current(self) -> bool:
        """False once a later plan has taken this one's memory over (``into=``)."""
        return self.buffers.owner() is self


#: Name -> shape and dtype.
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


def _nobody() -> None:
    """Own nothing."""


class Buffers:
    """Memory of a plan, and of those made in it later: one stretch, cut into buffers by name.

    Where a buffer starts, and what it can hold, stays as the first plan needed it.

    Parameters
    ----------
    shapes : mapping
        What the first plan keeps.

    Attributes
    ----------
    owner : callable
        Returns the plan that this memory belongs to; None when that is gone.
    arrays, tensors : dict
        Name -> the buffer in the shape that the owner needs.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.owner: Callable[[], Plan | None] = _nobody
        self._buffers: dict[str, tuple[int, int]] = {}  # name -> start in words, elements
        words = 0
        for name, (shape, dtype) in shapes.items():
            # One element at least: an empty tensor has no address to align.
            count = max(1, math.prod(shape))
            self._buffers[name] = words, count
            words += -(-count * dtype.itemsize // ALIGNMENT_BYTES) * (
                ALIGNMENT_BYTES // _WORD_BYTES
            )
        self._memory = torch.empty(words, dtype=torch.int32).numpy()
        self._shapes: Shapes = {}
        self.take_over(shapes)

    def missing(self, shapes: Shapes) -> str:
        """Return what these shapes need and the memory does not have; nothing when they fit."""
        for name, (shape, _) in shapes.items():
            _, capacity = self._buffers.get(name, (0, 0))
            if capacity < math.prod(shape):
                return (
                    f"its buffer {name!r} holds {capacity} elements, this step needs "
                    f"{math.prod(shape)}"
                )
        return ""

    def take_over(self, shapes: Shapes) -> None:
        """Shape the buffers for a new plan, where nothing is `missing`; the one before is over."""
        self.owner = _nobody
        if shapes == self._shapes:  # as from one step of a batch to the next
            return
        self._shapes = shapes
        self.arrays = {name: self._view(name, *each) for name, each in shapes.items()}
        self.tensors = {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    def _view(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        start, _ = self._buffers[name]
        end = start + math.prod(shape) * dtype.itemsize // _WORD_BYTES
        return self._memory[start:end].view(dtype).reshape(shape)


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
    spare: Buffers | None = None,
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
    spare : Buffers, optional
        Memory that belongs to no plan, reused if the step fits.

    Raises
    ------
    ValueError
        When that memory is too small; `into` stays as it was.
    """
    group_size = num_qo_heads // num_kv_heads
    sequences = _by_phase(step.q_lens)
    arrays: dict[str, Array] = {"slots": step.slot_mapping, "block_table": step.block_table}
    merges, partials = [], 0
    for phase, mine in sequences.items():
        choices = kernels[phase].choices
        # A decode item holds its whole group, whatever the row tile that walks it.
        row_tile = group_size if phase == "decode" else int(choices["row_tile"])
        shape = Shape(row_tile, int(choices["split_length"]))
        items, merge, partials = make_items(
            step, mine, shape, num_kv_heads, group_size, causal, partials
        )
        arrays[f"{phase}_items"] = items
        arrays[f"{phase}_offsets"] = balance(items, num_workers).offsets
        if len(merge):
            merges.append(merge)
    if merges:
        arrays["merges"] = merges[0] if len(merges) == 1 else np.concatenate(merges)
    rows = max(1, partials)
    scratch = {
        "partial_out": (rows, num_qo_heads, head_dim_v),
        "partial_lse": (rows, num_qo_heads),
        "lse": (step.num_tokens, num_qo_heads),
    }
    buffers = _lay_out(arrays, scratch, into, spare)
    tensors = buffers.tensors
    plan = Plan(
        signature=signature,
        slot_mapping=torch.from_numpy(step.slot_mapping),
        num_tokens=step.num_tokens,
        max_block_id=step.max_block_id,
        max_slot=step.max_slot,
        slots=tensors["slots"],
        block_table=tensors["block_table"],
        work={
            phase: (tensors[f"{phase}_items"], tensors[f"{phase}_offsets"]) for phase in sequences
        },
        merge_items=tensors.get("merges"),
        partial_out=tensors["partial_out"],
        partial_lse=tensors["partial_lse"],
        lse=tensors["lse"],
        buffers=buffers,
    )
    buffers.owner = weakref.ref(plan)
    return plan


def _by_phase(q_lens: LongArray) -> dict[str, LongArray]:
    """Return the sequences of each kernel that has some; most steps have one kind only."""
    (decode,) = (q_lens == 1).nonzero()
    if len(decode) == len(q_lens):
        return {"decode": decode} if len(decode) else {}
    (prefill,) = (q_lens > 1).nonzero()
    found = zip(PHASES, (decode, prefill), strict=True)
    return {phase: sequences for phase, sequences in found if len(sequences)}


def _lay_out(
    arrays: dict[str, Array],
    scratch: dict[str, tuple[int, ...]],
    into: Plan | None,
    spare: Buffers | None,
) -> Buffers:
    """Copy arrays into new or reused memory, beside float32 scratch."""
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    shapes.update((name, (shape, _FLOAT32)) for name, shape in scratch.items())
    if into is not None:
        buffers = into.buffers
        if missing := buffers.missing(shapes):
            raise ValueError(f"into: {missing}; make the plan that is reused from the largest step")
        buffers.take_over(shapes)
    elif spare is not None and not spare.missing(shapes):
        buffers = spare
        buffers.take_over(shapes)
    else:
        buffers = Buffers(shapes)
    for name, array in arrays.items():
        buffers.arrays[name][...] = array
    return buffers
