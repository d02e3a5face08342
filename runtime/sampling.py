"""From logits to tokens.

A draw is the argmax of ``logit / temperature + Gumbel noise``, where the noise is a function of
(seed, sample index, output position, token id) and of nothing else. So the same request gives the
same tokens alone, in a batch and after preemption, and a last-bit difference of a logit matters
only where two tokens tie to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tvmpaged.runtime.outputs import Logprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tvmpaged.runtime.params import SamplingParams

# splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1

#: So many of the most likely tokens are sorted first; top_p seldom needs more.
_SORTED_TOKENS = 512


@dataclass(frozen=True)
class SamplingRow:
    """Everything that the draw for one row of logits depends on.

    Parameters
    ----------
    params : SamplingParams
        The request's.
    seed : int
        ``params.seed``, or what the engine picked.
    sample_index : int
        Which of the request's samples.
    prompt_token_ids, output_token_ids : sequence of int
        The tokens so far; the output's length is the output position.
    eos_token_ids : tuple of int
        Tokens that would end the output; kept out until ``params.min_tokens``.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    eos_token_ids: tuple[int, ...] = ()


def _signed(value: int) -> int:
    """Read 64 bits as torch's int64 does."""
    return value - 2**64 if value >= 2**63 else value


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign (torch has no unsigned 64-bit shift)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def gumbel_noise(
    seed: int, sample_index: int, position: int, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise for tokens at one output position.

    Parameters
    ----------
    seed, sample_index, position : int
        What the noise depends on besides the token.
    token_ids : torch.Tensor
        ``[num_tokens]`` int64.

    Returns
    -------
    torch.Tensor
        ``[num_tokens]`` float64; finite, about -3.6 to 36.7.
    """
    key = 0
    for part in (seed, sample_index, position):
        key = _mix((key + part + _GAMMA) & _MASK)
    bits = token_ids * _signed(_GAMMA) + _signed(key)
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shift(bits, 31)
    # 52 bits and a half: never 0 and never 1, so both logarithms are finite.
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one token for each row.

    Parameters
    ----------
    logits : torch.Tensor
        ``[num_rows, vocab_size]`` float32; not changed.
    rows : sequence of SamplingRow
        One for each row of the logits.

    Returns
    -------
    list of int
        Token ids.
    """
    if not rows:
        return []
    logits = _adjusted(logits, rows)
    # Greedy rows in one call; the lowest token id wins a tie.
    tokens: list[int] = torch.argmax(logits, dim=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        params = [rows[index].params for index in drawn]
        temperatures = logits.new_tensor([one.temperature for one in params])
        scaled = logits[drawn] / temperatures[:, None]
        thresholds = _thresholds(scaled, params)
        for place, index in enumerate(drawn):
            threshold = None if thresholds is None else thresholds[place]
            tokens[index] = _draw(scaled[place], threshold, rows[index])
    return tokens


def _adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return the logits after bias, min_tokens and penalties; a copy if anything changed."""
    changed = False
    for index, row in enumerate(rows):
        params = row.params
        banned = row.eos_token_ids if len(row.output_token_ids) < params.min_tokens else ()
        if not (params.logit_bias or banned or params.has_penalties):
            continue
        if not changed:
            logits, changed = logits.clone(), True
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[index, ids] += logits.new_tensor(list(params.logit_bias.values()))
        if banned:
            logits[index, list(banned)] = -torch.inf
        if params.has_penalties:
            _penalise(logits[index], row)
    return logits


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    params = row.params
    output = torch.tensor(row.output_token_ids, dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1.0:
        prompt = torch.tensor(row.prompt_token_ids, dtype=torch.int64, device=logits.device)
        seen = torch.unique(torch.cat([prompt, output]))
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = torch.unique(output, return_counts=True)
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(scaled: torch.Tensor, threshold: torch.Tensor | None, row: SamplingRow) -> int:
    if threshold is None:
        token_ids = torch.arange(len(scaled), device=scaled.device)
    else:
        token_ids = (scaled >= threshold).nonzero()[:, 0]
        scaled = scaled[token_ids]
    noise = gumbel_noise(row.seed, row.sample_index, len(row.output_token_ids), token_ids)
    return int(token_ids[torch.argmax(scaled + noise)])


def _thresholds(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """Return the least logit that top_k, top_p and min_p keep for each row; None: they keep all.

    Thresholds, not counts, because they do not depend on how a sort orders ties.
    """
    num_rows, vocab_size = scaled.shape
    top_k = [one.top_k if 0 < one.top_k < vocab_size else vocab_size for one in params]
    top_p = [one.top_p for one in params]
    min_p = [one.min_p for one in params]
    bounds = scaled.new_full((num_rows,), -torch.inf)
    if any(min_p):
        # log(0) is minus infinity: it keeps all.
        bounds = scaled.amax(-1) + scaled.new_tensor(min_p).log()
    limited = [index for index in range(num_rows) if top_k[index] < vocab_size or top_p[index] < 1]
    if limited:
        bounds[limited] = torch.maximum(
            bounds[limited],
            _sorted_thresholds(
                scaled[limited], [top_k[i] for i in limited], [top_p[i] for i in limited]
            ),
        )
    return bounds if limited or any(min_p) else None


def _sorted_thresholds(
    scaled: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float], width: int = _SORTED_TOKENS
) -> torch.Tensor:
    """Return the smallest of each row's kept logits; a token stays while those before it are few.

    "Few" is fewer than top_k, and with less than top_p of the probability that top_k leaves.
    """
    vocab_size = scaled.shape[-1]
    limits = [k for k in top_k if k < vocab_size]
    width = min(vocab_size, max([width, *limits]))
    largest = scaled.topk(width).values
    sums = torch.cumsum(torch.exp(largest - largest[:, :1]), -1)
    whole = torch.exp(scaled - largest[:, :1]).sum(-1)
    k = torch.tensor(top_k, device=scaled.device)[:, None]
    total = torch.where(k < vocab_size, sums.gather(-1, k.clamp(max=width) - 1), whole[:, None])
    # Rounding must not cut what top_p=1 keeps.
    p = scaled.new_tensor([math.inf if one >= 1.0 else one for one in top_p])[:, None]
    place = torch.arange(1, width + 1, device=scaled.device)
    kept = 1 + ((sums < p * total) & (place < k)).sum(-1, keepdim=True)
    thresholds = largest.gather(-1, kept.clamp(max=width) - 1)[:, 0]
    beyond = (kept[:, 0] > width).nonzero()[:, 0].tolist()
    if beyond:
        thresholds[beyond] = _sorted_thresholds(
            scaled[beyond], [top_k[i] for i in beyond], [top_p[i] for i in beyond], vocab_size
        )
    return thresholds


def logprobs_of(
    logits: torch.Tensor,
    token_ids: Sequence[int],
    num_logprobs: Sequence[int | None],
    token_text: Callable[[int], str | None],
) -> list[dict[int, Logprob] | None]:
    """Report the drawn token and the most likely ones for each row that asks.

    Parameters
    ----------
    logits : torch.Tensor
        ``[num_rows, vocab_size]`` float32, as the model gave them.
    token_ids : sequence of int
        The drawn tokens.
    num_logprobs : sequence of int or None
        How many of the most likely tokens each row wants; None: nothing.
    token_text : callable
        Token id -> its text.

    Returns
    -------
    list of dict or None
        Token id -> `Logprob`, the drawn token first.
    """
    results: list[dict[int, Logprob] | None] = []
    for row, token_id, count in zip(logits, token_ids, num_logprobs, strict=True):
        if count is None:
            results.append(None)
            continue
        logprobs = torch.log_softmax(row.double(), dim=-1)
        drawn = logprobs[token_id]
        rank = 1 + int((logprobs > drawn).sum())
        entries = {token_id: Logprob(float(drawn), rank, token_text(token_id))}
        values, ids = logprobs.topk(min(count, len(row)))
        best = enumerate(zip(values.tolist(), ids.tolist(), strict=True), start=1)
        for rank, (value, best_id) in best:
            entries.setdefault(best_id, Logprob(value, rank, token_text(best_id)))
        results.append(entries)
    return results
