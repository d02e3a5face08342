"""``Launch``: a call's arguments, checked, and the kernels that run on them.

A compiled kernel checks the dtype, device, shape and strides of what it is given, but reads memory
on trust: that it is aligned and long enough, and that indices lie inside it. So most calls, whose
tensors are plain, need no more than a look at what is taken on trust. What that look or the kernel
refuses goes through the checks by name: they make copies where a copy helps, and say which argument
is wrong where none does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tvmpaged.runtime.cache_format import CacheFormat
from tvmpaged.runtime.indices import check_copies, check_slots
from tvmpaged.runtime.kernel_set import Kernel
from tvmpaged.runtime.plan import Plan
from tvmpaged.runtime.tensors import check_rows, is_plain


class Launch:
    """The kernels of one `PagedAttention` and what their arguments must be.

    Parameters
    ----------
    kernels : dict
        Name -> kernel.
    caches : CacheFormat
        What the caches look like.
    num_qo_heads : int
        Query heads.
    dtype : torch.dtype
        Of q, k, v and out.
    """

    def __init__(
        self,
        kernels: dict[str, Kernel],
        caches: CacheFormat,
        num_qo_heads: int,
        dtype: torch.dtype,
    ) -> None:
        self._calls = {name: kernel.call for name, kernel in kernels.items()}
        self._caches = caches
        self._place = caches.place
        self._row = (num_qo_heads, caches.head_dim)
        self._dtype = dtype
        self._row_bytes = math.prod(self._row) * dtype.itemsize
        self._cache_shape: Any = None
        self._num_blocks = self._cache_bytes = 0
        self._default_scale = float(caches.head_dim**-0.5)
        # The reference, which stands in where there are no artifacts, checks nothing.
        self._kernels_check = all(kernel.kind != "reference" for kernel in kernels.values())
        #: What a plan must have been made for.
        self.signature = (
            *(kernel.description["sha256"] for kernel in kernels.values()),
            *(num_qo_heads, caches.num_kv_heads, caches.head_dim, caches.block_size, caches.layout),
        )

    def attend(
        self, plan: Plan, q: Any, k_cache: Any, v_cache: Any, scale: Any, out: Any, with_lse: bool
    ) -> Any:
        """Run attention; see `PagedAttention.run`."""
        if (
            not isinstance(plan, Plan)
            or (plan.signature is not self.signature and plan.signature != self.signature)
            or plan.buffers.owner() is not plan
        ):
            self._refuse_plan(plan)
        scale = self._default_scale if scale is None else _checked_scale(scale)
        lse: Any = torch.empty_like(plan.lse) if with_lse else plan.lse_argument
        result: Any = self._attend_plain(plan, q, k_cache, v_cache, out, lse, scale)
        if result is None:
            result = self._attend_checked(plan, q, k_cache, v_cache, out, lse, scale)
            if isinstance(q, np.ndarray):
                result, lse = result.numpy(), lse.numpy() if with_lse else None
            if out is not None:
                result = out
        return (result, lse) if with_lse else result

    def _attend_plain(
        self, plan: Plan, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any, scale: float
    ) -> torch.Tensor | None:
        """Run on what the kernels can check; None, with nothing done, when it takes a closer look.

        The checks by name of all that may be passed take as long as a small kernel.
        """
        rows_bytes = plan.num_tokens * self._row_bytes
        try:
            # Kernels hold all shapes against the plan's and the caches' against each other; but any
            # number of blocks suits them, and the generic ones any block. That q's rows are the
            # plan's they see too, but a longer one is nothing wrong, and to be refused takes long.
            if k_cache.shape != self._cache_shape:
                self._note_shape(k_cache.shape)
            cache_bytes = self._cache_bytes
            if not (
                self._kernels_check
                and plan.calls
                and self._num_blocks > plan.max_block_id
                and is_plain(k_cache, cache_bytes)
                and is_plain(v_cache, cache_bytes)
                and is_plain(q, rows_bytes)
                and q.nbytes == rows_bytes
                and (out is None or is_plain(out, rows_bytes))
            ):
                return None
            result: torch.Tensor = torch.empty_like(q) if out is None else out
            self._start(plan, q, k_cache, v_cache, result, lse, scale)
        # RuntimeError is torch's, of dtypes and devices that it cannot pass on.
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return None
        return result

    def _note_shape(self, shape: Any) -> None:
        """Keep the last k_cache's shape: most calls have the same, and need no closer look.

        Raises
        ------
        ValueError
            When it is none of a cache.
        """
        num_blocks, *block = shape
        if tuple(block) != self._caches.inner:
            raise ValueError(f"k_cache has shape {shape}")
        self._cache_shape, self._num_blocks = shape, num_blocks
        self._cache_bytes = math.prod(shape) * self._caches.dtype.itemsize

    def _attend_checked(
        self, plan: Plan, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any, scale: float
    ) -> torch.Tensor:
        """Check every argument by name, make copies where they help, and run."""
        k_cache, v_cache = self._caches.check(k_cache, v_cache)
        if plan.max_block_id >= k_cache.shape[0]:
            raise ValueError(
                f"plan's block_table names block {plan.max_block_id}, but k_cache has "
                f"{k_cache.shape[0]} blocks"
            )
        num_tokens = plan.num_tokens
        rows = check_rows("q", q, *self._row, self._dtype, self._place.device, stage=True)
        if rows.shape[0] < num_tokens:
            raise ValueError(f"q has {rows.shape[0]} tokens, but the plan has {num_tokens}")
        result = self._out(out, rows, num_tokens)
        self._start(plan, rows[:num_tokens], k_cache, v_cache, result[:num_tokens], lse, scale)
        return result

    def _out(self, out: Any, q: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if out is None:
            result = torch.empty(q.shape, dtype=self._dtype, device=self._place.device)
            result[num_tokens:] = 0
            return result
        result = check_rows("out", out, *self._row, self._dtype, self._place.device, stage=False)
        if result.shape[0] < num_tokens:
            raise ValueError(f"out has {result.shape[0]} tokens, but the plan has {num_tokens}")
        return result

    def _start(
        self,
        plan: Plan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: Any,
        scale: float,
    ) -> None:
        calls = self._calls
        for phase, table, items, offsets, partial_out, partial_lse in plan.calls:
            calls[phase](
                q,
                k_cache,
                v_cache,
                table,
                items,
                offsets,
                out,
                lse,
                partial_out,
                partial_lse,
                scale,
            )
        if plan.merge is not None:
            calls["merge"](*plan.merge, out, lse)

    def _refuse_plan(self, plan: Any) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must come from plan(); got {type(plan).__name__}")
        if plan.signature != self.signature:
            raise ValueError("plan was made for other artifacts or head counts; plan the step anew")
        raise ValueError("plan's memory was given to a later one (into=); plan the step anew")

    def append(
        self, k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, plan: Plan | None
    ) -> None:
        """Write K and V rows; see `PagedAttention.append_kv`.

        Parameters
        ----------
        plan : Plan, optional
            The last one. Its slots were checked when it was made.
        """
        k_cache, v_cache = self._caches.check(k_cache, v_cache)
        row = self._caches.num_kv_heads, self._caches.head_dim, self._dtype, self._place.device
        k, v = check_rows("k", k, *row, stage=True), check_rows("v", v, *row, stage=True)
        slots = self._slots(slot_mapping, len(k_cache) * self._caches.block_size, plan)
        count = len(slots)
        if not len(k) >= count <= len(v):
            raise ValueError(f"slot_mapping has {count} tokens, but k has {len(k)} and v {len(v)}")
        if count:
            self._calls["append_kv"](k[:count], v[:count], k_cache, v_cache, slots)

    def _slots(self, slot_mapping: Any, num_slots: int, plan: Plan | None) -> torch.Tensor:
        """Return a checked slot mapping."""
        if (
            plan is not None
            and slot_mapping is plan.slot_mapping
            and plan.max_slot < num_slots
            and plan.slot_version == slot_mapping._version  # else someone has written to it
            # A CPU's array may be written to without torch; a GPU's tensors are one.
            and (slot_mapping is plan.slots or torch.equal(slot_mapping, plan.slots))
        ):
            return plan.slots
        return check_slots(slot_mapping, num_slots, self._place)

    def copy(self, k_caches: Sequence[Any], v_caches: Sequence[Any], block_copies: Any) -> None:
        """Copy whole blocks of all layers; see `PagedAttention.copy_blocks`."""
        if len(k_caches) != len(v_caches):
            raise ValueError(f"k_cache has {len(k_caches)} layers, but v_cache has {len(v_caches)}")
        layers = [self._caches.check(k, v) for k, v in zip(k_caches, v_caches, strict=True)]
        if not layers:
            raise ValueError("k_cache has no layers")
        copies = check_copies(block_copies, min(len(k) for k, _ in layers), self._place)
        if len(copies):
            for cache in (each for layer in layers for each in layer):
                blocks = cache.as_strided(
                    (len(cache), cache[0].numel()), (cache.stride(0), 1)
                ).view(torch.uint8)
                self._calls["copy_blocks"](blocks, copies)


def _checked_scale(sm_scale: Any) -> float:
    try:
        scale = float(sm_scale)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"sm_scale={sm_scale!r} must be a number") from error
    if not abs(scale) <= np.finfo(np.float32).max:
        raise ValueError(f"sm_scale={sm_scale} must be finite in float32")
    return scale
