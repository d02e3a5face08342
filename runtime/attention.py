"""``PagedAttention``: attention over a paged K/V cache, for anyone's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tvmpaged.layout import layout_of
from tvmpaged.planning.items import workers_on
from tvmpaged.planning.step import check_step
from tvmpaged.runtime.attention_kernels import attention_specs, check_count, load_kernels
from tvmpaged.runtime.cache_format import CacheFormat
from tvmpaged.runtime.kernel_set import KINDS
from tvmpaged.runtime.launch import Launch
from tvmpaged.runtime.place import place_of
from tvmpaged.runtime.plan import PHASES, Plan, make_plan
from tvmpaged.runtime.plan_memory import Buffers

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
    device : str or torch.device
        ``cpu``, or a GPU such as ``cuda:0``. There caches, q, k, v and out lie on it, calls queue
        their work on torch's current stream, and the block stride of a cache is a multiple of 16
        bytes.
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
            num_qo_heads, num_kv_heads, head_dim, block_size, dtype, kv_dtype, kv_layout
        )
        self._place = place_of(device)
        self.device = self._place.device
        self.num_qo_heads = int(num_qo_heads)
        self.num_kv_heads = int(num_kv_heads)
        self.head_dim = specs["decode"].head_dim
        self.block_size = specs["decode"].block_size
        self.dtype = getattr(torch, specs["decode"].q_dtype)
        self.kv_dtype = getattr(torch, specs["decode"].kv_dtype)
        self.batch_invariant = batch_invariant
        self._kernels = load_kernels(specs, bundle, strict, allow_reference, self._place)
        decode = self._kernels["decode"]
        self.kv_layout = layout_of(decode.spec, decode.choices)
        sizes = self.num_kv_heads, self.head_dim, self.block_size
        self._caches = CacheFormat(*sizes, self.kv_dtype, self.kv_layout, self._place)
        self._launch = Launch(self._kernels, self._caches, self.num_qo_heads, self.dtype)
        self._num_workers = {
            phase: workers_on(self._place.num_units, self._kernels[phase].choices)
            for phase in PHASES
        }
        self._last_plan: Callable[[], Plan | None] = lambda: None
        #: Memory of the last two plans: where a step's plan replaces the last one's, that is alive
        #: while the next is made.
        self._memory: list[Buffers] = []

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
                num_qo_heads, num_kv_heads, head_dim, block_size, dtype, kv_dtype, kv_layout
            )
            load_kernels(specs, bundle, strict, allow_reference, place_of(device))
        except (ValueError, TypeError, FileNotFoundError) as error:
            return [str(error)]
        return []

    def describe(self) -> dict[str, Any]:
        """Return what runs, as plain data.

        Returns
        -------
        dict
            ``kind`` (``tuned``, ``default``, ``compiled``, ``generic`` or ``reference``), the
            lesser of decode's and prefill's; ``target``, ``artifact``, ``sha256``, ``choices``,
            ``record``, ``mlflow_run``, ``measured_us``, ``measured_on``, ``state`` (``current``,
            ``stale`` when it or the record of its choices is of other kernel sources than the
            installed ones, ``tuned elsewhere`` when it was measured on another device or with
            another number of threads) and ``why`` of the decode kernel; ``kv_layout``; and under
            ``kernels`` the same of every kernel, its own kind included.
        """
        kernels = {
            name: {"spec": str(kernel.spec), **kernel.description}
            for name, kernel in self._kernels.items()
        }
        return {
            **self._kernels["decode"].description,
            "kind": max((self._kernels[phase].kind for phase in PHASES), key=KINDS.index),
            "kv_layout": self.kv_layout,
            "kernels": kernels,
        }

    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Return the shape of one layer's K (or V) cache."""
        return (num_blocks, *self._caches.inner)

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
        pairs = self._caches.make(num_blocks, layers)
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
        max_seq_len: int | None = None,
        window_left: int | None = None,
    ) -> Plan:
        """Plan one step; once per step, shared by all layers.

        The plan is made on the CPU from arrays that lie there; a GPU's tensor has to be waited for.

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
        max_seq_len : int, optional
            Lay the memory out for sequences up to this length, so that what `run` and `append_kv`
            launch stays the same in all plans made `into` it: a CUDA graph that was captured with
            this plan serves those. Each of them has the same new tokens per sequence; an absent
            sequence is one of length 0.
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
        if max_seq_len is not None:
            if into is not None:
                raise ValueError(f"max_seq_len={max_seq_len}: into= keeps what its first plan had")
            max_seq_len = check_count("max_seq_len", max_seq_len)
        # A framed plan's memory is as large as its longest, and on a GPU what ran before may still
        # be reading: then memory is torch's to give.
        is_fresh = into is not None or max_seq_len is not None or self._place.is_gpu
        step = check_step(query_start_loc, seq_lens, block_table, self.block_size)
        plan = make_plan(
            step,
            {phase: self._kernels[phase] for phase in PHASES},
            signature=self._launch.signature,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_v=self.head_dim,
            causal=causal,
            num_workers=self._num_workers,
            block_size=self.block_size,
            place=self._place,
            max_seq_len=max_seq_len,
            into=into,
            spare=None if is_fresh else self._spare(),
        )
        self._last_plan = plan.buffers.owner
        others = [each for each in self._memory if each is not plan.buffers]
        # Memory that was passed as `into` is its owner's to give away.
        self._memory = others if is_fresh else [*others[-1:], plan.buffers]
        return plan

    def _spare(self) -> Buffers | None:
        return next((each for each in self._memory if each.owner() is None), None)

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
        self._launch.append(k, v, k_cache, v_cache, slot_mapping, self._last_plan())

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
        return self._launch.attend(plan, q, k_cache, v_cache, sm_scale, out, return_lse)

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
        self._launch.copy(_layers("k_cache", k_cache), _layers("v_cache", v_cache), block_copies)

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
        return self._caches.read(k_cache, v_cache, slot_mapping)

    def write_kv(
        self, k: Any, v: Any, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: Any
    ) -> None:
        """Write K and V rows into slots; the counterpart of `read_kv`, the same as `append_kv`."""
        self.append_kv(k, v, k_cache, v_cache, slot_mapping)


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
