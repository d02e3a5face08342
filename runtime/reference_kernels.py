"""Slow stand-ins for compiled kernels, with the same arguments, in NumPy float64.

They run only on request (``allow_reference=True``): for a machine without an artifact, and to hold
the runtime against the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from tvmpaged import reference
from tvmpaged.runtime.kernel_set import Kernel
from tvmpaged.spec import AttentionSpec
from tvmpaged.worklist import Item, Merge


def reference_kernel(spec: AttentionSpec) -> Kernel:
    """Return the stand-in for a spec's artifact."""
    nhd = spec.layout == "NHD"
    # What a plan passes was converted for compiled kernels; torch reads it where it lies.

    def attention(
        q: Any,
        k_cache: Any,
        v_cache: Any,
        block_table: Any,
        items: Any,
        _offsets: Any,
        out: Any,
        lse: Any,
        partial_out: Any,
        partial_lse: Any,
        sm_scale: float,
    ) -> None:
        block_table, items, lse, partial_out, partial_lse = map(
            from_dlpack, (block_table, items, lse, partial_out, partial_lse)
        )
        group_size = q.shape[1] // k_cache.shape[2 if nhd else 1]
        for item in items.tolist():
            begin, end = item[Item.KV_BEGIN], item[Item.KV_END]
            blocks, head = block_table[item[Item.SEQ]], item[Item.KV_HEAD]
            k = reference.gather_kv(k_cache, blocks, end, spec.layout)[begin:, head : head + 1]
            v = reference.gather_kv(v_cache, blocks, end, spec.layout)[begin:, head : head + 1]
            for row in range(item[Item.ROW_BEGIN], item[Item.ROW_END]):
                token, in_group = divmod(row, group_size)
                qo_head = head * group_size + in_group
                visible = min(end, item[Item.VISIBLE] + token) - begin
                values, log_sum = reference.attend(
                    reference.as_array(q[item[Item.Q_START] + token, qo_head])[None],
                    k[: max(0, visible)],
                    v[: max(0, visible)],
                    sm_scale,
                )
                is_split = item[Item.PARTIAL] >= 0
                target, target_lse = (partial_out, partial_lse) if is_split else (out, lse)
                to = (item[Item.PARTIAL] if is_split else item[Item.Q_START]) + token
                target[to, qo_head] = torch.from_numpy(values[0]).to(target.dtype)
                target_lse[to, qo_head] = float(log_sum[0])

    def merge(partial_out: Any, partial_lse: Any, merges: Any, out: Any, lse: Any) -> None:
        partial_out, partial_lse, merges, lse = map(
            from_dlpack, (partial_out, partial_lse, merges, lse)
        )
        for each in merges.tolist():
            rows = range(
                each[Merge.PARTIAL],
                each[Merge.PARTIAL] + each[Merge.COUNT] * each[Merge.STRIDE],
                each[Merge.STRIDE],
            )
            values = reference.as_array(partial_out[rows[0]])
            log_sum = reference.as_array(partial_lse[rows[0]])
            for row in rows[1:]:
                values, log_sum = reference.merge_states(
                    values, log_sum, partial_out[row], partial_lse[row]
                )
            out[each[Merge.OUT_ROW]] = torch.from_numpy(values).to(out.dtype)
            lse[each[Merge.OUT_ROW]] = torch.from_numpy(log_sum)

    def append_kv(k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any) -> None:
        tokens = torch.nonzero(slot_mapping >= 0)[:, 0]
        slots = slot_mapping[tokens]
        for rows, cache in ((k, k_cache), (v, v_cache)):
            by_slot = cache if nhd else cache.transpose(1, 2)
            blocks = torch.div(slots, by_slot.shape[1], rounding_mode="floor")
            by_slot[blocks, slots % by_slot.shape[1]] = rows[tokens].to(cache.dtype)

    def copy_blocks(cache: Any, block_copies: Any) -> None:
        source, destination = block_copies.long().unbind(1)
        cache[destination] = cache[source]

    calls: dict[str, Callable[..., Any]] = {
        "merge": merge,
        "append_kv": append_kv,
        "copy_blocks": copy_blocks,
    }
    return Kernel(
        call=calls.get(spec.kernel, attention),
        spec=spec,
        choices={"row_tile": 16, "split_length": 0},
        description={
            "kind": "reference",
            "target": "cpu",
            "artifact": None,
            "sha256": None,
            "choices": {},
            "record": None,
            "mlflow_run": None,
            "measured_us": None,
            "measured_on": None,
            "state": "current",
            "why": "asked for with allow_reference=True; NumPy float64, slow",
        },
    )
