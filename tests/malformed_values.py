"""What an argument of a call may be turned into: each is legal, or must be refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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
