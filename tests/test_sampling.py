"""Params are checked; draws follow the distribution and nothing but their four arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tvmpaged import BeamSearchParams, SamplingParams
from tvmpaged.runtime.sampling import SamplingRow, gumbel_noise, logprobs_of, sample

pytestmark = pytest.mark.runtime

VOCAB = 1000


def row(position: int = 0, **values: Any) -> SamplingRow:
    seed, sample_index = values.pop("seed", 0), values.pop("sample_index", 0)
    output = values.pop("output", range(position))
    prompt, eos = values.pop("prompt", [1]), values.pop("eos", ())
    return SamplingRow(
        SamplingParams(**{"max_tokens": None} | values), seed, sample_index, prompt, output, eos
    )


def draws(logits: torch.Tensor, count: int, **values: Any) -> np.ndarray:
    rows = [row(position, **values) for position in range(count)]
    return np.bincount(sample(logits.expand(count, -1), rows), minlength=len(logits))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SamplingParams, {"n": 0}, "n=0 must be at least 1"),
        (SamplingParams, {"temperature": -0.1}, "temperature=-0.1 must be at least 0"),
        (SamplingParams, {"temperature": math.nan}, "temperature=nan"),
        (SamplingParams, {"top_p": 0.0}, "top_p=0.0 must be above 0"),
        (SamplingParams, {"top_p": 1.1}, "top_p=1.1"),
        (SamplingParams, {"top_k": -2}, "top_k=-2 must be at least -1"),
        (SamplingParams, {"min_p": 2.0}, "min_p=2.0"),
        (SamplingParams, {"presence_penalty": 3.0}, "presence_penalty=3.0"),
        (SamplingParams, {"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        (SamplingParams, {"max_tokens": 0}, "max_tokens=0"),
        (SamplingParams, {"max_tokens": 2, "min_tokens": 3}, "min_tokens=3"),
        (SamplingParams, {"stop": [""]}, "stop="),
        (SamplingParams, {"stop": "x", "detokenize": False}, "detokenize"),
        (SamplingParams, {"seed": 2**64}, "seed="),
        (SamplingParams, {"logprobs": -1}, "logprobs=-1"),
        (SamplingParams, {"stop_token_ids": [-1]}, "stop_token_ids=-1"),
        (SamplingParams, {"logit_bias": {1: math.inf}}, "logit_bias=inf"),
        (BeamSearchParams, {"beam_width": 0, "max_tokens": 1}, "beam_width=0"),
        (BeamSearchParams, {"beam_width": 1, "max_tokens": 0}, "max_tokens=0"),
        (
            BeamSearchParams,
            {"beam_width": 1, "max_tokens": 1, "length_penalty": math.inf},
            "length_penalty=inf",
        ),
    ],
)
def test_params_out_of_range_are_named(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


@pytest.mark.parametrize(
    "values", [{"n": 1.5}, {"n": True}, {"temperature": "hot"}, {"top_q": 1}, {"max_tokens": "4"}]
)
def test_params_of_the_wrong_kind_are_type_errors(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        SamplingParams(**values)


def test_stop_takes_one_string_or_several() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_noise_is_what_it_was() -> None:
    # Pinned, because users keep seeds: other values would change everybody's samples.
    noise = gumbel_noise(7, 1, 2, torch.tensor([0, 1, 49151]))
    assert noise.tolist() == pytest.approx(
        [-0.7255860969672981, 1.0765090601028262, -0.08476847452074236], abs=1e-12
    )


def test_noise_depends_on_each_argument_and_on_nothing_else() -> None:
    ids = torch.arange(64)
    base = gumbel_noise(1, 2, 3, ids)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (-1, 2, 3)):
        assert not torch.isclose(gumbel_noise(*other, ids), base).any()
    assert torch.equal(gumbel_noise(1, 2, 3, ids[40:]), base[40:])
    assert torch.equal(gumbel_noise(1, 2, 3, ids.flip(0)), base.flip(0))


def test_noise_is_gumbel_and_finite() -> None:
    noise = gumbel_noise(5, 0, 0, torch.arange(200_000))
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    # Neighbouring ids, positions and seeds are as good as independent.
    for other in (gumbel_noise(5, 0, 1, torch.arange(200_000)), noise.roll(1)):
        assert abs(float(torch.corrcoef(torch.stack([noise, other]))[0, 1])) < 0.01


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [500, 20, 999]] = 1.0
    logits[1, [999]] = 1.0
    assert sample(logits, [row(temperature=0.0)] * 3) == [20, 999, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    expected = torch.softmax(logits / temperature, -1).numpy()
    found = draws(logits, 8000, temperature=temperature) / 8000
    assert np.abs(found - expected).max() < 0.02  # about four standard deviations


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_k": 2}, {0, 3}),
        ({"top_k": 3}, {0, 3, 1, 4}),  # 1 and 4 tie for the third place
        ({"top_p": 0.45}, {0, 3}),
        ({"top_p": 0.3}, {0}),
        ({"top_p": 0.8}, {0, 3, 1, 4}),
        ({"min_p": 0.5}, {0, 3}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 4, "top_p": 0.6}, {0, 3}),
        ({"top_k": 1, "top_p": 1.0, "min_p": 0.0}, {0}),
        ({"top_k": 0}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": -1}, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_filters_keep_the_right_tokens(values: dict[str, Any], kept: set[int]) -> None:
    probabilities = torch.tensor([0.35, 0.12, 0.06, 0.30, 0.12, 0.05])
    counts = draws(probabilities.log(), 2000, **values)
    assert set(np.flatnonzero(counts).tolist()) == kept
    expected = np.where([i in kept for i in range(6)], probabilities, 0)
    assert np.abs(counts / 2000 - expected / expected.sum()).max() < 0.045


def test_top_p_that_needs_most_of_the_vocabulary() -> None:
    logits = torch.linspace(0, 1, 3000)
    probabilities = torch.softmax(logits.double(), -1).flip(0)
    kept = 1 + int((probabilities.cumsum(0) < 0.9).sum())
    drawn = np.flatnonzero(draws(logits, 1000, top_p=0.9))
    assert kept > 512
    assert drawn.min() >= 3000 - kept


def test_last_bits_of_logits_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, VOCAB, generator=generator) * 3
    rows = [row(position, temperature=0.8, top_p=0.95) for position in range(200)]
    nudged = torch.nextafter(logits, torch.randn(200, VOCAB, generator=generator))
    assert sample(logits, rows) == sample(nudged, rows)


def test_a_row_is_drawn_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = [
        row(i, seed=i % 3, temperature=(0.0, 1.0, 0.7)[i % 3], top_k=17 * i % 600, top_p=p, min_p=m)
        for i, (p, m) in enumerate(((1.0, 0.0), (0.9, 0.0), (0.999, 0.0), (0.99, 0.1)) * 4)
    ]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(16)]
    assert sample(logits, rows) == alone
    assert sample(logits.flip(0), rows[::-1]) == alone[::-1]


def test_penalties_are_those_of_their_formulas() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0, -1.0, 0.9]])
    greedy = {"temperature": 0.0, "prompt": [2, 3], "output": [0, 0, 1]}
    cases: list[tuple[dict[str, float], int]] = [
        ({}, 0),
        ({"frequency_penalty": 0.04}, 2),  # 0.92, 0.96, 1, -1, 0.9
        ({"presence_penalty": 0.2}, 2),
        ({"repetition_penalty": 2.0}, 4),  # 0.5, 0.5, 0.5, -2, 0.9
        ({"repetition_penalty": 0.5}, 0),  # 2, 2, 2, -0.5, 0.9
        ({"frequency_penalty": 0.2, "repetition_penalty": 1.05}, 2),
    ]
    for values, expected in cases:
        before = logits.clone()
        assert sample(logits, [row(**greedy, **values)]) == [expected]
        assert torch.equal(logits, before), "the caller's logits changed"


def test_min_tokens_keeps_the_end_out_and_bias_shifts() -> None:
    logits = torch.tensor([[0.0, 5.0, 3.0, 1.0]])
    values: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "eos": (1, 2)}
    assert sample(logits, [row(1, **values)]) == [3]
    assert sample(logits, [row(2, **values)]) == [1]
    assert sample(logits, [row(temperature=0.0, logit_bias={0: 6.0, 1: -1.0})]) == [0]


def test_logprobs_report_the_drawn_token_and_the_best() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    first, second = logprobs_of(logits, [0, 2], [2, None], str)
    assert second is None
    assert first is not None
    assert list(first) == [0, 1, 2]
    expected = torch.log_softmax(logits[0].double(), -1)
    for token, entry in first.items():
        assert entry.logprob == pytest.approx(float(expected[token]))
        assert entry.decoded_token == str(token)
    assert [entry.rank for entry in first.values()] == [3, 1, 2]


def test_no_rows_is_legal() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []
