"""``PagedAttention``: attention over a paged K/V cache, for anyone's engine."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tvmpaged.cpu import num_threads
from tvmpaged.layout import inner_shape, layout_of, read_rows
from tvmpaged.planning.step import check_step
from tvmpaged.runtime.attention_kernels import attention_specs, check_count, load_kernels
from tvmpaged.runtime.indices import check_copies, check_slots
from tvmpaged.runtime.plan import PHASES, Plan, make_plan
from tvmpaged.runtime.tensors import check_cache, check_rows, is_plain, zero_pages

#: What a process can address on x86-64 without five-level paging.
ADDRESS_SPACE_BYTES = 2**47

Caches = torch.Tensor | Sequence[torch.Tensor]


class PagedAttention:
    """Attention of a step's new tokens over a paged K/V cache, from precompiled artifacts.

    One instance is used from one thread at a time; instances are independent, and calls release
    the GIL.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Query heads and K/V heads; the second divides the first.
    head_dim : int
        A multiple of 8 up to 256, or 512.
    block_size : int
        Tokens per block, 1..256.
    dtype : str or torch.dtype
        Of q, k, v and out: ``float32``, ``float16`` or ``bfloat16``.
    kv_dtype : str or torch.dtype, optional
        Of the caches; default `dtype`.
    kv_layout : str, optional
        ``HND`` (default): caches ``[num_blocks, num_kv_heads, block_size, head_dim]``; ``NHD``:
        ``[num_blocks, block_size, num_kv_heads, head_dim]``; ``native``: the bundle's fastest. The
        attribute of this name then says which (see `tvmpaged.layout`), and `write_kv` and `read_kv`
        convert.
    device : str
        ``cpu``.
    bundle : path, optional
        A bundle to look in before the search path.
    strict : bool
        Take only artifacts specialised for exactly this spec and this machine.
    batch_invariant : bool
        A sequence's bits depend neither on the other sequences, nor on which blocks hold it, nor
        on the number of threads. The kernels are so in any case; False merely permits others.
    allow_reference : bool
        Without an artifact, run the slow NumPy reference instead of raising; not under `strict`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and what is allowed.
    FileNotFoundError
        When no artifact can serve; lists every candidate and why it was rejected.
    """

    def __init__(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: Any = "bfloat16",
        kv_dtype: Any = None,
        kv_layout: str | None = None,
        device: str | torch.device = "cpu",
        bundle: Any = None,
        strict: bool = False,
        batch_invariant: bool = True,
        allow_reference: bool = False,
    ) -> None:
        specs = attention_specs(
            num_qo_heads, num_kv_heads, head_dim, block_size, dtype, kv_dtype, kv_layout, device
        )
        self.num_qo_heads = int(num_qo_heads)
        self.num_kv_heads = int(num_kv_heads)
        self.head_dim = specs["decode"].head_dim
        self.block_size = specs["decode"].block_size
        self.dtype = getattr(torch, specs["decode"].q_dtype)
        self.kv_dtype = getattr(torch, specs["decode"].kv_dtype)
        self.batch_invariant = batch_invariant
        self._kernels = load_kernels(specs, bundle, strict, allow_reference)
        self._checks_arguments = all(k.kind != "reference" for k in self._kernels.values())
        decode = self._kernels["decode"]
        self.kv_layout = layout_of(decode.spec, decode.choices)
        self._inner_shape = inner_shape(
            self.kv_layout, self.num_kv_heads, self.block_size, self.head_dim
        )
        self._num_workers = num_threads()
        self._last_plan: Callable[[], Plan | None] = lambda: None
        self._signature = (
            *(k.description["sha256"] for k in self._kernels.values()),
            *(self.num_qo_heads, self.num_kv_heads, self.head_dim, self.block_size, self.kv_layout),
        )

    @classmethod
    def supports(
        cls,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: Any = "bfloat16",
        kv_dtype: Any = None,
        kv_layout: str | None = None,
        device: str | torch.device = "cpu",
        bundle: Any = None,
        strict: bool = False,
        batch_invariant: bool = True,  # noqa: ARG003, same arguments as the constructor
        allow_reference: bool = False,
    ) -> list[str]:
        """Return the reasons why such an instance cannot be made; empty when it can."""
        try:
            specs = attention_specs(
                num_qo_heads, num_kv_heads, head_dim, block_size, dtype, kv_dtype, kv_layout, device
            )
            load_kernels(specs, bundle, strict, allow_reference)
        except (ValueError, TypeError, FileNotFoundError) as error:
            return [str(error)]
        return []

    def describe(self) -> dict[str, Any]:
        """Return what runs, as plain data.

        Returns
        -------
        dict
            ``kind`` (``tuned``, ``default``, ``generic``, ``compiled`` or ``reference``),
            ``target``, ``artifact``, ``sha256``, ``choices``, ``record``, ``mlflow_run``,
            ``measured_us``, ``measured_on``, ``state`` (``current``, ``stale`` when it was made
            from other kernel sources than the installed ones, ``tuned elsewhere`` when it was
            measured on another device or with another number of threads) and ``why`` of the decode
            kernel; ``kv_layout``; and under ``kernels`` the same of every kernel, as their kinds
            may differ.
        """
        kernels = {
            name: {"spec": str(kernel.spec), **kernel.description}
            for name, kernel in self._kernels.items()
        }
        return {
            **self._kernels["decode"].description,
            "kv_layout": self.kv_layout,
            "kernels": kernels,
        }

    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Return the shape of one layer's K (or V) cache."""
        return (num_blocks, *self._inner_shape)

    def new_cache(self, num_blocks: int, num_layers: int | None = None) -> tuple[Any, Any]:
        """Return zeroed caches, aligned, whose memory costs nothing until it is touched.

        Parameters
        ----------
        num_blocks : int
            Blocks per layer.
        num_layers : int, optional
            Layers; given, two lists are returned.

        Returns
        -------
        k_cache, v_cache : torch.Tensor, or lists of them
            Each of `cache_shape`.

        Raises
        ------
        ValueError
            When a number is not positive, or the memory cannot be had.
        """
        layers = 1 if num_layers is None else check_count("num_layers", num_layers)
        num_blocks = check_count("num_blocks", num_blocks)
        shape = self.cache_shape(num_blocks)
        needed = 2 * layers * math.prod(shape) * self.kv_dtype.itemsize
        too_much = f"num_blocks={num_blocks} and num_layers={layers} need {needed} bytes"
        if needed > ADDRESS_SPACE_BYTES:
            raise ValueError(f"{too_much}; a process has {ADDRESS_SPACE_BYTES}")
        try:
            pairs = [
                (zero_pages(shape, self.kv_dtype), zero_pages(shape, self.kv_dtype))
                for _ in range(layers)
            ]
        except OSError as error:
            raise ValueError(f"{too_much}; this machine refuses them: {error}") from error
        if num_layers is None:
            return pairs[0]
        return [k for k, _ in pairs], [v for _, v in pairs]

    def plan(
        self,
        query_start_loc: Any,
        seq_lens: Any,
        block_table: Any,
        causal: bool = True,
        *,
        into: Plan | None = None,
        window_left: int | None = None,
    ) -> Plan:
        """Plan one step; once per step, shared by all layers.

        Parameters
        ----------
        query_start_loc : array of int
            ``[num_seqs + 1]``, cumulative new tokens.
        seq_lens : array of int
            ``[num_seqs]``, tokens visible after this step, the new ones included.
        block_table : array of int
            ``[num_seqs, max_blocks_per_seq]``, -1 pads.
        causal : bool
            Row i of a sequence with q_len new tokens sees positions
            ``j <= seq_len - q_len + i``; without it, all ``j < seq_len``.
        into : Plan, optional
            A plan whose memory is reused, and which does not run any more then; the capacity is
            that of the first plan made in this memory.
        window_left : None
            Sliding windows are not supported yet.

        Returns
        -------
        Plan
            Holds copies; valid until a block table of its sequences changes, or until its memory
            is reused.

        Raises
        ------
        ValueError, TypeError
            Naming the argument, the sequence and what is wrong.
        """
        _refuse(window_left=window_left)
        if not isinstance(causal, bool):
            raise TypeError(f"causal={causal!r} must be a bool")
        if into is not None and not isinstance(into, Plan):
            raise TypeError(f"into must come from plan(); got {type(into).__name__}")
        step = check_step(query_start_loc, seq_lens, block_table, self.block_size)
        plan = make_plan(
            step,
            {phase: self._kernels[phase] for phase in PHASES},
            signature=self._signature,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_v=self.head_dim,
            causal=causal,
            num_workers=self._num_workers,
            into=into,
        )
        self._last_plan = weakref.ref(plan)
        return plan

    def append_kv(
        self, k: Any, v: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: Any
    ) -> None:
        """Write new K and V rows into one layer's cache.

        Parameters
        ----------
        k, v : tensor
            ``[num_tokens, num_kv_heads, head_dim]``; token and head strides are free.
        k_cache, v_cache : torch.Tensor
            One layer; changed.
        slot_mapping : tensor of int
            ``[num_tokens]``, ``block_id * block_size + offset``; -1 skips the token. A plan's, or
            your own (which is checked here).

        Raises
        ------
        ValueError, TypeError
            Naming the argument, its value and what is allowed. Nothing is written then.
        """
        k_cache, v_cache = self._check_caches(k_cache, v_cache)
        k = check_rows("k", k, self.num_kv_heads, self.head_dim, self.dtype, stage=True)
        v = check_rows("v", v, self.num_kv_heads, self.head_dim, self.dtype, stage=True)
        slots = self._slots(slot_mapping, len(k_cache) * self.block_size)
        if not len(k) >= len(slots) <= len(v):
            raise ValueError(
                f"slot_mapping has {len(slots)} tokens, but k has {len(k)} and v {len(v)}"
            )
        if len(slots):
            self._kernels["append_kv"].call(
                k[: len(slots)], v[: len(slots)], k_cache, v_cache, slots
            )

    def run(
        self,
        plan: Plan,
        q: Any,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float | None = None,
        out: Any = None,
        return_lse: bool = False,
        *,
        logits_soft_cap: float | None = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> Any:
        """Attention of the plan's new tokens over one layer's cache.

        Parameters
        ----------
        plan : Plan
            Made by this instance for this step.
        q : tensor
            ``[num_tokens, num_qo_heads, head_dim]``; token and head strides are free.
        k_cache, v_cache : torch.Tensor
            One layer; the new tokens' K and V are in it already.
        sm_scale : float, optional
            Factor on q.k, applied in float32; default ``head_dim ** -0.5``.
        out : tensor, optional
            Like q; written in place. Rows past the plan's tokens stay untouched.
        return_lse : bool
            Whether to return the log-sum-exp too.
        logits_soft_cap, alibi_slopes, sinks, k_scale, v_scale : None
            Not supported yet.

        Returns
        -------
        out : tensor
            ``[num_tokens, num_qo_heads, head_dim]`` of q's kind and dtype.
        lse : tensor, if asked
            ``[num_tokens, num_qo_heads]`` float32, natural log; -inf for a row that saw nothing.

        Raises
        ------
        ValueError, TypeError
            Naming the argument, its value and what is allowed.
        """
        if not (logits_soft_cap is alibi_slopes is sinks is k_scale is v_scale is None):
            _refuse(
                logits_soft_cap=logits_soft_cap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        self._check_plan(plan)
        scale = self._scale(sm_scale)
        lse = torch.empty_like(plan.lse) if return_lse else plan.lse
        result: Any = self._run_plain(plan, q, k_cache, v_cache, out, lse, scale)
        if result is None:
            result = self._run_checked(plan, q, k_cache, v_cache, out, lse, scale)
        if out is not None:
            result = out
        elif isinstance(q, np.ndarray):
            result = result.numpy()
        if not return_lse:
            return result
        return result, lse.numpy() if isinstance(q, np.ndarray) else lse

    def _run_plain(
        self, plan: Plan, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any, sm_scale: float
    ) -> torch.Tensor | None:
        """Run on what the kernels can check; None, with nothing done, when it takes a closer look.

        The checks by name of all that may be passed take as long as a small kernel.
        """
        tensors = (q, k_cache, v_cache) if out is None else (q, k_cache, v_cache, out)
        for each in tensors:
            if not is_plain(each):
                return None
        # The generic artifacts take any sizes, and none knows how many kv heads the plan names.
        if (
            not self._checks_arguments
            or not plan.work
            or q.shape != (plan.num_tokens, self.num_qo_heads, self.head_dim)
            or k_cache.shape[1:] != self._inner_shape
            or k_cache.shape[0] <= plan.max_block_id
            or v_cache.shape != k_cache.shape
        ):
            return None
        result = torch.empty_like(q) if out is None else out
        try:
            self._launch(plan, q, k_cache, v_cache, result, lse, sm_scale)
        # The last kind is torch's, of dtypes and devices that it cannot pass on.
        except (TypeError, ValueError, RuntimeError):
            return None
        return result

    def _run_checked(
        self, plan: Plan, q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any, sm_scale: float
    ) -> torch.Tensor:
        """Check every argument by name, make copies where they help, and run."""
        k_cache, v_cache = self._check_caches(k_cache, v_cache)
        if plan.max_block_id >= k_cache.shape[0]:
            raise ValueError(
                f"plan's block_table names block {plan.max_block_id}, but k_cache has "
                f"{k_cache.shape[0]} blocks"
            )
        rows = check_rows("q", q, self.num_qo_heads, self.head_dim, self.dtype, stage=True)
        if rows.shape[0] < plan.num_tokens:
            raise ValueError(f"q has {rows.shape[0]} tokens, but the plan has {plan.num_tokens}")
        result = self._out(out, rows, plan.num_tokens)
        self._launch(
            plan,
            rows[: plan.num_tokens],
            k_cache,
            v_cache,
            result[: plan.num_tokens],
            lse,
            sm_scale,
        )
        return result

    def _launch(
        self,
        plan: Plan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sm_scale: float,
    ) -> None:
        for phase, (items, offsets) in plan.work.items():
            self._kernels[phase].call(
                q,
                k_cache,
                v_cache,
                plan.block_table,
                items,
                offsets,
                out,
                lse,
                plan.partial_out,
                plan.partial_lse,
                sm_scale,
            )
        if plan.merge_items is not None:
            self._kernels["merge"].call(
                plan.partial_out, plan.partial_lse, plan.merge_items, out, lse
            )

    def copy_blocks(self, k_cache: Caches, v_cache: Caches, block_copies: Any) -> None:
        """Copy whole blocks inside the caches: the write of copy-on-write.

        Parameters
        ----------
        k_cache, v_cache : torch.Tensor or lists of them
            One layer, or all layers.
        block_copies : array of int
            ``[num_copies, 2]``, (source, destination); what `BlockManager.take_copies` gives.

        Raises
        ------
        ValueError, TypeError
            When a block is out of range, a destination appears twice, or one is also a source.
            Nothing is written then.
        """
        pairs = _layers("k_cache", k_cache), _layers("v_cache", v_cache)
        if len(pairs[0]) != len(pairs[1]):
            raise ValueError(f"k_cache has {len(pairs[0])} layers, but v_cache has {len(pairs[1])}")
        layers = [self._check_caches(k, v) for k, v in zip(*pairs, strict=True)]
        if not layers:
            raise ValueError("k_cache has no layers")
        copies = check_copies(block_copies, min(len(k) for k, _ in layers))
        if len(copies):
            for cache in (each for layer in layers for each in layer):
                blocks = cache.as_strided(
                    (len(cache), cache[0].numel()), (cache.stride(0), 1)
                ).view(torch.uint8)
                self._kernels["copy_blocks"].call(blocks, copies)

    def read_kv(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V rows that stand in slots, whatever the layout.

        Parameters
        ----------
        k_cache, v_cache : torch.Tensor
            One layer.
        slot_mapping : array of int
            ``[num_tokens]``, none negative.

        Returns
        -------
        k, v : torch.Tensor
            ``[num_tokens, num_kv_heads, head_dim]``, copies.
        """
        k_cache, v_cache = self._check_caches(k_cache, v_cache)
        slots = check_slots(slot_mapping, len(k_cache) * self.block_size, distinct=False)
        if len(slots) and int(slots.min()) < 0:
            raise ValueError("slot_mapping names slot -1, which holds nothing to read")
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        k, v = (
            read_rows(cache, which, self.kv_layout, self.block_size, block, slots % self.block_size)
            for which, cache in (("k", k_cache), ("v", v_cache))
        )
        return k, v

    def write_kv(
        self, k: Any, v: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: Any
    ) -> None:
        """Write K and V rows into slots; the counterpart of `read_kv`, the same as `append_kv`."""
        self.append_kv(k, v, k_cache, v_cache, slot_mapping)

    def _scale(self, sm_scale: float | None) -> float:
        if sm_scale is None:
            return float(self.head_dim**-0.5)
        try:
            scale = float(sm_scale)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise TypeError(f"sm_scale={sm_scale!r} must be a number") from error
        if not abs(scale) <= np.finfo(np.float32).max:
            raise ValueError(f"sm_scale={sm_scale} must be finite in float32")
        return scale

    def _slots(self, slot_mapping: Any, num_slots: int) -> torch.Tensor:
        """Return a checked slot mapping; the last plan's own was checked when it was made."""
        plan = self._last_plan()
        if plan is not None and slot_mapping is plan.slot_mapping:
            own: torch.Tensor = plan.slot_mapping
            if plan.max_slot < num_slots and plan.slot_version == own._version:
                return own
        return check_slots(slot_mapping, num_slots)

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must come from plan(); got {type(plan).__name__}")
        if plan.signature != self._signature:
            raise ValueError("plan was made for other artifacts or head counts; plan the step anew")
        if not plan.is_current:
            raise ValueError("plan's memory was given to a later one (into=); plan the step anew")

    def _check_caches(self, k_cache: Any, v_cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k_cache = check_cache("k_cache", k_cache, self._inner_shape, self.kv_dtype)
        v_cache = check_cache("v_cache", v_cache, self._inner_shape, self.kv_dtype)
        num_blocks = k_cache.shape[0], v_cache.shape[0]
        if num_blocks[0] != num_blocks[1]:
            raise ValueError(f"k_cache has {num_blocks[0]} blocks, but v_cache has {num_blocks[1]}")
        return k_cache, v_cache

    def _out(self, out: Any, q: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if out is None:
            result = torch.empty(q.shape, dtype=self.dtype)
            result[num_tokens:] = 0
            return result
        result = check_rows("out", out, self.num_qo_heads, self.head_dim, self.dtype, stage=False)
        if result.shape[0] < num_tokens:
            raise ValueError(f"out has {result.shape[0]} tokens, but the plan has {num_tokens}")
        return result


def _refuse(**arguments: Any) -> None:
    """Refuse features that exist as keywords only, so that none is dropped silently."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} is not supported yet; allowed: None")


def _layers(name: str, caches: Any) -> list[Any]:
    if isinstance(caches, torch.Tensor | np.ndarray):
        return [caches]
    if isinstance(caches, list | tuple):
        return list(caches)
    raise TypeError(f"{name} must be a tensor or a list of tensors; got {type(caches).__name__}")
