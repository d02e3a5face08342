"""``merge_states``: two partial attentions into one."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import torch

from tvmpaged.bundle.search import BUNDLE_VARIABLE
from tvmpaged.runtime.kernel_set import Kernel, load_kernel
from tvmpaged.runtime.place import Place, place_of
from tvmpaged.runtime.tensors import as_tensor, check_plain, check_rows
from tvmpaged.spec import AttentionSpec, dtype_name


@cache
def _merge_kernel(dtype: str, place: Place, _search_path: str | None) -> Kernel:
    """Return a device's merge kernel, looked for once per search path."""
    return load_kernel(AttentionSpec.make("merge", dtype), place=place)


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Merge two partial attentions over disjoint keys by their log-sum-exps.

    Parameters
    ----------
    out_a, out_b : tensor
        ``[num_tokens, num_qo_heads, head_dim]``, one dtype and device; it is done there.
    lse_a, lse_b : tensor
        ``[num_tokens, num_qo_heads]`` float32, natural log; a part with -inf saw nothing and is
        ignored whatever its values are.

    Returns
    -------
    out, lse : tensor
        As if all keys had been seen at once; of out_a's kind and dtype.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and what is allowed.
    """
    first = as_tensor("out_a", out_a)
    try:
        dtype = dtype_name(first.dtype)
        tokens, heads, dim = first.shape
        AttentionSpec.make("decode", dtype, head_dim=dim)
    except ValueError as error:
        raise ValueError(
            f"out_a is {first.dtype} {tuple(first.shape)}; expected [num_tokens, num_qo_heads, "
            f"head_dim] that a kernel takes: {error}"
        ) from error
    second = as_tensor("out_b", out_b)
    if second.shape != first.shape:
        raise ValueError(
            f"out_b has shape {tuple(second.shape)}, but out_a has {tuple(first.shape)}"
        )
    try:
        place = place_of(first.device)
    except ValueError as error:
        raise ValueError(f"out_a cannot be served: {error}") from error
    outs = [
        check_rows(name, value, heads, dim, first.dtype, place.device, stage=True)
        for name, value in (("out_a", out_a), ("out_b", out_b))
    ]
    lses = [
        check_plain(name, value, torch.float32, place.device, written=False)
        for name, value in (("lse_a", lse_a), ("lse_b", lse_b))
    ]
    for name, lse in zip("ab", lses, strict=True):
        if tuple(lse.shape) != (tokens, heads):
            raise ValueError(
                f"lse_{name} has shape {tuple(lse.shape)}; for out_a's {tuple(first.shape)} it "
                f"must be {(tokens, heads)}"
            )
    out = torch.empty(first.shape, dtype=first.dtype, device=place.device)
    lse_out = torch.empty(tokens, heads, device=place.device)
    if tokens:
        row = torch.arange(tokens, dtype=torch.int32)
        merges = torch.stack([row, row, torch.full_like(row, 2), torch.full_like(row, tokens)], 1)
        merges = place.put(merges)
        _merge_kernel(dtype, place, os.environ.get(BUNDLE_VARIABLE)).call(
            torch.cat([each.float() for each in outs]), torch.cat(lses), merges, out, lse_out
        )
    if isinstance(out_a, np.ndarray):
        return out.numpy(), lse_out.numpy()
    return out, lse_out
