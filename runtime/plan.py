"""``Plan``: one step's work list as tensors, made once and shared by all layers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tvmpaged.planning.indices import IntArray, LongArray
from tvmpaged.planning.items import NO_MERGES, Shape, balance, make_items
from tvmpaged.planning.step import Step
from tvmpaged.runtime.kernel_set import Kernel
from tvmpaged.runtime.place import Place
from tvmpaged.runtime.plan_memory import Array, Buffers, Frame, lay_out

#: Kernels of one step by the sequences they take.
PHASES = ("decode", "prefill")


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
        A copy of `slot_mapping` for the kernel; on a GPU itself, for to compare two would wait.
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
    calls : list
        (phase, block_table, work_items, work_offsets, partial_out, partial_lse) of each of `work`,
        as its kernel takes them fastest.
    merge : tuple or None
        (partial_out, partial_lse, merge_items), the same for the merge.
    lse_argument
        And `lse`.
    buffers : Buffers
        The memory behind all of these but `slot_mapping`.
    """

    signature: tuple[Any, ...]
    slot_mapping: torch.Tensor
    num_tokens: int
    max_block_id: int
    max_slot: int
    slots: torch.Tensor
    slot_version: int
    block_table: torch.Tensor
    work: dict[str, tuple[torch.Tensor, torch.Tensor]]
    merge_items: torch.Tensor | None
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    lse: torch.Tensor
    calls: list[tuple[Any, ...]] = field(repr=False, compare=False)
    merge: tuple[Any, ...] | None = field(repr=False, compare=False)
    lse_argument: Any = field(repr=False, compare=False)
    buffers: Buffers = field(repr=False, compare=False)

    @property
    def is_current(self) -> bool:
        """False once a later plan has taken this one's memory over (``into=``)."""
        return self.buffers.owner() is self


def make_plan(
    step: Step,
    kernels: dict[str, Kernel],
    *,
    signature: tuple[Any, ...],
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_v: int,
    causal: bool,
    num_workers: dict[str, int],
    block_size: int,
    place: Place,
    max_seq_len: int | None = None,
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
    num_workers : dict
        Phase -> workers to balance over; they leave no trace in the bits.
    block_size : int
        Tokens per block.
    place : Place
        Where the plan's tensors lie.
    max_seq_len : int, optional
        The longest sequence of the plans made `into` this one; see `Frame`.
    into : Plan, optional
        A plan whose memory is reused; it is not current any more then.
    spare : Buffers, optional
        Memory that belongs to no plan, reused if the step fits.

    Raises
    ------
    ValueError
        When that memory is too small; `into` stays as it was.
    """
    frame = into.buffers.frame if into is not None else None
    if frame is not None:
        frame.check(step)
    most = max_seq_len if frame is None else frame.max_seq_len

    def cut(of: Step) -> _Cut:
        heads = num_kv_heads, num_qo_heads // num_kv_heads
        return _cut(of, kernels, *heads, causal=causal, max_seq_len=most or 0)

    found = cut(step)
    if max_seq_len is not None:
        longest = cut(replace(step, seq_lens=np.full_like(step.seq_lens, max_seq_len)))
        table = (len(step.seq_lens), -(-max_seq_len // block_size))
        frame = Frame(max_seq_len, step.q_lens, {"block_table": table, **longest.shapes})
        frame.check(step)
    arrays: dict[str, Array] = {"slots": step.slot_mapping, "block_table": step.block_table}
    for phase, items in found.items.items():
        arrays[f"{phase}_items"] = items
        arrays[f"{phase}_offsets"] = balance(items, num_workers[phase]).offsets
    if len(found.merges):
        arrays["merges"] = found.merges
    rows = max(1, found.num_partials if frame is None else frame.shapes["partials"][0])
    scratch = {
        "partial_out": (rows, num_qo_heads, head_dim_v),
        "partial_lse": (rows, num_qo_heads),
        "lse": (step.num_tokens, num_qo_heads),
    }
    with torch.inference_mode(False):  # whose tensors do not count the writes to them
        buffers = lay_out(arrays, scratch, place, frame, into, spare)
        tensors = buffers.tensors
        slots = tensors["slots"]
        slot_mapping = slots if place.is_gpu else torch.from_numpy(step.slot_mapping)
    given = buffers.arguments
    table, partials = given["block_table"], (given["partial_out"], given["partial_lse"])
    plan = Plan(
        signature=signature,
        slot_mapping=slot_mapping,
        num_tokens=step.num_tokens,
        max_block_id=step.max_block_id,
        max_slot=step.max_slot,
        slots=slots,
        slot_version=slot_mapping._version,
        block_table=tensors["block_table"],
        work={
            phase: (tensors[f"{phase}_items"], tensors[f"{phase}_offsets"]) for phase in found.items
        },
        merge_items=tensors.get("merges"),
        partial_out=tensors["partial_out"],
        partial_lse=tensors["partial_lse"],
        lse=tensors["lse"],
        calls=[
            (phase, table, given[f"{phase}_items"], given[f"{phase}_offsets"], *partials)
            for phase in found.items
        ],
        merge=(*partials, given["merges"]) if "merges" in given else None,
        lse_argument=given["lse"],
        buffers=buffers,
    )
    buffers.owner = weakref.ref(plan)
    return plan


@dataclass(frozen=True)
class _Cut:
    """A step's items by phase, the merges of both, and how many partial rows they have."""

    items: dict[str, IntArray]
    merges: IntArray
    num_partials: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what grows with the sequences."""
        items = {f"{phase}_items": each.shape for phase, each in self.items.items()}
        return {**items, "partials": (self.num_partials,)}


def _cut(
    step: Step,
    kernels: dict[str, Kernel],
    num_kv_heads: int,
    group_size: int,
    *,
    causal: bool,
    max_seq_len: int,
) -> _Cut:
    """Cut a step into the items of each kernel that has some."""
    found, merges, partials = {}, [], 0
    for phase, mine in _by_phase(step.q_lens).items():
        choices = kernels[phase].choices
        # A decode item holds its whole group, whatever the row tile that walks it.
        row_tile = group_size if phase == "decode" else int(choices["row_tile"])
        shape = Shape(row_tile, int(choices["split_length"]), max_seq_len)
        found[phase], merge, partials = make_items(
            step, mine, shape, num_kv_heads, group_size, causal, partials
        )
        merges.append(merge)
    # Most steps have one kind of sequences only.
    merged = merges[0] if len(merges) == 1 else np.concatenate([NO_MERGES, *merges])
    return _Cut(found, merged, partials)


def _by_phase(q_lens: LongArray) -> dict[str, LongArray]:
    """Return the sequences of each kernel that has some; most steps have one kind only."""
    (decode,) = (q_lens == 1).nonzero()
    if len(decode) == len(q_lens):
        return {"decode": decode} if len(decode) else {}
    (prefill,) = (q_lens > 1).nonzero()
    found = zip(PHASES, (decode, prefill), strict=True)
    return {phase: sequences for phase, sequences in found if len(sequences)}
