"""The loop's body: schedule, compute, commit, draw. Knows requests, not prompts or text."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from tvmpaged.runtime.sampling import logprobs_of, sample
from tvmpaged.runtime.sequence import Status
from tvmpaged.runtime.stats import Counters, EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tvmpaged.runtime.runner import Runner
    from tvmpaged.runtime.scheduler import Scheduler
    from tvmpaged.runtime.sequence import Request, Sequence


class EngineCore:
    """Requests that are not finished, and what moves them on.

    Parameters
    ----------
    scheduler : Scheduler
        Chooses the rows of a step.
    runner : Runner
        Computes them.
    token_text : callable
        Token id -> text, for logprobs.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, token_text: Callable[[int], str | None]
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        self._manager = scheduler.block_manager
        self._token_text = token_text
        self._seq_ids = itertools.count()

    def new_seq_id(self) -> int:
        """Return a name for a sequence."""
        return next(self._seq_ids)

    def add(self, request: Request, root: Sequence) -> None:
        """Put a request in the line."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r} is that of an unfinished request")
        request.sequences.append(root)
        self.requests[request.request_id] = request
        self.counters.num_prompt_tokens += len(request.prompt_token_ids)
        self.scheduler.add(root)

    def fork(self, parent: Request, child: Request) -> None:
        """Start `child` from where each sequence of `parent` stands."""
        self.requests[child.request_id] = child
        for seq in parent.sequences:
            copy = seq.fork(self.new_seq_id(), child, child.next_sample_index())
            child.sequences.append(copy)
            if seq.status is not Status.FINISHED:
                self.scheduler.fork(seq, copy)

    def abort(self, request_id: str) -> bool:
        """Drop a request and give its blocks back; False when there is none of that name."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        self.scheduler.finish(request.sequences)
        self.counters.num_finished_requests += 1
        return True

    def stats(self) -> EngineStats:
        """Return everything counted so far."""
        return self.counters.stats(
            self._manager,
            self.scheduler,
            kv_cache_bytes=self.runner.cache_bytes,
        )

    def step(self) -> list[Request]:
        """Run one packed forward pass and return the requests that have new tokens."""
        began = time.perf_counter()
        rows = self.scheduler.schedule()
        if not rows:
            return []
        logits = self.runner.run(rows)
        ended = [row.seq for row in rows if row.reaches_end]
        for row in rows:
            row.seq.num_computed += row.num_new
            self._manager.commit(row.seq.seq_id, row.seq.num_computed)
        self.counters.note_blocks(self._manager)
        touched = self._take_logits(ended, logits)
        self.counters.note_step(began, sum(row.num_new for row in rows))
        return touched

    def _take_logits(self, ended: list[Sequence], logits: torch.Tensor) -> list[Request]:
        """Turn logits into tokens; ``logits[i]`` follows the last token of ``ended[i]``."""
        drawing: list[tuple[int, Sequence]] = []
        touched: dict[str, Request] = {}
        for index, seq in enumerate(ended):
            request = seq.request
            if request.beams is not None:
                request.beams.offer(seq, logits[index])
                if request.beams.ready:
                    request.beams.advance(self.scheduler, self.new_seq_id)
                    self.counters.num_generated_tokens += 1
                    touched[request.request_id] = request
            else:
                drawing += [(index, one) for one in (seq, *self._siblings(seq))]
                touched[request.request_id] = request
        self.counters.note_blocks(self._manager)  # forks have just shared some
        if drawing:
            indices = [index for index, _ in drawing]
            whole = indices == list(range(len(logits)))
            self._draw(logits if whole else logits[indices], [seq for _, seq in drawing])
        for request in touched.values():
            self._note(request)
        return list(touched.values())

    def _siblings(self, seq: Sequence) -> list[Sequence]:
        """Fork the request's other samples off a prompt that has just been computed."""
        siblings = []
        while seq.num_pending_forks:
            seq.num_pending_forks -= 1
            index = seq.request.next_sample_index()
            child = seq.fork(self.new_seq_id(), seq.request, index)
            child.num_pending_forks = 0
            self.scheduler.fork(seq, child)
            seq.request.sequences.append(child)
            siblings.append(child)
        return siblings

    def _draw(self, logits: torch.Tensor, sequences: list[Sequence]) -> None:
        rows = [seq.sampling_row() for seq in sequences]
        tokens = sample(logits, rows)
        wanted = [row.params.logprobs for row in rows]
        logprobs = logprobs_of(logits, tokens, wanted, self._token_text)
        for seq, token, entry in zip(sequences, tokens, logprobs, strict=True):
            seq.add(token, entry)
        self.counters.num_generated_tokens += len(tokens)
        self.scheduler.finish(seq for seq in sequences if seq.finish_reason is not None)

    def _note(self, request: Request) -> None:
        first = request.metrics.time_to_first_token_s is None
        request.note_token()
        if first and request.metrics.time_to_first_token_s is not None:
            self.counters.first_token_times_s.append(request.metrics.time_to_first_token_s)
        if request.finished:
            del self.requests[request.request_id]
            self.counters.num_finished_requests += 1
