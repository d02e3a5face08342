"""Running one artifact beside the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tvmpaged import reference
from tvmpaged.bundle import Artifact
from tvmpaged.layout import to_hnd
from tvmpaged.spec import AttentionSpec

#: dtype of out -> greatest ||out - ref|| / ||ref||. Float32 sums a few thousand products; the
#: 16-bit ones round out and may round probabilities: some units of their last place (2**-11 and
#: 2**-8).
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}

#: Sizes that a generic artifact is tried with: none is a power of two.
_HEAD_DIM, _GROUP_SIZE, _BLOCK_SIZE = 80, 3, 5
_NUM_KV_HEADS = 2

#: (new tokens, tokens visible) of each sequence. Decode: one token; a full block; several splits.
#: Prefill: from the start, after a context, none at all, and rows that see nothing.
_DECODE = ((1, 1), (1, 16), (1, 333), (1, 2500))
_PREFILL = ((33, 33), (7, 300), (0, 4), (5, 3), (3, 1400))


class NotServedError(Exception):
    """The runtime does not serve this artifact here; the message says why."""


def attention_of(artifact: Artifact, make_attention: Callable[..., Any]) -> Any:
    """Return a `PagedAttention` that is served by an artifact.

    Parameters
    ----------
    artifact : Artifact
        From a folder that the runtime prefers (`tvmpaged.bundle.prefer`).
    make_attention : callable
        `PagedAttention`.

    Raises
    ------
    NotServedError
        When the runtime takes another artifact or none.
    """
    spec = artifact.spec
    if spec.head_dim != spec.head_dim_v:
        raise NotServedError("the runtime serves equal head sizes of K and V")
    group_size = spec.group_size or _GROUP_SIZE
    try:
        attention = make_attention(
            _NUM_KV_HEADS * group_size,
            _NUM_KV_HEADS,
            spec.head_dim or _HEAD_DIM,
            spec.block_size or _BLOCK_SIZE,
            dtype=spec.q_dtype,
            kv_dtype=spec.kv_dtype,
            kv_layout=spec.layout,
            allow_reference=True,
        )
    except ValueError as error:
        raise NotServedError(str(error)) from error
    if attention.describe()["kernels"][spec.kernel]["sha256"] != artifact.sha256:
        raise NotServedError("the runtime takes another artifact for it")
    return attention


def error_of(spec: AttentionSpec, attention: Any) -> tuple[float, float]:
    """Return a kernel's error ||out - ref|| / ||ref|| and the greatest that is allowed.

    Parameters
    ----------
    spec : AttentionSpec
        Names the kernel.
    attention : PagedAttention
        From `attention_of`.
    """
    if spec.kernel == "append_kv":
        return _append_error(attention), 0.0
    if spec.kernel == "copy_blocks":
        return _copy_error(attention), 0.0
    steps = _PREFILL if spec.kernel == "prefill" else _DECODE
    return _attention_error(attention, steps), TOLERANCES[spec.out_dtype]


def _attention_error(attention: Any, steps: tuple[tuple[int, int], ...]) -> float:
    random = torch.Generator().manual_seed(0)
    q_lens, seq_lens = zip(*steps, strict=True)
    counts = [-(-length // attention.block_size) for length in seq_lens]
    # Blocks lie scattered; one that nobody owns stays NaN, and must not be seen.
    ids = torch.randperm(sum(counts) + 1, generator=random, dtype=torch.int32)
    table = torch.full((len(steps), max(counts)), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = ids[sum(counts[:row]) : sum(counts[:row]) + count]
    caches = attention.new_cache(len(ids))
    for cache in caches:  # any order of random numbers is as good, so this holds for every layout
        cache.copy_(torch.randn(cache.shape, generator=random))
        cache[int(ids[-1])] = float("nan")
    num_tokens = sum(q_lens)
    q = torch.randn((num_tokens, attention.num_qo_heads, attention.head_dim), generator=random)
    q = q.to(attention.dtype).to(attention.device)
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    lengths = np.asarray(seq_lens, dtype=np.int32)
    out = attention.run(attention.plan(starts, lengths, table), q, *caches)
    stored = attention.kv_layout, attention.block_size
    k_cache, v_cache = (
        to_hnd(cache, which, *stored).cpu() for cache, which in zip(caches, "kv", strict=True)
    )
    truth = reference.paged_attention(q.cpu(), k_cache, v_cache, starts, lengths, table)
    return float(np.linalg.norm(reference.as_array(out.cpu()) - truth) / np.linalg.norm(truth))


def _append_error(attention: Any) -> float:
    random = torch.Generator().manual_seed(0)
    slots = torch.tensor([0, 7, -1, 3, 2 * attention.block_size])
    shape = (len(slots), attention.num_kv_heads, attention.head_dim)
    k, v = (
        torch.randn(shape, generator=random).to(attention.dtype).to(attention.device)
        for _ in range(2)
    )
    caches = attention.new_cache(8)
    attention.append_kv(k, v, *caches, slots)
    found = attention.read_kv(*caches, torch.arange(8 * attention.block_size))
    written = slots >= 0
    expected = [torch.zeros_like(each) for each in found]
    for each, rows in zip(expected, (k, v), strict=True):
        each[slots[written]] = rows[written].to(each.dtype)
    return 0.0 if all(map(torch.equal, found, expected)) else 1.0


def _copy_error(attention: Any) -> float:
    random = torch.Generator().manual_seed(0)
    caches = attention.new_cache(6)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=random))
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[[4, 0]] = cache[[1, 5]]
    attention.copy_blocks(*caches, [(1, 4), (5, 0)])
    return 0.0 if all(map(torch.equal, caches, expected)) else 1.0
