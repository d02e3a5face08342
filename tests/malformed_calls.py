"""A program that makes many malformed calls and reports what came of them, as JSON.

``malformed_calls.py BUNDLE SEED COUNT LAST``: each call changes one argument of a call that is
right (later two or three) into something else, and knows whether that is legal. A call that is not
must raise ValueError or TypeError, name an argument that was changed, and leave the caches, `out`
and the memory around them alone. A legal one must give the right bits. Before each call its text
goes into the file LAST, so that a crash tells who it was.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tvmpaged import PagedAttention, merge_states
from tvmpaged.runtime.plan import Plan

TOKENS, HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 3, 6, 2, 16, 4, 5
GUARD = 1024  # elements on either side of what a kernel writes

Value = Any
Bad = Callable[[Value], Value]


@dataclass(frozen=True)
class Change:
    """What one argument is turned into."""

    name: str
    make: Bad
    legal: bool = False


def guarded(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros with a guard zone of sevens before and after."""
    elements = int(np.prod(shape))
    memory = torch.full((elements + 2 * GUARD,), 7, dtype=dtype)
    return memory[GUARD : GUARD + elements].view(shape).zero_()


def guards_hold(tensor: torch.Tensor) -> bool:
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return bool((memory[:GUARD] == 7).all() and (memory[-GUARD:] == 7).all())


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory was given back behind its shape."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


def unpacked(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with strides in the last dimension."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers as a view that negates lazily."""
    return torch._neg_view(-tensor)  # as of a conjugate's imaginary part, but packed


def subclass(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor.clone())


NOTHING = [
    Change("None", lambda _: None),
    Change("int", lambda _: 3),
    Change("text", lambda _: "x"),
    Change("object", lambda _: object()),
    Change("dict", lambda _: {}),
    Change("type", lambda _: torch.Tensor),
]
DTYPES = [
    Change(f"dtype {dtype}", lambda x, dtype=dtype: x.to(dtype))
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8),
        *(torch.bool, torch.complex64, torch.float8_e4m3fn),
    )
]
PLACES = [
    Change("meta device", lambda x: x.to("meta")),
    Change("sparse", lambda x: x.to_sparse()),
    Change("sparse csr", lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr()),
    Change("quantised", lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)),
    Change("memory given back", freed),
]
SHAPES = [
    Change("last dimension shorter", lambda x: x[..., :-1]),
    Change("last dimension longer", lambda x: torch.cat([x, x], -1)),
    Change("a head less", lambda x: x[:, :-1]),
    Change("a head more", lambda x: torch.cat([x, x[:, :1]], 1)),
    Change("a dimension more", lambda x: x[None]),
    Change("a dimension less", lambda x: x[:, 0]),
    Change("flat", lambda x: x.reshape(-1)),
    Change("scalar", lambda _: torch.tensor(1.0)),
    Change("axes swapped", lambda x: x.transpose(1, -1)),
    Change("no elements", lambda x: x[..., :0]),
]
ARRAYS = [
    Change("list", lambda x: x.tolist()),
    Change("float64 array", lambda x: x.double().numpy()),
    Change("int array", lambda x: x.int().numpy()),
    Change("object array", lambda x: x.numpy().astype(object)),
    Change("big-endian array", lambda x: x.numpy().astype(">f4")),
    Change("reversed array", lambda x: x.numpy()[::-1]),
    Change("array of records", lambda _: np.zeros(3, [("a", "f4"), ("b", "i4")])),
]
SAME = [
    Change("clone", lambda x: x.clone(), legal=True),
    Change("requires grad", lambda x: x.clone().requires_grad_(), legal=True),
    Change("parameter", subclass, legal=True),
]
FEWER = [Change("a token less", lambda x: x[:-1]), Change("no tokens", lambda x: x[:0])]
INPUT = [
    *(*NOTHING, *DTYPES, *PLACES, *SHAPES, *ARRAYS, *SAME),
    Change("unaligned", unaligned, legal=True),
    Change("unpacked", unpacked, legal=True),
    Change("negative view", negative_view, legal=True),
    Change("array", lambda x: x.numpy().copy(), legal=True),
    Change("read-only array", lambda x: read_only(x), legal=True),
    Change("unpacked array", lambda x: unpacked(x).numpy(), legal=True),
    Change("heads outermost", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), legal=True),
    Change("more tokens", lambda x: torch.cat([x, x]), legal=True),
]
OUTPUT = [
    *(*NOTHING[1:], *DTYPES, *PLACES, *SHAPES, *ARRAYS, *FEWER),
    Change("unaligned", unaligned),
    Change("unpacked", unpacked),
    Change("negative view", negative_view),
    Change("read-only array", lambda x: read_only(x)),
    Change("one row for all tokens", lambda x: x[:1].expand(x.shape)),
    Change("one row for all heads", lambda x: x[:, :1].expand(x.shape)),
    Change("rows that overlap", lambda x: x.as_strided(x.shape, (x.stride(0), DIM // 2, 1))),
    Change("None", lambda _: None, legal=True),
    Change("heads outermost", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), legal=True),
]
CACHE = [
    *(*NOTHING, *DTYPES, *PLACES, *SHAPES, *ARRAYS),
    Change("unaligned", unaligned),
    Change("unpacked", unpacked),
    Change("negative view", negative_view),
    Change("read-only array", lambda x: read_only(x)),
    Change("heads outermost", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    Change("one block for all", lambda x: x[:1].expand(x.shape)),
    Change("blocks that overlap", lambda x: x.as_strided(x.shape, (8, *x.stride()[1:]))),
    Change("no blocks", lambda x: x[:0]),
]
# Different ones for K and V, so that two of them cannot make up for each other.
K_CACHE = [*CACHE, Change("a block less than v_cache", lambda x: x[:-1])]
V_CACHE = [*CACHE, Change("two blocks less than k_cache", lambda x: x[:-2])]
INDEX_TYPES = [
    *NOTHING,
    Change("float tensor", lambda x: x.double()),
    Change("bfloat16 tensor", lambda x: x.bfloat16()),
    Change("bool tensor", lambda x: x.bool()),
    Change("int16 tensor", lambda x: x.short()),
    Change("uint8 tensor", lambda x: x.byte()),
    Change("meta device", lambda x: x.to("meta")),
    Change("sparse", lambda x: x.to_sparse()),
    Change("memory given back", freed),
    Change("uint64 array", lambda x: x.numpy().astype(np.uint64)),
    Change("big-endian array", lambda x: x.numpy().astype(">i8")),
    Change("object array", lambda x: x.numpy().astype(object)),
    Change("texts", lambda x: x.numpy().astype(str)),
    Change("complex", lambda x: x.numpy().astype(complex)),
    Change("ragged list", lambda x: [[1, 2], [3]]),
    Change("list with None", lambda x: [None, *x.tolist()]),
    Change("list with a huge int", lambda x: [2**70, *x.flatten().tolist()]),
    Change("a dimension more", lambda x: x[None]),
    Change("a dimension less", lambda x: x[0]),
    Change("int32 tensor", lambda x: x.int(), legal=True),
    Change("list", lambda x: x.tolist(), legal=True),
    Change("array", lambda x: x.numpy(), legal=True),
    Change("reversed twice", lambda x: x.flip(0).numpy()[::-1], legal=True),
    Change("unaligned", unaligned, legal=True),
]
HUGE = (2**31 - 1, 2**31, 2**62, 2**63 - 1, -1, -(2**31), -(2**63))


def with_entry(index: int | tuple[int, int], number: int) -> Bad:
    def make(values: torch.Tensor) -> torch.Tensor:
        found = values.clone()
        found[index] = number
        return found

    return make


def entries(index: int | tuple[int, int], numbers: tuple[int, ...]) -> list[Change]:
    return [Change(f"entry {number}", with_entry(index, number)) for number in numbers]


STARTS = [
    *INDEX_TYPES,
    *entries(-1, HUGE),
    *entries(1, (-1, 2**31, 2**63 - 1, -(2**63), 100)),
    *entries(0, (1, -1, 2**63 - 1)),
    Change("two entries less", lambda x: x[:-2]),
    Change("an entry more", lambda x: torch.cat([x, x[-1:]])),
    Change("no entries", lambda x: x[:0]),
    Change("differences that wrap", lambda _: torch.tensor([0, 2**63 - 1, -(2**63), 3])),
]
LENS = [
    *INDEX_TYPES,
    *entries(0, (*HUGE, 1000)),
    Change("an entry less", lambda x: x[:-1]),
    Change("two entries more", lambda x: torch.cat([x, x[-2:]])),
    Change("no entries", lambda x: x[:0]),
]
TABLE = [
    *INDEX_TYPES,
    *entries((0, 0), HUGE),
    Change("a row less", lambda x: x[:-1]),
    Change("a row more", lambda x: torch.cat([x, x[-1:]])),
    Change("no columns", lambda x: x[:, :0]),
    Change("one block for two new tokens", lambda x: torch.zeros_like(x)),
    Change("a column more", lambda x: torch.cat([x, x[:, :1]], 1), legal=True),
    Change("garbage past the lengths", lambda x: x.where(x >= 0, -(2**40)), legal=True),
]
SLOTS = [
    *(change for change in INDEX_TYPES if change.name != "a dimension less"),
    *entries(0, (*HUGE[:4], -2, -(2**31), -(2**63), BLOCKS * BLOCK)),
    Change("a slot twice", lambda x: x[:1].expand(x.shape)),
    Change("more than tokens", lambda x: torch.arange(4 * len(x))),
]
COPIES = [
    *INDEX_TYPES,
    *entries((0, 0), (*HUGE, BLOCKS)),
    *entries((1, 1), (*HUGE, BLOCKS)),
    Change("three columns", lambda x: torch.cat([x, x[:, :1]], 1)),
    Change("a destination twice", lambda x: torch.stack([x[0], x[0]])),
    Change("a block on itself", lambda _: torch.tensor([[1, 1]])),
    Change("a chain", lambda _: torch.tensor([[0, 1], [1, 2]])),
]
SIZE = [
    *(change for change in NOTHING if change.name != "int"),
    *(Change(repr(x), lambda _, x=x: x) for x in (0, -1, -(2**40), 2.5, True, "4", [4], 1 + 1j)),
    *(Change(repr(x), lambda _, x=x: x) for x in (2**70, float("nan"), b"4", np.array([4, 4]))),
]
SCALE = [
    *NOTHING[2:],
    *(Change(repr(x), lambda _, x=x: x) for x in (float("nan"), float("inf"), -float("inf"))),
    *(Change(repr(x), lambda _, x=x: x) for x in (1e39, 1e300, 10**400, "0.5x", [1.0], 1j)),
    Change("two numbers", lambda _: torch.tensor([1.0, 2.0])),
    Change("default", lambda _: None, legal=True),
    Change("tensor", lambda _: torch.tensor(0.25), legal=True),
    Change("NumPy scalar", lambda _: np.float32(0.25), legal=True),
]
UNSUPPORTED = [Change(repr(x), lambda _, x=x: x) for x in (0, 1, 0.5, "x", [], False)]
NAME = [*NOTHING[1:], *(Change(repr(x), lambda _, x=x: x) for x in ("", "float64", 16, b"HND", []))]


def read_only(tensor: torch.Tensor) -> Any:
    array = tensor.numpy().copy()
    array.flags.writeable = False
    return array


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


def calls(door: Door, rng: np.random.Generator, count: int) -> Iterator[dict[str, Change]]:
    """Give every single change, then combinations of two or three."""
    for argument, changes in door.changes.items():
        for change in changes:
            yield {argument: change}
    legal = {name: [each for each in door.changes[name] if each.legal] for name in door.changes}
    legal = {name: changes for name, changes in legal.items() if changes}
    for i in range(count):
        # Every fourth is legal where anything is: what is refused must not depend on company.
        pools = legal if legal and i % 4 == 0 else door.changes
        size = min(len(pools), int(rng.integers(2, 4)))
        picked = rng.choice(list(pools), size, replace=False)
        yield {name: pick(rng, pools[name]) for name in picked}


def pick(rng: np.random.Generator, changes: list[Change]) -> Change:
    return changes[int(rng.integers(len(changes)))]


def attempt(door: Door, changed: dict[str, Change]) -> str | None:
    """Make one call; return what is wrong with what came of it."""
    arguments = dict(door.arguments)
    for name, change in changed.items():
        arguments[name] = change.make(arguments[name])
    before = {name: door.arguments[name].clone() for name in door.writes}
    legal = all(change.legal for change in changed.values())
    try:
        result = door.call(**arguments)
    except (ValueError, TypeError) as error:
        door.counts["refused"] += 1
        problem = _refusal(error, changed, legal)
    except Exception as error:  # noqa: BLE001, any other exception is the finding
        problem = f"{type(error).__name__}: {error}"
    else:
        door.counts["accepted"] += 1
        right = not legal or door.observe(result) == door.expected
        problem = "accepted" if not legal else None if right else "gives another result"
    for name, old in before.items():
        if not legal and problem is None and not torch.equal(door.arguments[name], old):
            problem = f"was refused, but {name} was changed"
        if not guards_hold(door.arguments[name]):
            problem = f"wrote around {name}"
        door.arguments[name].copy_(old)
    return problem


def _refusal(error: Exception, changed: dict[str, Change], legal: bool) -> str | None:
    if legal:
        return f"refused, but it is legal: {error}"
    if not any(name in str(error) for name in changed):
        return f"{type(error).__name__} names no changed argument: {error}"
    return None


def main(bundle: str, seed: str, count: str, last: str) -> None:
    rng, problems, made = np.random.default_rng(int(seed)), [], Counter[str]()
    everything = doors(bundle)
    single = sum(len(changes) for door in everything for changes in door.changes.values())
    unit = (int(count) - single) / sum(door.weight for door in everything)
    with Path(last).open("wb", buffering=0) as note:
        for door in everything:
            before = {name: door.arguments[name].clone() for name in door.writes}
            door.expected = door.observe(door.call(**door.arguments))
            for name, old in before.items():
                door.arguments[name].copy_(old)
            for changed in calls(door, rng, int(unit * door.weight) + 1):
                text = ", ".join(f"{name}: {change.name}" for name, change in changed.items())
                note.seek(0)
                note.truncate()
                note.write(f"{door.name}({text})".encode())
                made[door.name] += 1
                problem = attempt(door, changed)
                if problem:
                    problems.append(f"{door.name}({text}): {problem}"[:400])
    counts = {door.name: dict(door.counts) for door in everything}
    print(json.dumps({"made": made, "counts": counts, "problems": problems}))


if __name__ == "__main__":
    main(*sys.argv[1:])
