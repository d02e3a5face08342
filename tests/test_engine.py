"""The engine on a tiny model with real kernels: its tokens are transformers' own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from engine_tools import (
    EOS,
    GREEDY,
    VOCAB_SIZE,
    greedy_tokens,
    random_prompts,
    run_to_end,
    tiny_engine,
    tiny_folder,
    tiny_model,
    tokens_of,
)
from kernel_bundles import bundle

from tvmpaged import Engine, SamplingParams

pytestmark = pytest.mark.runtime

# With block_size 4: one token, one less, exactly, one more than a block, and many blocks.
PROMPTS = random_prompts((1, 3, 4, 5, 16, 17, 60, 9))
MAX_TOKENS = 24


def expected(prompts: list[list[int]] = PROMPTS, max_tokens: int = MAX_TOKENS) -> list[Any]:
    return [[greedy_tokens(tuple(prompt), max_tokens)] for prompt in prompts]


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS} | GREEDY | values)


def test_the_tiny_model_is_a_fair_judge() -> None:
    outputs = [tokens for [tokens] in expected()]
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    assert max(len(set(tokens)) for tokens in outputs) > 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1},
        {"block_size": 16},
        {"block_size": 7},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"num_blocks": 21},
        {"num_blocks": 21, "enable_prefix_caching": False},
        {"num_blocks": 24, "max_num_batched_tokens": 6},
        {"block_size": 1, "num_blocks": 90},
    ],
    ids=str,
)
def test_greedy_tokens_equal_transformers(options: dict[str, Any]) -> None:
    engine = tiny_engine(**options)
    for _ in range(2):  # the second time with a filled prefix cache
        assert tokens_of(engine.generate(PROMPTS, greedy())) == expected()
        engine.block_manager.check_integrity()
        assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    if options.get("num_blocks") == 21:
        assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_hit_tokens == 0 or options.get("enable_prefix_caching", True)


def test_alone_equals_in_a_batch() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, n=2, max_tokens=MAX_TOKENS)
    alone = [tokens_of(engine.generate([prompt], params))[0] for prompt in PROMPTS]
    assert tokens_of(engine.generate(PROMPTS, params)) == alone
    assert tokens_of(tiny_engine(num_blocks=22).generate(PROMPTS, params)) == alone
    chunked = tiny_engine(max_num_batched_tokens=5, max_num_seqs=4)
    assert tokens_of(chunked.generate(PROMPTS, params)) == alone


def test_two_requests_under_memory_pressure() -> None:
    prompts = random_prompts((34, 34), seed=5)
    params = greedy(max_tokens=35, ignore_eos=True)
    free = tiny_engine(block_size=16, num_blocks=64).generate(prompts, params)
    tight = tiny_engine(block_size=16, num_blocks=7)
    assert tokens_of(tight.generate(prompts, params)) == tokens_of(free)
    assert tight.stats().num_preemptions >= 1


def test_a_whole_prompt_in_the_prefix_cache() -> None:
    prompt = random_prompts((32,), seed=6)[0]
    engine = tiny_engine(block_size=16)
    first = engine.generate([prompt], greedy())[0]
    again = engine.generate([prompt], greedy())[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 31)
    longer = engine.generate([[*prompt, *first.outputs[0].token_ids[:4], 9]], greedy())[0]
    assert longer.num_cached_tokens == 32
    assert tokens_of([first, again, longer]) == expected([prompt, prompt, longer.prompt_token_ids])


def test_one_model_call_and_one_launch_per_layer_each_step(monkeypatch: Any) -> None:
    engine = tiny_engine(max_num_batched_tokens=16)
    calls = {"model": 0, "run": 0, "append_kv": 0, "plan": 0}

    def count(owner: object, name: str, label: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[label] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(engine.model.model, "forward", "model")
    for name in ("run", "append_kv", "plan"):
        count(engine.attention, name, name)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, greedy(n=1 + number % 3, temperature=0.7, seed=1))
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        layers = engine.model.num_layers
        assert calls == {
            "model": steps,
            "plan": steps,
            "run": steps * layers,
            "append_kv": steps * layers,
        }
    assert engine.stats().num_steps == steps


def test_n_samples_come_from_one_prefill_and_share_its_blocks() -> None:
    engine = tiny_engine()
    prompt = PROMPTS[5]
    params = SamplingParams(n=4, temperature=1.0, seed=2, max_tokens=12)
    result = engine.generate([prompt], params)[0]
    stats = engine.stats()
    assert len({tuple(output.token_ids) for output in result.outputs}) == 4
    assert [output.index for output in result.outputs] == [0, 1, 2, 3]
    assert stats.num_computed_tokens == len(prompt) + 4 * 11
    assert stats.num_blocks_shared_peak == 5
    assert stats.num_blocks_copied == 3  # the last one writes in place
    solo = engine.generate([prompt], SamplingParams(temperature=1.0, seed=2, max_tokens=12))[0]
    assert solo.outputs[0].token_ids == result.outputs[0].token_ids
    wider = engine.generate([prompt], SamplingParams(n=6, temperature=1.0, seed=2, max_tokens=12))
    assert tokens_of(wider)[0][:4] == tokens_of([result])[0]


def test_seed_none_draws_anew_and_a_seed_repeats() -> None:
    engine = tiny_engine()
    fresh = SamplingParams(temperature=1.0, max_tokens=16)
    assert tokens_of(engine.generate([PROMPTS[4]] * 2, fresh))[0] != tokens_of(
        engine.generate([PROMPTS[4]], fresh)
    )
    fixed = SamplingParams(temperature=1.0, max_tokens=16, seed=11)
    first, second = tokens_of(engine.generate([PROMPTS[4]] * 2, fixed))
    assert first == second


def test_params_one_for_each_prompt() -> None:
    engine = tiny_engine()
    results = engine.generate(PROMPTS[:3], [greedy(max_tokens=length) for length in (1, 5, 9)])
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 5, 9]
    assert {result.outputs[0].finish_reason for result in results} == {"length"}


def test_penalties_and_logprobs_reach_the_draw() -> None:
    engine = tiny_engine()
    result = engine.generate(
        [PROMPTS[0]],
        greedy(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1e6, logprobs=3),
    )[0]
    output = result.outputs[0]
    assert len(set(output.token_ids)) == len(output.token_ids)
    assert output.logprobs is not None
    assert output.cumulative_logprob is not None
    total = 0.0
    for token, entries in zip(output.token_ids, output.logprobs, strict=True):
        assert 3 <= len(entries) <= 4
        assert token in entries
        total += entries[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)


def test_streaming_texts_grow_and_requests_join_late() -> None:
    engine = tiny_engine(max_num_batched_tokens=8)
    engine.add_request("a", PROMPTS[6], greedy())
    texts: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    tokens: dict[str, list[int]] = {}
    step = 0
    while engine.has_unfinished_requests():
        step += 1
        if step == 3:
            engine.add_request("b", PROMPTS[4], greedy())
        if step == 12:
            engine.add_request("c", PROMPTS[1], greedy())
        for result in engine.step():
            texts[result.request_id].append(result.outputs[0].text)
            tokens[result.request_id] = result.outputs[0].token_ids
    for seen in texts.values():
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(seen))
    assert [tokens[name] for name in "abc"] == [
        tokens for [tokens] in expected([PROMPTS[6], PROMPTS[4], PROMPTS[1]])
    ]
    assert engine.step() == []


def test_generate_keeps_the_outputs_of_requests_added_before() -> None:
    engine = tiny_engine()
    engine.add_request("mine", PROMPTS[3], greedy())
    results = engine.generate([PROMPTS[2]], greedy(max_tokens=200))
    assert len(results) == 1
    assert tokens_of([run_to_end(engine)["mine"]]) == expected([PROMPTS[3]])


def test_a_name_that_the_engine_picks_is_nobodys() -> None:
    """Neither that of a request which runs, nor of one whose output nobody has fetched yet."""
    engine = tiny_engine()
    for number in (1, 2, 4):
        engine.add_request(f"request-{number}", PROMPTS[3], greedy())
    engine.generate([PROMPTS[2]], greedy(max_tokens=200))  # the others end meanwhile
    assert not engine._core.requests
    picked = [engine.add_request(None, PROMPTS[1], greedy()) for _ in range(3)]
    last = {result.request_id: result for result in engine.step()}
    picked.append(engine.fork(picked[0]))
    last |= run_to_end(engine)
    assert last.keys() == {*picked, "request-1", "request-2", "request-4"}
    assert len(last) == 7
    assert tokens_of([last["request-4"]]) == expected([PROMPTS[3]])


def test_abort_gives_the_blocks_back() -> None:
    engine = tiny_engine(max_num_batched_tokens=8)
    names = [engine.add_request(None, prompt, greedy(n=2)) for prompt in PROMPTS]
    for _ in range(5):
        engine.step()
    assert engine.abort_request(names[0])
    assert engine.abort_request(names[6])
    assert not engine.abort_request(names[6])
    assert not engine.abort_request("nobody")
    engine.block_manager.check_integrity()
    left = run_to_end(engine)
    kept = [name for name in names if name not in (names[0], names[6])]
    assert [left[name].outputs[0].token_ids for name in kept] == [
        tokens for [tokens] in expected([PROMPTS[int(name.split("-")[1])] for name in kept])
    ]
    for name in names:
        engine.abort_request(name)
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch: Any) -> None:
    engine = tiny_engine()
    forward, count = engine.model.model.forward, iter(range(100))

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        if next(count) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model.model, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, greedy())
    assert not engine.has_unfinished_requests()
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    assert tokens_of(engine.generate(PROMPTS, greedy())) == expected()


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    engine = tiny_engine(block_size=16, num_blocks=7, max_model_len=400)
    with pytest.raises(ValueError, match="needs 8 blocks of 16 tokens; the cache has num_blocks=7"):
        engine.add_request("big", [1] * 100, greedy(max_tokens=14))
    with pytest.raises(ValueError, match="max_model_len=400"):
        engine.add_request("long", [1] * 400, greedy(max_tokens=1))
    assert not engine.has_unfinished_requests()
    # One token less fits, as the last token never enters the cache; None means as many as fit.
    params = greedy(max_tokens=13, ignore_eos=True)
    assert len(engine.generate([[1] * 100], params)[0].outputs[0].token_ids) == 13
    open_end = greedy(max_tokens=None, ignore_eos=True)
    assert len(engine.generate([[1] * 100], open_end)[0].outputs[0].token_ids) == 13


def test_output_ends_at_max_model_len() -> None:
    engine = tiny_engine(max_model_len=20)
    output = engine.generate([PROMPTS[5]], greedy(ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 257}, "block_size=257"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_model_len": 513}, "max_model_len=513"),
        ({"num_blocks": None, "kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes=10"),
    ],
    ids=str,
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_engine(**options)


def test_from_pretrained_takes_the_documented_arguments() -> None:
    engine = Engine.from_pretrained(
        tiny_folder(),
        block_size=16,
        num_blocks=None,
        kv_cache_memory_bytes=2**20,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=None,
        enable_prefix_caching=True,
        device="cpu",
        dtype=None,
        revision=None,
        compile=False,
        bundle=bundle("base"),
    )
    # 2 (K and V) x 3 layers x 2 heads x 16 tokens x 8 x 4 bytes a block
    assert engine.stats().num_blocks == 2**20 // 6144
    assert engine.stats().kv_cache_bytes == 170 * 6144
    assert engine.model.dtype == "float32"
    with pytest.raises(ValueError, match="compile=True is not available yet"):
        Engine.from_pretrained(tiny_folder(), compile=True)


def test_the_default_cache_is_what_the_sequences_could_use() -> None:
    engine = tiny_engine(num_blocks=None, max_num_seqs=2)
    assert engine.stats().num_blocks == 2 * 512 // 4


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], ValueError, "no tokens"),
        ("", ValueError, "no tokens"),
        ([VOCAB_SIZE], ValueError, f"token id {VOCAB_SIZE}; allowed: 0 to {VOCAB_SIZE - 1}"),
        ([-1], ValueError, "token id -1"),
        ([1.5], TypeError, "must be a string"),
        (7, TypeError, "must be a string"),
        (None, TypeError, "must be a string"),
    ],
)
def test_bad_prompts_are_named(prompt: Any, error: type[Exception], message: str) -> None:
    engine = tiny_engine()
    with pytest.raises(error, match=message):
        engine.add_request(None, prompt, greedy())
    assert not engine.has_unfinished_requests()


def test_bad_params_are_named() -> None:
    engine = tiny_engine(max_num_seqs=4)
    with pytest.raises(TypeError, match="SamplingParams"):
        engine.generate(PROMPTS, {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 entries for 8 prompts"):
        engine.generate(PROMPTS, [greedy()] * 2)
    with pytest.raises(ValueError, match="n=5 must be at most max_num_seqs=4"):
        engine.generate(PROMPTS, SamplingParams(n=5))
    with pytest.raises(ValueError, match="stop_token_ids holds token id 9999"):
        engine.generate(PROMPTS, greedy(stop_token_ids=[9999]))
    engine.add_request("twice", PROMPTS[0], greedy())
    with pytest.raises(ValueError, match="request_id='twice'"):
        engine.add_request("twice", PROMPTS[0], greedy())


def test_one_prompt_or_none_is_legal() -> None:
    engine = tiny_engine()
    assert tokens_of(engine.generate(PROMPTS[4], greedy())) == expected([PROMPTS[4]])
    assert tokens_of(engine.generate(torch.tensor(PROMPTS[4]), greedy())) == expected([PROMPTS[4]])  # type: ignore[arg-type]
    assert engine.generate([], greedy()) == []
    assert engine.step() == []


def test_stats_count() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    engine.generate(PROMPTS, greedy(ignore_eos=True))
    stats = engine.stats()
    assert stats.num_finished_requests == len(PROMPTS)
    assert stats.num_generated_tokens == len(PROMPTS) * MAX_TOKENS
    assert stats.num_prompt_tokens == sum(map(len, PROMPTS))
    assert stats.num_computed_tokens == stats.num_prompt_tokens + len(PROMPTS) * (MAX_TOKENS - 1)
    assert stats.tokens_per_s == pytest.approx(stats.num_generated_tokens / stats.step_time_s)
    assert 0 < stats.time_to_first_token_s < stats.step_time_s
    assert 0 < stats.num_blocks_used_peak <= stats.num_blocks
    assert stats.kv_cache_utilisation_peak == stats.num_blocks_used_peak / stats.num_blocks
    assert (stats.num_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)


def test_eos_of_the_model_ends_unless_told_otherwise() -> None:
    engine = tiny_engine()
    bias = {EOS: 1000.0}
    ended = engine.generate([PROMPTS[3]], greedy(logit_bias=bias))[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([EOS], "stop", None)
    later = engine.generate([PROMPTS[3]], greedy(logit_bias=bias, min_tokens=5))[0].outputs[0]
    assert later.token_ids[-1] == EOS
    assert len(later.token_ids) == 6
    ignored = engine.generate([PROMPTS[3]], greedy(logit_bias=bias, ignore_eos=True))[0].outputs[0]
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * MAX_TOKENS, "length")
    assert tiny_model().eos_token_ids == (EOS,)
