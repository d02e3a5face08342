"""The functions that malformed calls are made of, each with its right arguments."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from malformed_values import (
    ARRAYS,
    BLOCK,
    BLOCKS,
    COPIES,
    DIM,
    DTYPES,
    FEWER,
    HEADS,
    INPUT,
    K_CACHE,
    KV_HEADS,
    LENS,
    NAME,
    NOTHING,
    OUTPUT,
    PLACES,
    SAME,
    SCALE,
    SHAPES,
    SIZE,
    SLOTS,
    STARTS,
    TABLE,
    TOKENS,
    UNSUPPORTED,
    V_CACHE,
    Change,
    Value,
    entries,
    guarded,
    negative_view,
    unaligned,
    unpacked,
)

from tvmpaged import PagedAttention, merge_states
from tvmpaged.runtime.plan import Plan


@dataclass
class Door:
    """One function: its right arguments, and what each may be turned into."""

    name: str
    call: Callable[..., Any]
    arguments: dict[str, Value]
    changes: dict[str, list[Change]]
    writes: tuple[str, ...] = ()
    expected: Any = None
    weight: float = 1.0
    counts: Counter[str] = field(default_factory=Counter)

    def observe(self, result: Any) -> Any:
        """Return what a right call must bring about, as bytes."""
        if result is not None:
            return bits(result)
        return bits([self.arguments[name] for name in self.writes])


def bits(result: Any) -> Any:
    """Return something that can be compared."""
    if isinstance(result, tuple | list):
        return [bits(each) for each in result]
    if isinstance(result, torch.Tensor):
        rows = result.detach()[: len(result) if result.dim() == 4 else TOKENS]
        return rows.contiguous().view(torch.uint8).flatten().tolist()
    if isinstance(result, np.ndarray):
        return bits(torch.from_numpy(result))
    if isinstance(result, Plan):
        return [x.tolist() for phase in result.work.values() for x in phase], bits(
            result.slot_mapping
        )
    return None


def small_plan(attn: PagedAttention, table: torch.Tensor) -> Any:
    """Return an empty plan whose memory is its own, not that of a larger plan that is gone."""
    return [attn.plan([0], [], table[:0]) for _ in range(3)][-1]


def doors(bundle: str) -> list[Door]:
    attn = PagedAttention(HEADS, KV_HEADS, DIM, BLOCK, "float32", bundle=bundle)
    other = PagedAttention(4, KV_HEADS, DIM, BLOCK, "float32", bundle=bundle)
    torch.manual_seed(0)
    starts, lens = torch.tensor([0, 1, 3, 3]), torch.tensor([5, 6, 0])
    table = torch.tensor([[3, 1], [2, 0], [-1, -1]])
    plan = attn.plan(starts, lens, table)
    k_cache, v_cache = (guarded(attn.cache_shape(BLOCKS)) for _ in range(2))
    for cache in (k_cache, v_cache):
        cache.copy_(torch.randn(cache.shape))
    q, k, v = (
        torch.randn(3, HEADS, DIM),
        torch.randn(3, KV_HEADS, DIM),
        torch.randn(3, KV_HEADS, DIM),
    )
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    cache_changes = {"k_cache": K_CACHE, "v_cache": V_CACHE}
    lse = torch.randn(3, HEADS)
    lse_changes = [
        *(*NOTHING, *DTYPES, *PLACES),
        *(change for change in ARRAYS if change.name != "reversed array"),
        *(SHAPES[0], SHAPES[4], SHAPES[6], SHAPES[7], *FEWER, *SAME),
        Change("unaligned", unaligned, legal=True),
        Change("unpacked", unpacked, legal=True),
        Change("negative view", negative_view, legal=True),
    ]
    state_changes = [x for x in INPUT if x.name not in ("more tokens", "array", "read-only array")]
    state_changes = [x for x in state_changes if x.name != "unpacked array"]
    constructor = {
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "block_size": BLOCK,
        "dtype": "float32",
        "kv_dtype": None,
        "kv_layout": "HND",
        "device": "cpu",
        "bundle": bundle,
    }
    return [
        Door(
            "PagedAttention",
            PagedAttention,
            constructor,
            {
                "num_qo_heads": [
                    *SIZE,
                    Change("7", lambda _: 7),
                    Change("NumPy int", np.int64, legal=True),
                ],
                "num_kv_heads": [*SIZE, Change("4", lambda _: 4)],
                "head_dim": [*SIZE, *(Change(str(x), lambda _, x=x: x) for x in (12, 264, 1024))],
                "block_size": [*SIZE, Change("257", lambda _: 257)],
                "dtype": [*NAME, Change("None", lambda _: None)],
                "kv_dtype": NAME,
                "kv_layout": [*NAME, Change("native", lambda _: "native", legal=True)],
                "device": [*NAME, Change("cuda", lambda _: "cuda"), *NOTHING[:1]],
                "bundle": [*NOTHING[1:2], *NOTHING[3:], Change("bytes", lambda _: b"/tmp")],
            },
            weight=0.3,
        ),
        Door(
            "new_cache",
            attn.new_cache,
            {"num_blocks": 3, "num_layers": 2},
            {
                "num_blocks": [
                    Change("NumPy int", np.int32, legal=True),
                    *SIZE,
                    *(Change(f"2**{x}", lambda _, x=x: 2**x) for x in (45, 62)),
                ],
                "num_layers": [*SIZE[1:]],
            },
        ),
        Door(
            "plan",
            attn.plan,
            {
                "query_start_loc": starts,
                "seq_lens": lens,
                "block_table": table,
                "causal": True,
                "into": None,
                "window_left": None,
            },
            {
                "query_start_loc": STARTS,
                "seq_lens": LENS,
                "block_table": TABLE,
                "causal": [*NOTHING, Change("array", lambda _: np.array([True, False]))],
                "into": [*NOTHING[1:], Change("small", lambda _: small_plan(attn, table))],
                "window_left": UNSUPPORTED,
            },
        ),
        Door(
            "append_kv",
            attn.append_kv,
            {"k": k, "v": v, **caches, "slot_mapping": plan.slot_mapping.clone()},
            {
                "k": [*INPUT, *FEWER],
                "v": [*INPUT, *FEWER],
                **cache_changes,
                "slot_mapping": SLOTS,
            },
            writes=("k_cache", "v_cache"),
        ),
        Door(
            "run",
            attn.run,
            {
                "plan": plan,
                "q": q,
                **caches,
                "sm_scale": 0.25,
                "out": guarded((3, HEADS, DIM)),
                "logits_soft_cap": None,
                "alibi_slopes": None,
                "sinks": None,
                "k_scale": None,
                "v_scale": None,
            },
            {
                "plan": [
                    *NOTHING,
                    Change("of another instance", lambda _: other.plan(starts, lens, table)),
                    Change("past the cache", lambda _: attn.plan([0, 1], [1], [[BLOCKS]])),
                    Change("far past the cache", lambda _: attn.plan([0, 1], [1], [[2**31 - 2]])),
                ],
                "q": [*INPUT, *FEWER],
                **cache_changes,
                "sm_scale": SCALE,
                "out": OUTPUT,
                "logits_soft_cap": UNSUPPORTED,
                "alibi_slopes": UNSUPPORTED,
                "sinks": UNSUPPORTED,
                "k_scale": UNSUPPORTED,
                "v_scale": UNSUPPORTED,
            },
            writes=("k_cache", "v_cache", "out"),
            weight=2.0,
        ),
        Door(
            "copy_blocks",
            attn.copy_blocks,
            {**caches, "block_copies": torch.tensor([[0, 4], [2, 1]])},
            {
                "k_cache": [*K_CACHE, Change("two layers", lambda x: [x, x.clone()])],
                "v_cache": [*V_CACHE, Change("three layers", lambda x: [x, x.clone(), x.clone()])],
                "block_copies": COPIES,
            },
            writes=("k_cache", "v_cache"),
        ),
        Door(
            "read_kv",
            attn.read_kv,
            {**caches, "slot_mapping": torch.tensor([3, 19, 0])},
            {**cache_changes, "slot_mapping": [*SLOTS[:-2], *entries(0, (-1,))]},
            writes=("k_cache", "v_cache"),
        ),
        Door(
            "merge_states",
            merge_states,
            {"out_a": q, "lse_a": lse, "out_b": q * 2, "lse_b": lse + 1},
            {
                "out_a": [*NOTHING, *PLACES, *DTYPES[2:], *FEWER, *SAME, *SHAPES[2:7]],
                "lse_a": lse_changes,
                "out_b": [*state_changes, *FEWER],
                "lse_b": lse_changes,
            },
        ),
    ]
