"""What a request asks for. Field names and defaults are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def _check_int(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be an int")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")


def _check_number(name: str, value: Any, allowed: str, inside: bool) -> None:
    if not math.isfinite(value) or not inside:
        raise ValueError(f"{name}={value!r} must be {allowed}")


def _numbers(params: Any, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(params, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r} must be a number")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    The order of operations on a row of logits: ``logit_bias``, ``min_tokens``, penalties,
    ``temperature``, then the smallest set that ``top_k``, ``top_p`` (within that of ``top_k``) and
    ``min_p`` leave; tokens that tie with the last one kept are kept too.

    Parameters
    ----------
    n : int
        Samples per prompt. The prompt is computed once and its blocks are shared.
    presence_penalty, frequency_penalty : float
        In [-2, 2]; subtracted from the logits of tokens already in the output, once, or once per
        occurrence.
    repetition_penalty : float
        Above 0; divides positive and multiplies negative logits of tokens in the prompt or output.
    temperature : float
        At least 0; 0 is greedy, and the lowest token id wins a tie.
    top_p : float
        In (0, 1].
    top_k : int
        0 or -1 keeps all.
    min_p : float
        In [0, 1]: the least probability, relative to that of the most likely token.
    seed : int, optional
        The draws are a function of (seed, sample index, output position, token id). None: the
        engine picks one.
    stop : str or list of str, optional
        Strings that end the output; the text ends before the first of them.
    stop_token_ids : list of int, optional
        Token ids that end the output, besides the model's end-of-sequence ids.
    ignore_eos : bool
        Go on after the model's end-of-sequence ids.
    max_tokens : int, optional
        Most tokens of output; None: up to the engine's ``max_model_len``.
    min_tokens : int
        Tokens of output before which nothing but ``max_tokens`` ends it.
    logprobs : int, optional
        Report that many of the most likely tokens for each output position, and the drawn one.
    detokenize : bool
        False: no text, and no stop strings.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    include_stop_str_in_output : bool
        Keep the stop string (or the stop token's text) in the text.
    logit_bias : dict of int to float, optional
        Added to the logits of these token ids.

    Raises
    ------
    ValueError, TypeError
        Naming the field, its value and what is allowed.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    #: `stop` as a tuple, whatever it was given as.
    stop_strings: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        object.__setattr__(self, "stop_strings", tuple(stop))
        self._check_sizes()
        self._check_distribution()
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop={self.stop!r} must hold strings that are not empty")
        if stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True")
        for token_id in self.stop_token_ids or ():
            _check_int("stop_token_ids", token_id, 0)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, 0)
            _check_number("logit_bias", bias, "a finite number", True)

    def _check_sizes(self) -> None:
        _check_int("n", self.n, 1)
        _check_int("top_k", self.top_k, -1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}"
                )
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63))
            if self.seed >= 2**63:
                raise ValueError(f"seed={self.seed} must fit in 64 bits")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0)

    def _check_distribution(self) -> None:
        penalties = ("presence_penalty", "frequency_penalty")
        _numbers(self, (*penalties, "repetition_penalty", "temperature", "top_p", "min_p"))
        for name in penalties:
            value = getattr(self, name)
            _check_number(name, value, "from -2 to 2", -2 <= value <= 2)
        value = self.repetition_penalty
        _check_number("repetition_penalty", value, "above 0", value > 0)
        _check_number("temperature", self.temperature, "at least 0", self.temperature >= 0)
        _check_number("top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1)
        _check_number("min_p", self.min_p, "from 0 to 1", 0 <= self.min_p <= 1)

    @property
    def has_penalties(self) -> bool:
        """True when the logits depend on the tokens so far."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search as transformers' ``generate(num_beams=...)`` does it.

    Each step keeps the ``beam_width`` most likely unfinished beams. A beam that ends among the
    ``beam_width`` best of its step is set aside, ranked by
    ``cumulative_logprob / num_output_tokens ** length_penalty``. The search ends when the best
    unfinished beam ranks below all of ``beam_width`` finished ones, or at ``max_tokens``.

    Parameters
    ----------
    beam_width : int
        Beams kept, and results per prompt.
    max_tokens : int
        Most tokens of output.
    ignore_eos : bool
        Treat the model's end-of-sequence ids as any other token.
    temperature : float
        Divides the logits; 0 means 1, as a search draws nothing.
    length_penalty : float
        Above 0 prefers longer outputs, below 0 shorter ones.
    include_stop_str_in_output : bool
        Keep the text of the end-of-sequence token.

    Raises
    ------
    ValueError, TypeError
        Naming the field, its value and what is allowed.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, 1)
        _check_int("max_tokens", self.max_tokens, 1)
        _numbers(self, ("temperature", "length_penalty"))
        _check_number("temperature", self.temperature, "at least 0", self.temperature >= 0)
        _check_number("length_penalty", self.length_penalty, "a finite number", True)
