"""What a request gives back. Field names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logprob:
    """One token of one output position.

    Parameters
    ----------
    logprob : float
        Natural log of its probability under the model's own logits (before temperature, penalties
        and filters).
    rank : int
        1 for the most likely token.
    decoded_token : str or None
        Its text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample of a request, or one beam.

    Parameters
    ----------
    index : int
        Which of the request's samples, or the beam's rank.
    text : str
        The text so far. While a request runs, text that may become part of a stop string is held
        back, so that each text starts with the ones before it.
    token_ids : list of int
        The tokens so far, an end-of-sequence or stop token included.
    cumulative_logprob : float or None
        Sum of the tokens' logprobs; None unless logprobs were asked for.
    logprobs : list of dict or None
        For each position token id -> `Logprob`: the drawn token and the most likely ones.
    finish_reason : str or None
        ``"stop"``, ``"length"`` or ``"abort"``; None while it runs.
    stop_reason : int, str or None
        The stop token id or stop string; None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Tell whether nothing will be added."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request, in seconds.

    Parameters
    ----------
    time_to_first_token_s : float or None
        From `add_request` to the first token.
    duration_s : float or None
        From `add_request` to the last token; None while the request runs.
    num_preemptions : int
        How often one of its sequences lost its blocks and was computed again.
    """

    time_to_first_token_s: float | None = None
    duration_s: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """A request as it stands: its prompt and all of its outputs.

    Parameters
    ----------
    request_id : str
        Its name.
    prompt : str or None
        The text it was given as; None for token ids.
    prompt_token_ids : list of int
        The prompt's tokens.
    outputs : list of CompletionOutput
        By sample index, or best beam first.
    finished : bool
        True when all outputs are finished.
    num_cached_tokens : int
        Prompt tokens that were found in the prefix cache.
    metrics : RequestMetrics
        Its times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
