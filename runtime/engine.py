"""Decode text: batches that change from step to step, over one paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tvmpaged.runtime.attention import PagedAttention
from tvmpaged.runtime.block_manager import BlockManager
from tvmpaged.runtime.core import EngineCore
from tvmpaged.runtime.errors import checked_int
from tvmpaged.runtime.intake import Intake
from tvmpaged.runtime.memory import block_bytes, num_blocks_for
from tvmpaged.runtime.model import CausalModel, load_model
from tvmpaged.runtime.params import BeamSearchParams, SamplingParams
from tvmpaged.runtime.prompts import is_messages, match_params, split_prompts
from tvmpaged.runtime.runner import Runner
from tvmpaged.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from collections.abc import Sequence as SequenceOf

    from tvmpaged.runtime.outputs import RequestOutput
    from tvmpaged.runtime.prompts import Prompt
    from tvmpaged.runtime.stats import EngineStats

    Messages = SequenceOf[Mapping[str, Any]]


class Engine:
    """Continuous batching over a paged KV cache; make one with `from_pretrained`.

    Used from one thread at a time. `generate`, `chat` and `beam_search` run until their prompts
    are done; `add_request` and `step` leave the loop to the caller.
    """

    def __init__(
        self,
        model: CausalModel,
        attention: PagedAttention,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self.attention = attention
        self.block_manager = block_manager
        self.max_model_len = max_model_len
        self._core = EngineCore(
            Scheduler(block_manager, max_num_seqs, max_num_batched_tokens),
            Runner(model, attention, block_manager),
            self._token_text,
        )
        self._intake = Intake(
            model,
            block_manager,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            new_seq_id=self._core.new_seq_id,
            is_taken=lambda name: name in self._core.requests or name in self._undelivered,
        )
        self._undelivered: dict[str, RequestOutput] = {}

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        device: str = "cpu",
        dtype: Any = None,
        revision: str | None = None,
        compile: bool = False,  # noqa: A002, the public name
        bundle: Any = None,
    ) -> Self:
        """Load a model and make an engine for it.

        Parameters
        ----------
        model : str or path
            A folder, a GGUF file, a hub id, or ``package:NAME`` (an installed Python package that
            holds one GGUF file).
        block_size : int
            Tokens per block.
        num_blocks, kv_cache_memory_bytes : int, optional
            The size of the cache; by default what all sequences could ever use, but no more than a
            share of the free memory.
        max_num_seqs, max_num_batched_tokens : int
            Most sequences with blocks, and most tokens of one step.
        max_model_len : int, optional
            Most tokens of a sequence, prompt included; by default what the model knows.
        enable_prefix_caching : bool
            Keep blocks for prompts that start alike.
        device : str
            ``"cpu"``.
        dtype : str or torch.dtype, optional
            By default the checkpoint's, and float32 for GGUF.
        revision : str, optional
            Of a hub id.
        compile : bool
            Not available yet.
        bundle : optional
            Where the kernels come from; see `PagedAttention`.

        Raises
        ------
        ValueError, TypeError, FileNotFoundError, ModuleNotFoundError
            For arguments out of range, a model that cannot be found, read or run by the kernels
            (named with the feature it needs), no kernels, no transformers.
        """
        if compile:
            raise ValueError("compile=True is not available yet; allowed: False")
        return cls.from_loaded(
            load_model(model, dtype=dtype, device=device, revision=revision),
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            bundle=bundle,
        )

    @classmethod
    def from_loaded(
        cls,
        model: CausalModel,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        bundle: Any = None,
    ) -> Self:
        """Make an engine for a model of `load_model`; several may share one.

        Arguments and errors are those of `from_pretrained`.
        """
        block_size = checked_int("block_size", block_size, 1)
        length = model.max_length if max_model_len is None else max_model_len
        length = checked_int("max_model_len", length, 2, model.max_length)
        max_num_seqs = checked_int("max_num_seqs", max_num_seqs, 1)
        attention = PagedAttention(
            num_qo_heads=model.num_qo_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
            dtype=model.dtype,
            kv_layout="native",
            device=model.device,
            bundle=bundle,
        )
        count = num_blocks_for(
            block_bytes(
                model.num_layers, model.num_kv_heads, model.head_dim, block_size, model.dtype
            ),
            max_num_seqs * -(-length // block_size),
            kv_cache_memory_bytes,
            num_blocks,
            model.device,
        )
        return cls(
            model,
            attention,
            BlockManager(count, block_size, enable_prefix_caching),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=checked_int("max_num_batched_tokens", max_num_batched_tokens, 1),
            max_model_len=length,
        )

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Decode prompts until all are done.

        Parameters
        ----------
        prompts : prompt or list of prompts
            A prompt is a string, a list of token ids, or messages.
        sampling_params : SamplingParams or list of SamplingParams, optional
            One for all, or one for each.

        Returns
        -------
        list of RequestOutput
            In the order of the prompts.

        Raises
        ------
        ValueError, TypeError
            As `add_request`; no prompt has run then.
        """
        split = split_prompts(prompts)
        wanted = SamplingParams() if sampling_params is None else sampling_params
        return self._run_all(split, match_params(wanted, len(split), SamplingParams))

    def beam_search(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: BeamSearchParams | SequenceOf[BeamSearchParams],
    ) -> list[RequestOutput]:
        """Search the most likely outputs; each result's ``outputs`` are its beams, best first.

        Arguments and errors are those of `generate`.
        """
        split = split_prompts(prompts)
        return self._run_all(split, match_params(params, len(split), BeamSearchParams))

    def chat(
        self,
        messages: Messages | SequenceOf[Messages],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the tokenizer's chat template.

        Parameters
        ----------
        messages : list of dict, or list of them
            Dictionaries with ``role`` and ``content``.
        sampling_params : SamplingParams or list of SamplingParams, optional
            One for all, or one for each.
        """
        split = split_prompts(messages)
        if not split or not all(map(is_messages, split)):
            raise TypeError(f"messages={messages!r} must be dictionaries with role and content")
        return self.generate(split, sampling_params)

    def add_request(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
    ) -> str:
        """Put a prompt in the line; `step` computes it.

        Parameters
        ----------
        request_id : str, optional
            A name that no unfinished request has; None: the engine picks one.
        prompt : prompt
            A string, a list of token ids, or messages.
        params : SamplingParams or BeamSearchParams, optional
            What is asked of it.

        Returns
        -------
        str
            The request's id.

        Raises
        ------
        ValueError, TypeError
            Naming what is wrong, or does not fit the model or the cache.
        """
        wanted = SamplingParams() if params is None else params
        request, root = self._intake.request(request_id, prompt, wanted)
        self._core.add(request, root)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one packed forward pass over whatever can run.

        Returns
        -------
        list of RequestOutput
            The requests with new tokens, each with all of its tokens so far; empty when nothing is
            left to do or only parts of prompts were computed.
        """
        outputs = {request.request_id: request.output() for request in self._core.step()}
        waiting, self._undelivered = self._undelivered, {}
        return list((waiting | outputs).values())

    def has_unfinished_requests(self) -> bool:
        """Tell whether `step` has something left to do."""
        return bool(self._core.requests or self._undelivered)

    def fork(self, request_id: str, params: SamplingParams | None = None) -> str:
        """Start a request from where another one stands; they share blocks until one writes.

        Parameters
        ----------
        request_id : str
            An unfinished request; it goes on as if nothing had happened.
        params : SamplingParams, optional
            For the child; ``max_tokens`` counts the tokens it takes over. By default the parent's,
            with the next unused sample index, so that draws differ.

        Returns
        -------
        str
            The child's id. Its output starts with the parent's so far.

        Raises
        ------
        ValueError
            For a request that is unknown or finished, a beam search, or params that do not fit.
        """
        parent = self._core.requests.get(request_id)
        if parent is None:
            raise ValueError(f"request_id={request_id!r} is unknown or finished")
        child = self._intake.child(parent, params)
        self._core.fork(parent, child)
        if params is not None:
            self._intake.set_text_options(child)
        return child.request_id

    def abort_request(self, request_id: str) -> bool:
        """Drop a request; False when there is none of that name (any more)."""
        self._undelivered.pop(request_id, None)
        return self._core.abort(request_id)

    def stats(self) -> EngineStats:
        """Return what has been done so far, in numbers."""
        return self._core.stats()

    def _run_all(
        self, prompts: list[Prompt], params: SequenceOf[SamplingParams | BeamSearchParams]
    ) -> list[RequestOutput]:
        names: list[str] = []
        results: dict[str, RequestOutput] = {}
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                names.append(self.add_request(None, prompt, wanted))
            while len(results) < len(names):
                for request in self._core.step():
                    if request.request_id not in names:
                        self._undelivered[request.request_id] = request.output()
                    elif request.finished:
                        results[request.request_id] = request.output()
        finally:
            for name in names:
                self.abort_request(name)
        return [results[name] for name in names]

    def _token_text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode([token_id]))
