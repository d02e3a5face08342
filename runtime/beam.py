"""Beam search over sequences that share blocks.

A step runs every beam of a prompt. Beams whose logits are known wait until the last of them has
some (a small token limit or a preemption may hold one back); then the group chooses as one. A beam
with several successors is forked, so what they share is stored once; one without gives its blocks
back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tvmpaged.runtime.outputs import CompletionOutput
from tvmpaged.runtime.params import BeamSearchParams
from tvmpaged.runtime.sequence import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvmpaged.runtime.scheduler import Scheduler
    from tvmpaged.runtime.sequence import Request, Sequence


class Candidate(NamedTuple):
    """One way to go on: a beam, its next token, and the logprob of the whole."""

    cumulative_logprob: float
    parent: Sequence
    token_id: int


@dataclass
class Hypothesis:
    """A finished beam."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


class BeamGroup:
    """The beams of one prompt.

    Parameters
    ----------
    request : Request
        Whose params are `BeamSearchParams`.
    root : Sequence
        The prompt.
    text_of : callable
        Output token ids -> text.
    """

    def __init__(
        self, request: Request, root: Sequence, text_of: Callable[[list[int]], str]
    ) -> None:
        assert isinstance(request.params, BeamSearchParams)
        self.params = request.params
        self.request = request
        self.done = False
        self._text_of = text_of
        self._eos = () if self.params.ignore_eos else request.eos_token_ids
        self._beams = [root]
        self._finished: list[Hypothesis] = []
        self._offers: dict[Sequence, list[Candidate]] = {}

    def offer(self, seq: Sequence, logits: torch.Tensor) -> None:
        """Take the logits ``[vocab_size]`` that follow a beam's last token."""
        logprobs = torch.log_softmax(logits.double() / (self.params.temperature or 1.0), dim=-1)
        # Enough that the group has beam_width unfinished ones even if every beam could end.
        count = max(2, 1 + len(self._eos)) * self.params.beam_width
        values, token_ids = logprobs.topk(min(count, len(logprobs)))
        self._offers[seq] = [
            Candidate(seq.cumulative_logprob + value, seq, token_id)
            for value, token_id in zip(values.tolist(), token_ids.tolist(), strict=True)
        ]

    @property
    def ready(self) -> bool:
        """True when all beams have logits."""
        return not self.done and all(seq in self._offers for seq in self._beams)

    def advance(self, scheduler: Scheduler, new_seq_id: Callable[[], int]) -> None:
        """Choose the next beams, fork and drop sequences accordingly."""
        width = self.params.beam_width
        offers = [candidate for seq in self._beams for candidate in self._offers[seq]]
        offers.sort(key=lambda candidate: -candidate.cumulative_logprob)
        num_output = len(self._beams[0].output_token_ids) + 1
        at_limit = num_output >= self.request.max_tokens
        for candidate in offers[:width]:
            if candidate.token_id in self._eos or at_limit:
                self._set_aside(candidate)
        alive = [one for one in offers if one.token_id not in self._eos][:width]
        parents, self._offers = self._beams, {}
        self.done = at_limit or not alive or not self._can_improve(alive[0], num_output)
        successors = [] if self.done else alive
        going_on = {candidate.parent for candidate in successors}
        # First, so that their places and blocks are free for the forks.
        scheduler.finish(seq for seq in parents if seq not in going_on)
        self._beams = self._continue(successors, scheduler, new_seq_id)
        self.request.sequences = self._beams

    def _continue(
        self, successors: list[Candidate], scheduler: Scheduler, new_seq_id: Callable[[], int]
    ) -> list[Sequence]:
        """Give each candidate a sequence; the first of each parent takes the parent over."""
        beams: list[Sequence] = []
        for candidate in successors:
            parent = candidate.parent
            if parent not in beams:
                beams.append(parent)
                parent.num_pending_forks = 0
                if parent.status is Status.WAITING:
                    scheduler.add(parent)
                continue
            child = parent.fork(new_seq_id(), self.request, self.request.next_sample_index())
            scheduler.fork(parent, child)
            beams.append(child)
        for candidate, seq in zip(successors, beams, strict=True):
            seq.token_ids.append(candidate.token_id)
            seq.cumulative_logprob = candidate.cumulative_logprob
        return beams

    def _set_aside(self, candidate: Candidate) -> None:
        token_ids = [*candidate.parent.output_token_ids, candidate.token_id]
        total = candidate.cumulative_logprob
        score = total / len(token_ids) ** self.params.length_penalty
        reason = "stop" if candidate.token_id in self._eos else "length"
        self._finished.append(Hypothesis(token_ids, total, score, reason))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.params.beam_width :]

    def _can_improve(self, best: Candidate, num_output: int) -> bool:
        if len(self._finished) < self.params.beam_width:
            return True
        possible: float = best.cumulative_logprob / num_output**self.params.length_penalty
        return possible > self._finished[-1].score

    def outputs(self) -> list[CompletionOutput]:
        """Return the finished beams, best first; while it runs, the unfinished ones after them."""
        finished = [
            CompletionOutput(
                index=index,
                text=self._text(one),
                token_ids=one.token_ids,
                cumulative_logprob=one.cumulative_logprob,
                finish_reason=one.finish_reason,
            )
            for index, one in enumerate(self._finished)
        ]
        running = [
            CompletionOutput(
                index=index,
                text=self._text_of(seq.output_token_ids),
                token_ids=seq.output_token_ids,
                cumulative_logprob=seq.cumulative_logprob,
            )
            for index, seq in enumerate(self._beams, start=len(finished))
        ]
        return finished + running

    def _text(self, hypothesis: Hypothesis) -> str:
        ended = hypothesis.finish_reason == "stop"
        if ended and not self.params.include_stop_str_in_output:
            return self._text_of(hypothesis.token_ids[:-1])
        return self._text_of(hypothesis.token_ids)
