"""What an engine has done so far, in numbers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvmpaged.runtime.block_manager import BlockManager
    from tvmpaged.runtime.scheduler import Scheduler


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made; "now" means between two steps.

    Parameters
    ----------
    num_running, num_waiting : int
        Sequences with blocks, and in line for them, now.
    num_finished_requests : int
        Requests that ended, aborted ones included.
    num_steps : int
        Packed forward passes.
    num_prompt_tokens, num_generated_tokens : int
        Tokens of prompts added, and tokens drawn.
    num_computed_tokens : int
        Tokens that went through the model; more than the sum of both after preemptions, less after
        prefix hits.
    step_time_s : float
        Time spent in `step`.
    tokens_per_s : float
        Drawn tokens per second of `step_time_s`.
    time_to_first_token_s : float
        Mean over the requests that have one.
    num_blocks, block_size : int
        The cache's.
    kv_cache_bytes : int
        Its size.
    num_blocks_used, num_blocks_used_peak : int
        Blocks that sequences hold, now and at most.
    num_blocks_shared, num_blocks_shared_peak : int
        Those of them with several holders.
    num_blocks_copied : int
        Copies on write.
    num_blocks_cached : int
        Free blocks that still hold a prefix, now.
    kv_cache_utilisation, kv_cache_utilisation_peak : float
        Share of the cache's blocks that sequences hold, now and at most.
    num_prefix_hit_tokens : int
        Tokens found in the prefix cache when a sequence got its blocks.
    prefix_hit_rate : float
        Their share of all tokens looked up there.
    num_preemptions : int
        Sequences that gave their blocks back and were computed again.
    """

    num_running: int
    num_waiting: int
    num_finished_requests: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_computed_tokens: int
    step_time_s: float
    tokens_per_s: float
    time_to_first_token_s: float
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    num_blocks_used: int
    num_blocks_used_peak: int
    num_blocks_shared: int
    num_blocks_shared_peak: int
    num_blocks_copied: int
    num_blocks_cached: int
    kv_cache_utilisation: float
    kv_cache_utilisation_peak: float
    num_prefix_hit_tokens: int
    prefix_hit_rate: float
    num_preemptions: int


@dataclass
class Counters:
    """What the engine counts while it runs."""

    num_finished_requests: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_blocks_used_peak: int = 0
    num_blocks_shared_peak: int = 0
    step_time_s: float = 0.0
    first_token_times_s: list[float] = field(default_factory=list)

    def note_blocks(self, manager: BlockManager) -> None:
        """Remember the most blocks used and shared."""
        self.num_blocks_used_peak = max(self.num_blocks_used_peak, manager.num_used_blocks)
        self.num_blocks_shared_peak = max(self.num_blocks_shared_peak, manager.num_shared_blocks)

    def note_step(self, began: float, num_tokens: int) -> None:
        """Remember a finished step."""
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.step_time_s += time.perf_counter() - began

    def stats(
        self,
        manager: BlockManager,
        scheduler: Scheduler,
        kv_cache_bytes: int,
    ) -> EngineStats:
        """Return everything as of now."""
        times = self.first_token_times_s
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished_requests=self.num_finished_requests,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_computed_tokens=self.num_computed_tokens,
            step_time_s=self.step_time_s,
            tokens_per_s=self.num_generated_tokens / self.step_time_s if self.step_time_s else 0.0,
            time_to_first_token_s=sum(times) / len(times) if times else 0.0,
            num_blocks=manager.num_blocks,
            block_size=manager.block_size,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks_used=manager.num_used_blocks,
            num_blocks_used_peak=self.num_blocks_used_peak,
            num_blocks_shared=manager.num_shared_blocks,
            num_blocks_shared_peak=self.num_blocks_shared_peak,
            num_blocks_copied=manager.num_copied_blocks,
            num_blocks_cached=manager.num_cached_blocks,
            kv_cache_utilisation=manager.num_used_blocks / manager.num_blocks,
            kv_cache_utilisation_peak=self.num_blocks_used_peak / manager.num_blocks,
            num_prefix_hit_tokens=scheduler.num_hit_tokens,
            prefix_hit_rate=scheduler.num_hit_tokens / max(1, scheduler.num_admitted_tokens),
            num_preemptions=scheduler.num_preemptions,
        )
