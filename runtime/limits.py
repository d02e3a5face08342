"""Whether a request fits, and how long it may grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvmpaged.runtime.params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from tvmpaged.runtime.block_manager import BlockManager


def num_branches(params: SamplingParams | BeamSearchParams) -> int:
    """Return how many sequences a request grows into."""
    return params.beam_width if isinstance(params, BeamSearchParams) else params.n


def max_output_tokens(
    num_prompt_tokens: int,
    params: SamplingParams | BeamSearchParams,
    manager: BlockManager,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """Return the most tokens of output for a prompt.

    The last token of an output never enters the cache, so a sequence needs a slot less than it has
    tokens. One that fits alone always comes to its end, as every other one can be preempted.

    Raises
    ------
    ValueError
        When the request could never run to its end.
    """
    branches = num_branches(params)
    if branches > max_num_seqs:
        name = "beam_width" if isinstance(params, BeamSearchParams) else "n"
        raise ValueError(f"{name}={branches} must be at most max_num_seqs={max_num_seqs}")
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ValueError(
            f"prompt has {num_prompt_tokens} tokens; with one token of output that is more than "
            f"max_model_len={max_model_len}"
        )
    num_slots = manager.num_blocks * manager.block_size
    if params.max_tokens is None:
        wanted = min(room, max(1, num_slots + 1 - num_prompt_tokens))
    else:
        wanted = min(room, params.max_tokens)
    needed = -(-(num_prompt_tokens + wanted - 1) // manager.block_size)
    if needed > manager.num_blocks:
        raise ValueError(
            f"prompt of {num_prompt_tokens} tokens with max_tokens={wanted} needs {needed} blocks "
            f"of {manager.block_size} tokens; the cache has num_blocks={manager.num_blocks}"
        )
    return wanted
