"""Beam search: beams are those of transformers, token for token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_tools import (
    EOS,
    generate_with,
    random_prompts,
    run_to_end,
    tiny_engine,
    tiny_reference,
    tokens_of,
)

from tvmpaged import BeamSearchParams, SamplingParams

pytestmark = pytest.mark.runtime

PROMPTS = random_prompts((1, 4, 17, 40), seed=2)
MAX_TOKENS = 12


def brute_force(prompt: list[int], width: int, max_tokens: int) -> list[tuple[list[int], float]]:
    """Return the beams of a search that treats the end of a sequence as any other token."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(max_tokens):
        with torch.inference_mode():
            rows = torch.tensor([[*prompt, *tokens] for tokens, _ in beams])
            logits = tiny_reference()(rows, use_cache=False).logits[:, -1].double()
        scores = torch.log_softmax(logits, -1)
        grown = [
            ([*tokens, token], total + float(row[token]))
            for (tokens, total), row in zip(beams, scores, strict=True)
            for token in row.topk(width).indices.tolist()
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return beams


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 16, "max_num_seqs": 5}, {"max_num_batched_tokens": 3}], ids=str
)
def test_beams_equal_brute_force(options: dict[str, Any]) -> None:
    engine = tiny_engine(**options)
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)
    for result, prompt in zip(engine.beam_search(PROMPTS, params), PROMPTS, strict=True):
        expected = brute_force(prompt, 4, MAX_TOKENS)
        assert [output.token_ids for output in result.outputs] == [beam[0] for beam in expected]
        assert [output.cumulative_logprob for output in result.outputs] == pytest.approx(
            [beam[1] for beam in expected], abs=1e-3
        )
        assert {output.finish_reason for output in result.outputs} == {"length"}
    if "num_blocks" in options:
        assert engine.stats().num_preemptions > 0
    engine.block_manager.check_integrity()
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks


@pytest.mark.parametrize(
    ("width", "length_penalty"), [(1, 1.0), (2, 1.0), (4, 0.0), (4, 1.0), (5, 2.0), (3, -1.0)]
)
def test_beams_that_end_equal_transformers(width: int, length_penalty: float) -> None:
    # A likelier end, so that beams end at different lengths.
    head = tiny_reference().lm_head.weight
    engine = tiny_engine()
    params = BeamSearchParams(
        beam_width=width, max_tokens=MAX_TOKENS, length_penalty=length_penalty
    )
    ours = engine.model.model.lm_head.weight
    kept = head[EOS].clone()
    with torch.no_grad():
        for weight in (head, ours):
            weight[EOS] *= 2.5
    try:
        results = engine.beam_search(PROMPTS, params)
        expected = [
            generate_with(
                tiny_reference(),
                prompt,
                MAX_TOKENS,
                num_beams=width,
                num_return_sequences=width,
                length_penalty=length_penalty,
            )
            for prompt in PROMPTS
        ]
    finally:
        with torch.no_grad():
            for weight in (head, ours):
                weight[EOS] = kept
    assert tokens_of(results) == expected
    reasons = {output.finish_reason for result in results for output in result.outputs}
    assert reasons == {"stop", "length"} or width == 1


def test_beams_and_samples_share_a_batch() -> None:
    engine = tiny_engine()
    beams = BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS)
    alone = tokens_of(engine.beam_search([PROMPTS[2]], beams))
    names = [
        engine.add_request(None, PROMPTS[1], SamplingParams(n=2, seed=1, max_tokens=20)),
        engine.add_request(None, PROMPTS[2], beams),
    ]
    last = run_to_end(engine)
    assert tokens_of([last[names[1]]]) == alone
    assert len(last[names[0]].outputs) == 2
    assert engine.stats().num_blocks_shared_peak > 0


def test_beams_while_they_run_and_their_text() -> None:
    engine = tiny_engine()
    engine.add_request("b", PROMPTS[2], BeamSearchParams(beam_width=3, max_tokens=5))
    [first] = engine.step()
    assert not first.finished
    assert [len(output.token_ids) for output in first.outputs] == [1, 1, 1]
    last = run_to_end(engine)["b"]
    for rank, output in enumerate(last.outputs):
        assert output.index == rank
        assert output.text == engine.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    scores = [o.cumulative_logprob / len(o.token_ids) for o in last.outputs]
    assert scores == sorted(scores, reverse=True)


def test_aborted_beams_give_their_blocks_back() -> None:
    engine = tiny_engine()
    engine.add_request("b", PROMPTS[2], BeamSearchParams(beam_width=3, max_tokens=5))
    engine.step()
    engine.step()
    assert engine.abort_request("b")
    assert engine.block_manager.num_free_blocks == engine.block_manager.num_blocks
    assert not engine.has_unfinished_requests()


def test_a_beam_wider_than_the_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="beam_width=9 must be at most max_num_seqs=8"):
        tiny_engine(max_num_seqs=8).beam_search(
            PROMPTS, BeamSearchParams(beam_width=9, max_tokens=2)
        )
