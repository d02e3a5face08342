"""The truth in NumPy float64: the same names and argument order as the kernels, one loop at a time.

Slow on purpose. It gathers each sequence's K and V, masks, and takes an ordinary softmax; nothing
is shared with the kernels' way of computing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def as_array(value: Any, dtype: Any = np.float64) -> Array:
    """Return a NumPy copy of a torch tensor or array-like (bfloat16 has no NumPy dtype)."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    return np.array(value, dtype=dtype)


def gather_kv(cache: Any, block_ids: Any, length: int, kv_layout: str = "HND") -> Array:
    """Return one sequence's rows of a cache.

    Parameters
    ----------
    cache : array
        ``[num_blocks, num_kv_heads, block_size, head_dim]`` (HND) or
        ``[num_blocks, block_size, num_kv_heads, head_dim]`` (NHD).
    block_ids : array of int
        The sequence's row of the block table.
    length : int
        Tokens to return.
    kv_layout : str
        ``HND`` or ``NHD``.

    Returns
    -------
    array
        ``[length, num_kv_heads, head_dim]`` float64.
    """
    head_axis, slot_axis = (1, 2) if kv_layout == "HND" else (2, 1)
    block_size = cache.shape[slot_axis]
    used = as_array(block_ids, np.int64)[: -(-length // block_size)]
    if not len(used):
        return np.zeros((0, cache.shape[head_axis], cache.shape[3]))
    blocks = as_array(cache[used.tolist()])  # only the blocks this sequence owns
    if kv_layout == "HND":
        blocks = blocks.swapaxes(1, 2)
    return blocks.reshape(-1, *blocks.shape[2:])[:length]


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    query_start_loc: Any,
    seq_lens: Any,
    block_table: Any,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    kv_layout: str = "HND",
    return_lse: bool = False,
) -> Any:
    """Attention of each sequence's new tokens over its paged K/V cache.

    Row i of a sequence with q_len new tokens sees positions ``j <= seq_len - q_len + i``
    (``causal=False``: all ``j < seq_len``). A row that sees nothing has out 0 and lse -inf.

    Parameters
    ----------
    q : array
        ``[num_tokens, num_qo_heads, head_dim]``.
    k_cache, v_cache : array
        One layer, ``[num_blocks, num_kv_heads, block_size, head_dim]`` (HND).
    query_start_loc : array of int
        ``[num_seqs + 1]``, cumulative new tokens.
    seq_lens : array of int
        ``[num_seqs]``, tokens visible after this step.
    block_table : array of int
        ``[num_seqs, max_blocks_per_seq]``, -1 pads.
    sm_scale : float, optional
        Factor on q.k; default ``head_dim ** -0.5``.
    causal : bool
        Whether a token sees only itself and what came before.
    kv_layout : str
        ``HND`` or ``NHD``.
    return_lse : bool
        Whether to return the natural log-sum-exp too.

    Returns
    -------
    out : array
        ``[num_tokens, num_qo_heads, head_dim_v]`` float64; rows of no sequence are 0.
    lse : array, if asked
        ``[num_tokens, num_qo_heads]`` float64.
    """
    starts, lengths = as_array(query_start_loc, np.int64), as_array(seq_lens, np.int64)
    tables, queries = as_array(block_table, np.int64), as_array(q)
    scale = queries.shape[2] ** -0.5 if sm_scale is None else sm_scale
    out = np.zeros((*queries.shape[:2], v_cache.shape[3]))
    lse = np.full(queries.shape[:2], -np.inf)
    for seq, length in enumerate(lengths):
        k = gather_kv(k_cache, tables[seq], length, kv_layout)
        v = gather_kv(v_cache, tables[seq], length, kv_layout)
        q_len = starts[seq + 1] - starts[seq]
        for i in range(q_len):
            visible = length - q_len + i + 1 if causal else length
            row, seen = starts[seq] + i, max(0, visible)
            out[row], lse[row] = attend(queries[row], k[:seen], v[:seen], scale)
    return (out, lse) if return_lse else out


def attend(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array]:
    """Attention of one token over the keys that it sees.

    Parameters
    ----------
    q : array
        ``[num_qo_heads, head_dim]``.
    k, v : array
        ``[length, num_kv_heads, head_dim]``; length may be 0.
    scale : float
        Factor on q.k.

    Returns
    -------
    out, lse : array
        ``[num_qo_heads, head_dim_v]`` and ``[num_qo_heads]``; 0 and -inf where length is 0.
    """
    if not len(k):
        return np.zeros((len(q), v.shape[2])), np.full(len(q), -np.inf)
    group_size = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group_size, axis=1), np.repeat(v, group_size, axis=1)
    logits = np.einsum("hd,jhd->hj", q, k) * scale
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True)
    return np.einsum("hj,jhd->hd", weights / total, v), (top + np.log(total))[:, 0]


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Array, Array]:
    """Merge two partial attentions over disjoint keys by their log-sum-exps.

    Parameters
    ----------
    out_a, out_b : array
        ``[num_tokens, num_qo_heads, head_dim]``.
    lse_a, lse_b : array
        ``[num_tokens, num_qo_heads]``, natural log; -inf marks a part that saw nothing.

    Returns
    -------
    out, lse : array
        As if all keys had been seen at once, float64.
    """
    lse = np.stack([as_array(lse_a), as_array(lse_b)])
    top = lse.max(axis=0)
    base = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lse - base)
    total = weights.sum(axis=0)
    outs = np.stack([as_array(out_a), as_array(out_b)])
    # A part that saw nothing carries no weight, whatever its values are.
    outs = np.where(weights[..., None] > 0, outs, 0.0)
    safe = np.where(total > 0, total, 1.0)
    out = (outs * (weights / safe)[..., None]).sum(axis=0)
    with np.errstate(divide="ignore"):
        return out, base + np.log(total)


def append_kv(
    k: Any, v: Any, k_cache: Array, v_cache: Array, slot_mapping: Any, kv_layout: str = "HND"
) -> None:
    """Write new K/V rows into the cache arrays in place; slot -1 skips the token.

    Parameters
    ----------
    k, v : array
        ``[num_tokens, num_kv_heads, head_dim]``.
    k_cache, v_cache : array
        One layer; changed.
    slot_mapping : array of int
        ``[num_tokens]``, ``block_id * block_size + offset``.
    kv_layout : str
        ``HND`` or ``NHD``.
    """
    slots = as_array(slot_mapping, np.int64)
    for rows, cache in ((as_array(k), k_cache), (as_array(v), v_cache)):
        by_slot = cache.swapaxes(1, 2) if kv_layout == "HND" else cache
        for token, slot in enumerate(slots):
            if slot >= 0:
                block, offset = divmod(int(slot), by_slot.shape[1])
                by_slot[block, offset] = rows[token]


def copy_blocks(k_cache: Array, v_cache: Array, block_copies: Any) -> None:
    """Copy whole blocks inside the cache arrays, in place.

    Parameters
    ----------
    k_cache, v_cache : array
        One layer; changed.
    block_copies : array of int
        ``[num_copies, 2]``, (source, destination).
    """
    for source, destination in as_array(block_copies, np.int64).reshape(-1, 2):
        k_cache[destination] = k_cache[source]
        v_cache[destination] = v_cache[source]
