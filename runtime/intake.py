"""From what a user passes to a request that the core can run."""

from __future__ import annotations

import itertools
import secrets
from typing import TYPE_CHECKING

from tvmpaged.runtime.beam import BeamGroup
from tvmpaged.runtime.detokenize import Detokenizer, output_text
from tvmpaged.runtime.limits import max_output_tokens, num_branches
from tvmpaged.runtime.params import BeamSearchParams, SamplingParams
from tvmpaged.runtime.prompts import check_params, encode
from tvmpaged.runtime.sequence import Request, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvmpaged.runtime.block_manager import BlockManager
    from tvmpaged.runtime.model import CausalModel
    from tvmpaged.runtime.prompts import Prompt


class Intake:
    """Check prompts and params against one engine, and make requests of them.

    Parameters
    ----------
    model : CausalModel
        Its tokenizer and vocabulary.
    block_manager : BlockManager
        The cache's size.
    max_model_len, max_num_seqs : int
        The engine's limits.
    new_seq_id : callable
        Names sequences.
    is_taken : callable
        Tells whether a request has a name already.
    """

    def __init__(
        self,
        model: CausalModel,
        block_manager: BlockManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        new_seq_id: Callable[[], int],
        is_taken: Callable[[str], bool],
    ) -> None:
        self._model = model
        self._manager = block_manager
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._new_seq_id = new_seq_id
        self._is_taken = is_taken
        self._arrivals = itertools.count()

    def request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams | BeamSearchParams
    ) -> tuple[Request, Sequence]:
        """Return a new request and its first sequence."""
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise TypeError(f"params={params!r} must be SamplingParams or BeamSearchParams")
        text, token_ids = encode(self._model.tokenizer, prompt, self._model.vocab_size)
        request = self._make(request_id, text, token_ids, params)
        root = Sequence(
            seq_id=self._new_seq_id(),
            request=request,
            sample_index=request.next_sample_index(),
            token_ids=token_ids.copy(),
            detokenizer=self._detokenizer(request),
            num_pending_forks=num_branches(params) - 1,
        )
        if isinstance(params, BeamSearchParams):
            request.beams = BeamGroup(
                request, root, lambda output: output_text(self._model.tokenizer, token_ids, output)
            )
        return request, root

    def child(self, parent: Request, params: SamplingParams | None) -> Request:
        """Return a request for a fork of `parent`, without sequences yet."""
        if parent.beams is not None:
            raise ValueError(f"request_id={parent.request_id!r} is a beam search: not to be forked")
        wanted = parent.params if params is None else params
        if not isinstance(wanted, SamplingParams):
            raise TypeError(f"params={params!r} must be SamplingParams")
        assert isinstance(parent.params, SamplingParams)
        if wanted.n != parent.params.n:
            raise ValueError(f"n={wanted.n} must be the parent's, {parent.params.n}")
        child = self._make(None, parent.prompt, parent.prompt_token_ids, wanted)
        going_on = [seq for seq in parent.sequences if seq.finish_reason is None]
        taken = max(len(seq.output_token_ids) for seq in going_on)
        if taken >= child.max_tokens:
            raise ValueError(
                f"max_tokens={wanted.max_tokens} must be more than the {taken} tokens taken over"
            )
        if params is None:
            # Same seed, next sample index: its draws are its own, and can be repeated.
            child.seed, child.root = parent.seed, parent.root or parent
        return child

    def set_text_options(self, request: Request) -> None:
        """Let a fork's sequences print and stop as the fork's own params say."""
        for seq in request.sequences:
            seq.detokenizer = self._detokenizer(request)
            seq.detokenizer.extend(seq.output_token_ids)

    def _make(
        self,
        request_id: str | None,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
    ) -> Request:
        check_params(params, self._model.vocab_size)
        arrival = next(self._arrivals)
        seed = params.seed if isinstance(params, SamplingParams) else 0
        return Request(
            request_id=self._free_name(arrival) if request_id is None else request_id,
            arrival=arrival,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            seed=secrets.randbits(63) if seed is None else seed,
            eos_token_ids=self._model.eos_token_ids,
            max_tokens=max_output_tokens(
                len(token_ids), params, self._manager, self._max_model_len, self._max_num_seqs
            ),
        )

    def _free_name(self, arrival: int) -> str:
        """Return a name for a request that came without one; a user may have taken the first."""
        names = (f"request-{number}" for number in itertools.count(arrival))
        return next(name for name in names if not self._is_taken(name))

    def _detokenizer(self, request: Request) -> Detokenizer:
        params = request.params
        if not isinstance(params, SamplingParams) or not params.detokenize:
            return Detokenizer(None, request.prompt_token_ids)
        return Detokenizer(
            self._model.tokenizer,
            request.prompt_token_ids,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
        )
