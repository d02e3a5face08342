"""What `tvmpaged.bench` measures: a case's tensors, and who computes attention on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from tvmpaged.runtime.attention import PagedAttention
from tvmpaged.runtime.plan import Plan
from tvmpaged.spec import DTYPE_BYTES, AttentionSpec

#: What FlashInfer is given to work in.
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """One measurement: a spec and the sizes it leaves open.

    Parameters
    ----------
    spec : AttentionSpec
        Decode or prefill.
    num_kv_heads, batch, context : int
        K/V heads; sequences; keys of each, the new ones included.
    q_len : int
        New tokens of each sequence: 1 for decode, `context` for a whole prefill.
    """

    spec: AttentionSpec
    num_kv_heads: int
    batch: int
    context: int
    q_len: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a decode step has to read."""
        row = (self.spec.head_dim + self.spec.head_dim_v) * DTYPE_BYTES[self.spec.kv_dtype]
        return self.batch * self.context * self.num_kv_heads * row

    @property
    def bound(self) -> tuple[str, int]:
        """What bounds the kernel: its rate's name, and its bytes or operations."""
        if self.spec.kernel == "decode":
            return "gb_per_s", self.kv_bytes
        return "gflop_per_s", self.flops

    @property
    def flops(self) -> int:
        """Operations of q.K and P.V over the keys that are visible."""
        past = self.context - self.q_len
        pairs = self.q_len * past + self.q_len * (self.q_len + 1) // 2
        heads = self.num_kv_heads * self.spec.group_size
        return 2 * self.batch * heads * pairs * (self.spec.head_dim + self.spec.head_dim_v)


@dataclass
class Filled:
    """A case's tensors on a device, K and V both in a paged cache and contiguous.

    Parameters
    ----------
    case, attn
        What of, and whose.
    plan : Plan
        Of the step.
    q, out : torch.Tensor
        ``[batch * q_len, num_qo_heads, head_dim]``.
    k, v : torch.Tensor
        ``[batch, num_kv_heads, context, head_dim]``, as the cache has them.
    k_cache, v_cache : torch.Tensor
        Filled in random block order.
    block_table : torch.Tensor
        ``[batch, blocks of a sequence]`` int32, on the CPU.
    """

    case: Case
    attn: PagedAttention
    plan: Plan
    q: torch.Tensor
    out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def make(cls, case: Case, attn: PagedAttention, seed: int) -> Filled:
        """Fill a cache with random K and V, through `append_kv`."""
        random = torch.Generator().manual_seed(seed)

        def rows(count: int, heads: int) -> torch.Tensor:
            made = torch.randn(count, heads, case.spec.head_dim, generator=random)
            return made.to(attn.dtype).to(attn.device)

        blocks_per_seq = -(-case.context // case.spec.block_size)
        num_blocks = case.batch * blocks_per_seq
        block_table = torch.randperm(num_blocks, dtype=torch.int32, generator=random)
        block_table = block_table.view(case.batch, blocks_per_seq)
        seq_lens = torch.full((case.batch,), case.context, dtype=torch.int32)
        k_cache, v_cache = attn.new_cache(num_blocks)
        starts = torch.arange(case.batch + 1, dtype=torch.int32)
        whole = attn.plan(starts * case.context, seq_lens, block_table)
        k, v = (rows(case.batch * case.context, case.num_kv_heads) for _ in range(2))
        attn.append_kv(k, v, k_cache, v_cache, whole.slot_mapping)
        q = rows(case.batch * case.q_len, attn.num_qo_heads)
        by_seq = (case.batch, case.context, case.num_kv_heads, case.spec.head_dim)
        k, v = (each.view(by_seq).transpose(1, 2).contiguous().to(attn.kv_dtype) for each in (k, v))
        plan = attn.plan(starts * case.q_len, seq_lens, block_table)
        return cls(case, attn, plan, q, torch.empty_like(q), k, v, k_cache, v_cache, block_table)

    @property
    def is_on_gpu(self) -> bool:
        """Whether the tensors lie on a GPU."""
        return self.q.is_cuda

    def ours(self) -> torch.Tensor:
        """Run the step as it is served."""
        self.attn.run(self.plan, self.q, self.k_cache, self.v_cache, out=self.out)
        return self.out

    def torch_attention(self, dtype: torch.dtype | None = None) -> Callable[[], torch.Tensor]:
        """Return torch's attention over the same keys: not paged, so a bound and no peer."""
        case, dtype = self.case, dtype or self.q.dtype
        q = self.q.view(case.batch, case.q_len, -1, case.spec.head_dim).transpose(1, 2).to(dtype)
        k, v = self.k.to(dtype), self.v.to(dtype)
        whole = case.q_len == case.context and case.q_len > 1
        mask = None
        if case.q_len > 1 and not whole:
            positions = torch.arange(case.context, device=q.device)
            mask = positions <= positions[case.context - case.q_len :, None]
        return lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=whole, enable_gqa=case.spec.group_size > 1
        )

    def error(self) -> float:
        """Return ||out - truth|| / ||truth||, where the truth is torch's attention in float32."""
        truth = self.torch_attention(torch.float32)().transpose(1, 2).reshape(self.q.shape)
        return float((self.ours().float() - truth).norm() / truth.norm())

    def flashinfer_attention(self) -> Callable[[], Any] | None:
        """Return FlashInfer's attention over the same cache; None where it is not installed.

        It reads HND caches of q's dtype.
        """
        case, device = self.case, self.q.device
        readable = self.attn.kv_layout == "HND" and self.attn.kv_dtype == self.attn.dtype
        if not readable or not self.is_on_gpu or find_spec("flashinfer") is None:
            return None
        peer = import_module("flashinfer")
        decodes = case.q_len == 1
        work = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
        pages = starts * self.block_table.shape[1], self.block_table.flatten().to(device)
        in_last = (case.context - 1) % case.spec.block_size + 1
        last = torch.full((case.batch,), in_last, dtype=torch.int32, device=device)
        sizes = (self.q.shape[1], case.num_kv_heads, case.spec.head_dim, case.spec.block_size)
        if decodes:
            wrapper = peer.BatchDecodeWithPagedKVCacheWrapper(
                work, "HND", use_tensor_cores=case.spec.group_size >= 4
            )
            wrapper.plan(*pages, last, *sizes, q_data_type=self.q.dtype)
        else:
            wrapper = peer.BatchPrefillWithPagedKVCacheWrapper(work, "HND")
            wrapper.plan(
                starts * case.q_len, *pages, last, *sizes, causal=True, q_data_type=self.q.dtype
            )
        return lambda: wrapper.run(self.q, (self.k_cache, self.v_cache), out=self.out)
