"""Caches whose layout is the bundle's choice: ``kv_layout="native"``."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import NAN, assert_close, random_rows
from kernel_bundles import NATIVE_CASES, bundle

from tvmpaged import Engine, PagedAttention, SamplingParams, reference
from tvmpaged.bundle import host_for
from tvmpaged.cpu import native_target
from tvmpaged.layout import PAIRS, fits_pairs, to_hnd
from tvmpaged.runtime import attention_kernels
from tvmpaged.runtime.kernel_set import Kernel
from tvmpaged.runtime.place import place_of
from tvmpaged.spec import AttentionSpec

pytestmark = pytest.mark.runtime

Attention = Callable[..., PagedAttention]
HAS_TILES = "amx_bf16" in host_for(native_target()).cpu_flags


def make(specialised: Attention, sizes: Any, **more: Any) -> PagedAttention:
    dtype, head_dim, group_size, block_size, layout = sizes
    return specialised(
        group_size, head_dim, block_size, dtype, layout=layout, bundle_name="native", **more
    )


@pytest.fixture(params=NATIVE_CASES, ids=lambda each: "-".join(map(str, each)))
def attn(request: pytest.FixtureRequest, specialised: Attention) -> PagedAttention:
    return make(specialised, request.param)


def rows(attn: PagedAttention, rng: np.random.Generator, count: int) -> torch.Tensor:
    return random_rows(rng, (count, attn.num_kv_heads, attn.head_dim), attn.dtype)


def hnd(attn: PagedAttention, caches: Any) -> list[torch.Tensor]:
    stored = attn.kv_layout, attn.block_size
    return [to_hnd(cache, which, *stored) for which, cache in zip("kv", caches, strict=True)]


def test_the_artifacts_say_how_the_cache_lies(attn: PagedAttention) -> None:
    spec = AttentionSpec.parse(attn.describe()["kernels"]["decode"]["spec"])
    assert spec.layout == "native"
    assert attn.kv_layout == (PAIRS if HAS_TILES and fits_pairs(spec) else "HND")
    assert attn.describe()["kv_layout"] == attn.kv_layout
    for name in ("decode", "prefill", "append_kv"):
        assert attn.describe()["kernels"][name]["choices"]["layout"] == attn.kv_layout
    shape = attn.cache_shape(5)
    assert np.prod(shape) == 5 * attn.num_kv_heads * attn.block_size * attn.head_dim
    assert attn.new_cache(5)[0].shape == shape


def test_append_writes_the_named_slots_and_no_others(
    attn: PagedAttention, rng: np.random.Generator
) -> None:
    """Next to NaN, which stays in the other half of a pair."""
    caches = [cache.fill_(NAN) for cache in attn.new_cache(5)]
    k, v = rows(attn, rng, 9), rows(attn, rng, 9)
    slots = rng.permutation(5 * attn.block_size)[:9]
    slots[4] = -1
    attn.append_kv(k, v, *caches, slots)
    written = slots >= 0
    for stored, given in zip(hnd(attn, caches), (k, v), strict=True):
        by_slot = stored.transpose(1, 2).reshape(-1, attn.num_kv_heads, attn.head_dim)
        assert torch.equal(by_slot[slots[written]], given[written])
        others = np.delete(np.arange(len(by_slot)), slots[written])
        assert by_slot[others].isnan().all()


def test_reading_gives_what_was_written(attn: PagedAttention, rng: np.random.Generator) -> None:
    k, v, caches = rows(attn, rng, 5), rows(attn, rng, 5), attn.new_cache(3)
    slots = rng.permutation(3 * attn.block_size)[:5]
    attn.write_kv(k, v, *caches, slots)
    found_k, found_v = attn.read_kv(*caches, [*slots[::-1], slots[3]])  # any order, and twice
    assert torch.equal(found_k, k[[4, 3, 2, 1, 0, 3]])
    assert torch.equal(found_v, v[[4, 3, 2, 1, 0, 3]])


def test_copies_move_what_blocks_hold(attn: PagedAttention, rng: np.random.Generator) -> None:
    caches = attn.new_cache(4)
    k, v = rows(attn, rng, attn.block_size), rows(attn, rng, attn.block_size)
    attn.append_kv(k, v, *caches, np.arange(attn.block_size))
    attn.copy_blocks(*caches, [(0, 2)])
    found = attn.read_kv(*caches, 2 * attn.block_size + np.arange(attn.block_size))
    assert torch.equal(found[0], k)
    assert torch.equal(found[1], v)
    assert not any(cache[[1, 3]].any() for cache in caches)


def test_what_was_appended_is_attended_to(attn: PagedAttention, rng: np.random.Generator) -> None:
    """Decode and a chunk, over scattered blocks of NaN with any stride between them."""
    q_lens, seq_lens = [1, 5, 1, 40], [attn.block_size + 3, 37, 600, 40]
    needed = [-(-length // attn.block_size) for length in seq_lens]
    ids = iter(rng.permutation(sum(needed)).tolist())
    table = np.full((4, max(needed)), -1, np.int32)
    for line, count in zip(table, needed, strict=True):
        line[:count] = [next(ids) for _ in range(count)]
    caches = [strided(cache.fill_(NAN)) for cache in attn.new_cache(sum(needed))]
    whole = attn.plan(np.concatenate([[0], np.cumsum(seq_lens)]), seq_lens, table)
    attn.append_kv(
        rows(attn, rng, sum(seq_lens)), rows(attn, rng, sum(seq_lens)), *caches, whole.slot_mapping
    )
    step = np.concatenate([[0], np.cumsum(q_lens)]), np.array(seq_lens), table
    q = random_rows(rng, (sum(q_lens), attn.num_qo_heads, attn.head_dim), attn.dtype)
    out, lse = attn.run(attn.plan(*step), q, *caches, return_lse=True)
    expected = reference.paged_attention(q, *hnd(attn, caches), *step, return_lse=True)
    assert_close(out, lse, *expected)


def strided(cache: torch.Tensor) -> torch.Tensor:
    stride = cache.stride(0) + 64
    memory = torch.full((len(cache) * stride,), NAN, dtype=cache.dtype)
    return memory.as_strided(cache.shape, (stride, *cache.stride()[1:])).copy_(cache)


@pytest.mark.parametrize("sm_scale", [-0.3, 0.0, 1e-30, 7.0])
def test_any_scale(specialised: Attention, rng: np.random.Generator, sm_scale: float) -> None:
    attn = make(specialised, NATIVE_CASES[0])
    caches, slots = attn.new_cache(3), np.arange(70)
    attn.append_kv(rows(attn, rng, 70), rows(attn, rng, 70), *caches, slots)
    step = np.array([0, 1, 6]), np.array([70, 6]), np.array([[0, 1, 2], [1, -1, -1]])
    q = random_rows(rng, (6, attn.num_qo_heads, attn.head_dim), attn.dtype)
    found = attn.run(attn.plan(*step), q, *caches, sm_scale, return_lse=True)
    expected = reference.paged_attention(
        q, *hnd(attn, caches), *step, sm_scale=sm_scale, return_lse=True
    )
    assert_close(*found, *expected, slack=1e-4)


@pytest.mark.skipif(not HAS_TILES, reason="native means HND on this CPU")
def test_a_cache_of_another_layout_is_refused(specialised: Attention) -> None:
    sizes = ("bfloat16", 128, 4, 32, "native")
    attn = make(specialised, sizes)
    other = PagedAttention(8, 2, 128, 32, bundle=bundle("base"))
    plan = attn.plan([0, 1], [1], [[0]])
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"k_cache has .*; expected \[num_blocks, 2, 128, 32\]"):
        attn.run(plan, q, *other.new_cache(1))
    with pytest.raises(ValueError, match=r"k_cache has .*; expected \[num_blocks, 2, 32, 128\]"):
        other.run(other.plan([0, 1], [1], [[0]]), q, *attn.new_cache(1))


def test_kernels_that_disagree_are_refused(
    specialised: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two bundles, one of which was built by other rules."""
    make(specialised, NATIVE_CASES[0])
    real = attention_kernels.load_kernel

    def load(spec: AttentionSpec, *arguments: Any) -> Kernel:
        kernel = real(spec, *arguments)
        if spec.kernel != "prefill":
            return kernel
        return replace(kernel, choices=kernel.choices | {"layout": "other"})

    monkeypatch.setattr(attention_kernels, "load_kernel", load)
    with pytest.raises(FileNotFoundError, match="do not agree") as caught:
        make(specialised, NATIVE_CASES[0])
    assert "prefill: other (" in str(caught.value)
    assert "tvmpaged package --target native --spec 'decode-" in str(caught.value)


def test_without_native_artifacts_it_is_hnd(base_bundle: Path) -> None:
    attn = PagedAttention(8, 2, 128, 32, kv_layout="native", bundle=base_bundle)
    assert attn.kv_layout == "HND"
    assert attn.describe()["kind"] == "generic"


@pytest.mark.parametrize(
    ("native", "hnd_ranks", "taken"),
    [
        ([(1, 0, 0), (1, 0, 0)], [(1, 0, 0), (1, 0, 0)], True),  # a tie
        ([(1, 0, 0), (1, 0, 0)], [(0, 0, 0), (1, 0, 0)], False),  # tuned goes before default
        ([(0, 0, 0), (1, 0, 0)], [(1, 0, 0), (0, 0, 0)], True),  # decode goes first
        ([(1, 2, -9), (1, 2, -9)], [(1, 0, 0), (1, 0, 0)], False),  # built for a poorer CPU
        ([(1, 0, 0), (1, 0, 0)], [None, (0, 0, 0)], True),
        ([(1, 0, 0), None], [(2, 0, 0), (2, 0, 0)], False),  # of no use without all
    ],
)
def test_which_family_goes_first(
    monkeypatch: pytest.MonkeyPatch,
    native: Any,
    hnd_ranks: Any,
    taken: bool,
) -> None:
    def rank_of(spec: AttentionSpec, *_: Any) -> Any:
        if spec.kernel == "append_kv":
            return (1, 0, 0)
        ranks = native if spec.layout == "native" else hnd_ranks
        return ranks[("decode", "prefill").index(spec.kernel)]

    monkeypatch.setattr(attention_kernels, "rank_of", rank_of)
    specs = attention_kernels.attention_specs(8, 2, 128, 32, "bfloat16", None, "native")
    assert attention_kernels._prefers_native(specs, None, False, place_of()) == taken


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engine_tools import SIZES, byte_tokenizer, save_model
    from transformers import LlamaConfig

    config = LlamaConfig(**SIZES | {"head_dim": 64, "initializer_range": 0.15})
    return save_model(tmp_path_factory.mktemp("model"), config, tokenizer=byte_tokenizer())


def test_the_engine_takes_native(model_folder: Path) -> None:
    """Greedy samples of shared blocks: each token the best of transformers' logits, or as good.

    bfloat16 logits have ties, so a token may differ from transformers' own; one whose logit is
    below the best by more than rounding may not.
    """
    from transformers import AutoModelForCausalLM

    engine = Engine.from_pretrained(
        model_folder, dtype="bfloat16", block_size=16, num_blocks=64, bundle=bundle("native")
    )
    assert engine.attention.kv_layout == (PAIRS if HAS_TILES else "HND")
    prompts = [list(range(5, 5 + count)) for count in (7, 37, 64)]
    params = SamplingParams(n=3, temperature=0.0, max_tokens=24, ignore_eos=True)
    results = engine.generate(prompts, params)
    assert engine.stats().num_blocks_copied > 0
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    for prompt, result in zip(prompts, results, strict=True):
        for completion in result.outputs:
            tokens = list(completion.token_ids)
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + tokens])).logits[0].float()
            logits = logits[len(prompt) - 1 : -1]
            chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
            assert ((logits.amax(1) - chosen) <= 0.05 * logits.std(1)).all()
