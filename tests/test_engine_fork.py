"""Forks: they share blocks, diverge, and never touch each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_tools import EOS, GREEDY, greedy_tokens, random_prompts, run_to_end, tiny_engine

from tvmpaged import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from tvmpaged import Engine

pytestmark = pytest.mark.runtime

PROMPT = random_prompts((18,), seed=1)[0]
BEFORE, AFTER = 6, 20


def started(params: SamplingParams, **options: Any) -> Engine:
    """Return an engine whose request "parent" has computed some tokens."""
    engine = tiny_engine(**options)
    engine.add_request("parent", PROMPT, params)
    for _ in range(BEFORE):
        engine.step()
    return engine


def cached_bytes(engine: Engine, num_tokens: int) -> list[torch.Tensor]:
    """Return the K and V of the parent's first tokens in every layer."""
    [seq] = engine._core.requests["parent"].sequences
    blocks = torch.tensor(engine.block_manager.block_table(seq.seq_id))
    slots = (blocks[:, None] * engine.block_manager.block_size) + torch.arange(
        engine.block_manager.block_size
    )
    caches = zip(engine._core.runner.k_caches, engine._core.runner.v_caches, strict=True)
    return [
        rows.clone()
        for k_cache, v_cache in caches
        for rows in engine.attention.read_kv(k_cache, v_cache, slots.flatten()[:num_tokens])
    ]


def test_greedy_children_equal_a_solo_run() -> None:
    engine = started(SamplingParams(max_tokens=AFTER, **GREEDY))
    children = [engine.fork("parent") for _ in range(3)]
    last = run_to_end(engine)
    expected = greedy_tokens(tuple(PROMPT), AFTER)
    for name in ("parent", *children):
        assert last[name].outputs[0].token_ids == expected
    assert engine.stats().num_blocks_copied == 3  # 18 + 5 tokens: the last block is partly filled
    assert engine.stats().num_computed_tokens == 18 + AFTER - 1 + 3 * (AFTER - BEFORE)


def test_the_parents_cache_is_unchanged_and_sampled_children_diverge() -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=AFTER)
    engine = started(params)
    num_tokens = len(PROMPT) + BEFORE - 1
    before = cached_bytes(engine, num_tokens)
    children = [engine.fork("parent") for _ in range(2)]
    outputs: dict[str, list[int]] = {}
    for _ in range(4):
        for result in engine.step():
            outputs[result.request_id] = result.outputs[0].token_ids
    for left, right in zip(before, cached_bytes(engine, num_tokens), strict=True):
        assert torch.equal(left, right)
    outputs = {name: result.outputs[0].token_ids for name, result in run_to_end(engine).items()}
    solo = started(params)
    assert outputs["parent"] == run_to_end(solo)["parent"].outputs[0].token_ids
    assert len({tuple(outputs[name]) for name in ("parent", *children)}) == 3
    assert all(outputs[name][:BEFORE] == outputs["parent"][:BEFORE] for name in children)
    # The same forks again draw the same tokens, whatever else the engine does.
    again = started(params, num_blocks=20, max_num_batched_tokens=18)
    names = [again.fork("parent") for _ in range(2)]
    again.add_request(None, random_prompts((30,))[0], SamplingParams(max_tokens=AFTER))
    last = run_to_end(again)
    assert [last[name].outputs[0].token_ids for name in names] == [
        outputs[name] for name in children
    ]


def test_a_child_with_its_own_params() -> None:
    engine = started(SamplingParams(temperature=1.0, seed=4, max_tokens=AFTER))
    child = engine.fork("parent", SamplingParams(max_tokens=AFTER + 5, ignore_eos=True, **GREEDY))
    last = run_to_end(engine)
    output = last[child].outputs[0].token_ids
    assert len(output) == AFTER + 5
    inherited = last["parent"].outputs[0].token_ids[:BEFORE]
    expected = greedy_tokens((*PROMPT, *inherited), AFTER + 5 - BEFORE)
    assert output[: BEFORE + len(expected)] == inherited + expected
    text = engine.tokenizer.decode(output, skip_special_tokens=True)
    assert last[child].outputs[0].text == text


def test_all_samples_of_a_request_are_forked() -> None:
    engine = started(SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=AFTER))
    child = engine.fork("parent")
    last = run_to_end(engine)
    drawn = [tuple(o.token_ids) for name in ("parent", child) for o in last[name].outputs]
    assert len(set(drawn)) == 6


def test_a_fork_of_a_fork_keeps_the_samples_that_are_finished() -> None:
    engine = tiny_engine()
    bias = {EOS: 9.0}  # some samples end early
    params = SamplingParams(n=6, temperature=1.0, seed=1, max_tokens=AFTER, logit_bias=bias)
    engine.add_request("parent", PROMPT, params)
    for _ in range(BEFORE):
        [result] = engine.step()
    done = [output for output in result.outputs if output.finished()]
    assert 0 < len(done) < 6
    child = engine.fork("parent")
    grandchild = engine.fork(child)
    last = run_to_end(engine)
    for name in ("parent", child, grandchild):
        for before in done:
            assert last[name].outputs[before.index] == before
        assert all(output.finished() for output in last[name].outputs)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_parent_that_is_still_being_prefilled(steps: int) -> None:
    engine = tiny_engine(max_num_batched_tokens=7)
    engine.add_request("parent", PROMPT, SamplingParams(max_tokens=AFTER, n=2, **GREEDY))
    for _ in range(steps):
        engine.step()
    child = engine.fork("parent")
    last = run_to_end(engine)
    expected = greedy_tokens(tuple(PROMPT), AFTER)
    for name in ("parent", child):
        assert [output.token_ids for output in last[name].outputs] == [expected, expected]


def test_no_place_left_lets_the_child_wait() -> None:
    engine = started(SamplingParams(max_tokens=AFTER, **GREEDY), max_num_seqs=1)
    child = engine.fork("parent")
    assert engine.stats().num_waiting == 1
    assert run_to_end(engine)[child].outputs[0].token_ids == greedy_tokens(tuple(PROMPT), AFTER)


def test_what_cannot_be_forked_is_named() -> None:
    engine = started(SamplingParams(max_tokens=AFTER, **GREEDY))
    with pytest.raises(ValueError, match="request_id='nobody' is unknown or finished"):
        engine.fork("nobody")
    beams = engine.add_request(None, PROMPT, BeamSearchParams(beam_width=2, max_tokens=3))
    with pytest.raises(ValueError, match="is a beam search"):
        engine.fork(beams)
    with pytest.raises(TypeError, match="SamplingParams"):
        engine.fork("parent", BeamSearchParams(beam_width=2, max_tokens=3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens=6 must be more than the 6 tokens taken over"):
        engine.fork("parent", SamplingParams(max_tokens=BEFORE, **GREEDY))
    with pytest.raises(ValueError, match="n=2 must be the parent's, 1"):
        engine.fork("parent", SamplingParams(n=2, max_tokens=AFTER, **GREEDY))
    run_to_end(engine)
    with pytest.raises(ValueError, match="request_id='parent' is unknown or finished"):
        engine.fork("parent")


def test_copies_survive_an_interrupt_before_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's last block would else hold nothing, and its tokens be others."""
    engine = started(SamplingParams(max_tokens=AFTER, **GREEDY))
    child = engine.fork("parent")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.attention, "copy_blocks", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.block_manager.pending_copies()
    last = run_to_end(engine)
    expected = greedy_tokens(tuple(PROMPT), AFTER)
    for name in ("parent", child):
        assert last[name].outputs[0].token_ids == expected
    assert engine.stats().num_blocks_copied == 1
