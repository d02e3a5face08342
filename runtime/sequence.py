"""A request and its sequences: what is known of them between two steps.

The tokens of one sequence, and who has seen how many of them::

    token_ids        p p p p p p p p o o o        prompt, then output
    num_prompt       [              )
    num_in_blocks    [                    )       the block manager has room for these
    num_computed     [                    )       their K/V are in the cache
    uncomputed                            [)      what the next steps run
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from tvmpaged.runtime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tvmpaged.runtime.params import BeamSearchParams, SamplingParams
from tvmpaged.runtime.sampling import SamplingRow

if TYPE_CHECKING:
    from tvmpaged.runtime.beam import BeamGroup
    from tvmpaged.runtime.detokenize import Detokenizer


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()  # has no blocks
    RUNNING = auto()  # has blocks
    FINISHED = auto()  # has no blocks and needs none


@dataclass(eq=False)
class Request:
    """One prompt and what was asked of it.

    Parameters
    ----------
    request_id : str
        Its name.
    arrival : int
        Its place in the order of arrival; the newest is preempted first.
    prompt : str or None
        The text, if it was given as text.
    prompt_token_ids : list of int
        At least one token.
    params : SamplingParams or BeamSearchParams
        What was asked.
    seed : int
        Of the draws.
    eos_token_ids : tuple of int
        The model's.
    max_tokens : int
        Most tokens of output, the engine's limit included.
    root : Request or None
        The request this one was forked from, which counts the sample indices.
    """

    request_id: str
    arrival: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    seed: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int
    root: Request | None = None
    sequences: list[Sequence] = field(default_factory=list)
    beams: BeamGroup | None = None
    num_samples: int = 0
    num_cached_tokens: int = 0
    arrival_time: float = field(default_factory=time.perf_counter)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        """True when nothing will be added."""
        if self.beams is not None:
            return self.beams.done
        return all(seq.status is Status.FINISHED for seq in self.sequences)

    def next_sample_index(self) -> int:
        """Hand out a sample index that neither this request nor a fork of it has used."""
        root = self if self.root is None else self.root
        root.num_samples += 1
        return root.num_samples - 1

    def note_token(self) -> None:
        """Record the time of a token."""
        now = time.perf_counter() - self.arrival_time
        if self.metrics.time_to_first_token_s is None:
            self.metrics.time_to_first_token_s = now
        if self.finished:
            self.metrics.duration_s = now

    def output(self) -> RequestOutput:
        """Return the request as it stands."""
        if self.beams is not None:
            outputs = self.beams.outputs()
        else:
            outputs = [seq.output(index) for index, seq in enumerate(self.sequences)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


@dataclass(eq=False)
class Sequence:
    """One line of tokens: a sample of a request, or a beam.

    Parameters
    ----------
    seq_id : int
        Its name in the block manager.
    request : Request
        Whose it is.
    sample_index : int
        What its draws depend on.
    token_ids : list of int
        Prompt and output.
    detokenizer : Detokenizer
        Its text.
    num_pending_forks : int
        Siblings that start from it once the prompt is computed.
    """

    seq_id: int
    request: Request
    sample_index: int
    token_ids: list[int]
    detokenizer: Detokenizer
    num_pending_forks: int = 0
    status: Status = Status.WAITING
    num_in_blocks: int = 0
    num_computed: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def order(self) -> tuple[int, int]:
        """What sequences are sorted by: oldest request first, then the sample index."""
        return (self.request.arrival, self.sample_index)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose K/V are not in the cache."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_slots(self) -> int:
        """Places it takes under the engine's max_num_seqs."""
        return 1 + self.num_pending_forks

    def fork(self, seq_id: int, request: Request, sample_index: int) -> Sequence:
        """Return a sequence that goes on from here (its blocks are the caller's business)."""
        return Sequence(
            seq_id=seq_id,
            request=request,
            sample_index=sample_index,
            token_ids=self.token_ids.copy(),
            detokenizer=self.detokenizer.fork(),
            num_pending_forks=self.num_pending_forks,
            status=self.status,
            num_in_blocks=self.num_in_blocks,
            num_computed=self.num_computed,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def sampling_row(self) -> SamplingRow:
        """Return what its next draw depends on."""
        params = self.request.params
        assert isinstance(params, SamplingParams)
        return SamplingRow(
            params=params,
            seed=self.request.seed,
            sample_index=self.sample_index,
            prompt_token_ids=self.request.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            eos_token_ids=(*self.request.eos_token_ids, *(params.stop_token_ids or ())),
        )

    def add(self, token_id: int, logprobs: dict[int, Logprob] | None) -> None:
        """Take a drawn token and decide whether it ends the sequence."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
        params = self.request.params
        assert isinstance(params, SamplingParams)
        num_output = len(self.token_ids) - len(self.request.prompt_token_ids)
        may_stop = num_output >= params.min_tokens
        is_eos = not params.ignore_eos and token_id in self.request.eos_token_ids
        is_stop = token_id in (params.stop_token_ids or ())
        if may_stop and (is_eos or is_stop):
            self.finish_reason = "stop"
            self.stop_reason = None if is_eos else token_id
            if params.detokenize and params.include_stop_str_in_output:
                self.detokenizer.add(token_id, check_stop=False)
        elif params.detokenize:
            stop = self.detokenizer.add(token_id, check_stop=may_stop)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.finish_reason is None and num_output >= self.request.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and not isinstance(self.stop_reason, str):
            self.detokenizer.flush()

    def output(self, index: int) -> CompletionOutput:
        """Return the sample as it stands."""
        params = self.request.params
        asked = isinstance(params, SamplingParams) and params.logprobs is not None
        detokenizer = self.detokenizer
        running = self.finish_reason is None
        return CompletionOutput(
            index=index,
            text=detokenizer.streamed_text() if running else detokenizer.text,
            token_ids=self.output_token_ids,
            cumulative_logprob=self.cumulative_logprob if asked else None,
            logprobs=self.logprobs.copy() if asked else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
