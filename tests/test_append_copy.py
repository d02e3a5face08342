"""What moves K and V without computing: append_kv, copy_blocks, read_kv, and merge_states."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cases import NAN, assert_close, random_rows

from tvmpaged import PagedAttention, merge_states, reference
from tvmpaged.spec import DTYPES

pytestmark = pytest.mark.runtime

Attention = Callable[..., PagedAttention]
LAYOUTS = ["HND", "NHD"]
CONVERSIONS = [
    *((dtype, dtype) for dtype in DTYPES),
    ("float32", "float16"),
    ("float32", "bfloat16"),
]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bytes, so that NaN equals itself and -0 is not 0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def rows(attn: PagedAttention, rng: np.random.Generator, count: int) -> torch.Tensor:
    return random_rows(rng, (count, attn.num_kv_heads, attn.head_dim), attn.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), CONVERSIONS)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (8, 1), (72, 7), (512, 256)])
def test_append_writes_the_named_slots_and_no_others(
    generic: Attention,
    rng: np.random.Generator,
    layout: str,
    dtype: str,
    kv_dtype: str,
    head_dim: int,
    block_size: int,
) -> None:
    attn = generic(1, head_dim, block_size, dtype, kv_dtype=kv_dtype, layout=layout, num_kv_heads=3)
    k_cache, v_cache = (cache.fill_(7) for cache in attn.new_cache(5))
    k, v = rows(attn, rng, 4), rows(attn, rng, 4)
    slots = rng.permutation(5 * block_size)[:4]
    expected = [reference.as_array(cache) for cache in (k_cache, v_cache)]
    reference.append_kv(k.to(attn.kv_dtype), v.to(attn.kv_dtype), *expected, slots, layout)
    attn.append_kv(k, v, k_cache, v_cache, slots)
    assert (reference.as_array(k_cache) == expected[0]).all()
    assert (reference.as_array(v_cache) == expected[1]).all()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_narrowing_rounds_as_torch_does(generic: Attention, kv_dtype: str) -> None:
    """To the nearest, ties to even; overflow to infinity, denormals and NaN kept."""
    attn = generic(1, 64, 16, "float32", kv_dtype=kv_dtype, num_kv_heads=1)
    one = torch.arange(-2048, 2048, dtype=torch.int32)
    values = torch.cat(
        [
            (0x3F800000 + (one << 9)).view(torch.float32),  # ties and their neighbours around 1
            (0x3F800001 + (one << 12)).view(torch.float32),
            torch.tensor([0.0, -0.0, 1e-8, -6e-8, 65504, 65519.9, 65520, 1e6, -3.4e38, 3.3962e38]),
            torch.tensor([torch.inf, -torch.inf, torch.nan, 5.9e-8, 2.0**-25, 2.0**-24, 1e-40]),
        ]
    )
    k = torch.zeros(len(values) // 64 + 1, 1, 64)
    k.view(-1)[: len(values)] = values
    k_cache, v_cache = attn.new_cache(-(-len(k) // 16))
    attn.append_kv(k, k, k_cache, v_cache, np.arange(len(k)))
    found, _ = attn.read_kv(k_cache, v_cache, np.arange(len(k)))
    expected = k.to(attn.kv_dtype)
    assert same_bits(found.nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5))
    assert (found.isnan() == expected.isnan()).all()


def test_slot_minus_one_skips_the_token(generic: Attention, rng: np.random.Generator) -> None:
    """And above all leaves the last slot of the cache alone."""
    attn = generic(1, 64, 4, "float32")
    k_cache, v_cache = (cache.fill_(7) for cache in attn.new_cache(3))
    k = rows(attn, rng, 3)
    attn.append_kv(k, k, k_cache, v_cache, [-1, 5, -1])
    by_slot = k_cache.transpose(1, 2).reshape(12, 2, 64)
    assert (by_slot[5] == k[1]).all()
    assert (by_slot[[i for i in range(12) if i != 5]] == 7).all()


def views(base: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Give tensors equal to base, each with other strides or another alignment."""
    tokens, heads, dim = base.shape
    fused = torch.full((tokens, 3 * heads, dim), NAN, dtype=base.dtype)
    fused[:, heads : 2 * heads] = base
    yield "middle of a fused projection", fused[:, heads : 2 * heads]
    swapped = base.transpose(0, 1).contiguous()
    yield "heads outermost", swapped.transpose(0, 1)
    spread = torch.full((2 * tokens, heads, dim), NAN, dtype=base.dtype)
    spread[::2] = base
    yield "every second token", spread[::2]
    wide = torch.full((2, tokens, heads, dim + 3), NAN, dtype=base.dtype)
    wide[0, ..., :dim], wide[1, ..., 1:-2] = base, base
    yield "padded rows", wide[0, ..., :dim]
    yield "padded rows, unaligned", wide[1, ..., 1:-2]
    yield "last dimension not packed", base.transpose(1, 2).contiguous().transpose(1, 2)
    yield (
        "NumPy's alignment",
        torch.frombuffer(
            bytearray(b"x" * base.element_size())
            + base.contiguous().view(torch.uint8).numpy().tobytes(),
            dtype=base.dtype,
            offset=base.element_size(),
        ).view(base.shape),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sources_may_be_strided_or_unaligned(
    generic: Attention, rng: np.random.Generator, dtype: str
) -> None:
    attn = generic(1, 80, 4, dtype)
    k, v = rows(attn, rng, 6), rows(attn, rng, 6)
    slots = np.array([3, 4, -1, 0, 11, 7])
    expected = attn.new_cache(3)
    attn.append_kv(k, v, *expected, slots)
    for (name, k_view), (_, v_view) in zip(views(k), views(v), strict=True):
        found = attn.new_cache(3)
        attn.append_kv(k_view, v_view, *found, slots)
        assert same_bits(found[0], expected[0]), name
        assert same_bits(found[1], expected[1]), name


def test_one_token_may_be_broadcast(generic: Attention, rng: np.random.Generator) -> None:
    attn = generic(1, 64, 4, "float32")
    k, (k_cache, v_cache) = rows(attn, rng, 1), attn.new_cache(1)
    attn.append_kv(k.expand(4, -1, -1), k.expand(4, -1, -1), k_cache, v_cache, [0, 1, 2, 3])
    assert (k_cache == k.transpose(0, 1)).all()


def with_block_stride(cache: torch.Tensor, stride: int) -> torch.Tensor:
    memory = torch.full((len(cache) * stride,), NAN, dtype=cache.dtype)
    return memory.as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_may_have_any_block_stride(
    generic: Attention, rng: np.random.Generator, dtype: str, layout: str
) -> None:
    """Such as K and V as the two halves of each block of one tensor."""
    attn = generic(3, 64, 4, dtype, layout=layout)
    packed = [random_rows(rng, attn.cache_shape(4), attn.dtype).clone() for _ in range(2)]
    halves = torch.stack(packed, dim=1).unbind(1)
    assert halves[0].stride(0) == 2 * packed[0].stride(0)
    odd = [with_block_stride(cache, cache.stride(0) + 1) for cache in packed]
    k, v, slots = rows(attn, rng, 9), rows(attn, rng, 9), rng.permutation(16)[:9]
    q = random_rows(rng, (3, attn.num_qo_heads, 64), attn.dtype)
    plan = attn.plan([0, 1, 3], [5, 11], [[2, 0, -1], [3, 1, 0]])
    found = []
    for caches in (packed, halves, odd):
        attn.append_kv(k, v, *caches, slots)
        attn.copy_blocks(*caches, [(3, 2), (1, 0)])
        found.append([*caches, *attn.read_kv(*caches, slots), attn.run(plan, q, *caches)])
    for one, *others in zip(*found, strict=True):
        assert all(same_bits(one, other) for other in others)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block_size", [1, 7, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_move_the_bytes_of_whole_blocks_in_all_layers(
    generic: Attention, rng: np.random.Generator, dtype: str, block_size: int, layout: str
) -> None:
    attn = generic(1, 72, block_size, dtype, layout=layout)
    k_caches, v_caches = attn.new_cache(6, num_layers=3)
    for cache in (*k_caches, *v_caches):
        raw = rng.integers(0, 256, cache.numel() * cache.element_size(), np.uint8)
        cache.copy_(torch.from_numpy(raw).view(cache.dtype).view(cache.shape))  # NaN included
    before = [cache.clone() for cache in (*k_caches, *v_caches)]
    attn.copy_blocks(k_caches, v_caches, [(0, 3), (0, 5), (4, 1)])
    for cache, old in zip((*k_caches, *v_caches), before, strict=True):
        expected = old[[0, 4, 2, 0, 4, 0]]
        assert same_bits(cache, expected)


def test_caches_may_be_numpy_arrays(generic: Attention, rng: np.random.Generator) -> None:
    attn = generic(1, 64, 4, "float32")
    caches = attn.new_cache(3)
    arrays = [cache.numpy() for cache in caches]
    k = rows(attn, rng, 4)
    attn.append_kv(k, k, *arrays, [0, 1, 2, 3])
    attn.copy_blocks(*arrays, [(0, 2)])
    for cache in caches:
        assert (cache[2] == cache[0]).all()
        assert same_bits(cache[2].transpose(0, 1), k)


@pytest.mark.parametrize(
    "copies", [[], (), np.zeros((0, 2), np.int32), torch.zeros(0, 2, dtype=torch.int64)], ids=repr
)
def test_no_copies_are_legal(generic: Attention, copies: object) -> None:
    attn = generic(1, 64, 4, "float32")
    attn.copy_blocks(*attn.new_cache(2), copies)


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([(0, 1), (2, 1)], "destination 1 more than once"),
        ([(0, 1), (1, 2)], "block 1 as a source and as a destination"),
        ([(0, 0)], "block 0 as a source and as a destination"),
        ([(0, 3)], r"block 3; k_cache has 0\.\.2"),
        ([(-1, 0)], "block -1"),
        ([(0, 1, 2)], "block_copies has shape"),
    ],
)
def test_copies_whose_result_would_depend_on_their_order_are_refused(
    generic: Attention, copies: object, message: str
) -> None:
    attn = generic(1, 64, 4, "float32")
    k_cache, v_cache = attn.new_cache(3)
    k_cache.copy_(torch.arange(k_cache.numel()).view(k_cache.shape))
    before = k_cache.clone()
    with pytest.raises(ValueError, match=message):
        attn.copy_blocks(k_cache, v_cache, copies)
    assert (k_cache == before).all()


def test_a_slot_is_written_once_or_refused(generic: Attention, rng: np.random.Generator) -> None:
    attn = generic(1, 64, 4, "float32")
    k, caches = rows(attn, rng, 3), attn.new_cache(2)
    with pytest.raises(ValueError, match="slot_mapping gives slot 5 to more than one"):
        attn.append_kv(k, k, *caches, [5, 0, 5])
    assert not caches[0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reading_gives_what_was_written(
    generic: Attention, rng: np.random.Generator, layout: str
) -> None:
    attn = generic(1, 64, 4, "bfloat16", layout=layout)
    k, v, caches, slots = (
        rows(attn, rng, 5),
        rows(attn, rng, 5),
        attn.new_cache(3),
        [3, 9, 0, 11, 4],
    )
    attn.write_kv(k, v, *caches, slots)
    found_k, found_v = attn.read_kv(*caches, [*slots[::-1], 3])  # any order, and twice
    assert (found_k == k[[4, 3, 2, 1, 0, 0]]).all()
    assert (found_v == v[[4, 3, 2, 1, 0, 0]]).all()


def states(
    rng: np.random.Generator, dtype: torch.dtype, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return random_rows(rng, (5, 6, head_dim), dtype), random_rows(rng, (5, 6), torch.float32) * 9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 512])
def test_merging_two_states_equals_the_reference(
    base_bundle: object,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    dtype: str,
    head_dim: int,
) -> None:
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(base_bundle))
    a, b = (states(rng, getattr(torch, dtype), head_dim) for _ in range(2))
    a[1][0], b[1][1], a[1][2], b[1][2] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    a[1][3], b[1][3] = -60_000.0, -60_001.0
    expected = reference.merge_states(*a, *b)
    a[0][0], b[0][1], a[0][2] = NAN, NAN, NAN  # parts that saw nothing, whatever their values
    out, lse = merge_states(*a, *b)
    assert out.dtype == a[0].dtype
    assert_close(out, lse, *expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_merging_takes_views_and_numpy_arrays(
    base_bundle: object, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, dtype: str
) -> None:
    monkeypatch.setenv("TVMPAGED_BUNDLE", str(base_bundle))
    a, b = (states(rng, getattr(torch, dtype), 64) for _ in range(2))
    expected, expected_lse = merge_states(*a, *b)
    for name, view in views(a[0]):
        out, lse = merge_states(view, a[1].t().contiguous().t(), *b)
        assert same_bits(out, expected), name
        assert same_bits(lse, expected_lse), name
    out, lse = merge_states(*(each.numpy() for each in (*a, *b)))
    assert isinstance(out, np.ndarray)
    assert out.tobytes() == expected.numpy().tobytes()
    assert lse.tobytes() == expected_lse.numpy().tobytes()
    none = [each[:0] for each in (*a, *b)]
    assert merge_states(*none)[0].shape == (0, 6, 64)
