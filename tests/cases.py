"""Random cases of paged attention, the tolerances, and the comparison with the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tvmpaged import PagedAttention, reference
from tvmpaged.host_memory import zero_pages
from tvmpaged.layout import from_hnd, inner_shape

#: ||out - ref|| / ||ref|| over a case, in float64; the reference has the same rounded inputs.
TOLERANCE = {
    # Sums of up to a thousand products, each rounded to 2**-24; the polynomial's 2e-7. Seen: 6e-7.
    "float32": 1e-5,
    # out is rounded once to 11 bits: at most 2**-11 = 5e-4 of each element. Seen: 2e-4.
    "float16": 1.5e-3,
    # out is rounded once to 8 bits: at most 2**-8 = 4e-3 of each element. Seen: 1.7e-3.
    "bfloat16": 5e-3,
}
#: Of any single row of out, and of any single lse: the worst of thousands, nothing averages out.
ROW_FACTOR = 2.0
#: Largest error of a log-sum-exp: it is float32 under every dtype.
LSE_TOLERANCE = 2e-5
#: A logit is a float32, and so is each partial sum that makes it: a wrong last bit moves a
#: probability, and the lse, by as much. So this times ||q|| ||k|| sm_scale, the most a partial sum
#: can reach, is added to the tolerances. It counts where logits are large: 1.5e-6 at 12.
PER_LOGIT = 2 * 2.0**-24

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Inputs of one step over one layer; caches of pairs are kept as HND, which the truth reads."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    query_start_loc: np.ndarray[Any, Any]
    seq_lens: np.ndarray[Any, Any]
    block_table: np.ndarray[Any, Any]
    causal: bool = True
    sm_scale: float | None = None
    layout: str = "HND"

    @property
    def step(self) -> tuple[Any, Any, Any]:
        """What `PagedAttention.plan` takes."""
        return self.query_start_loc, self.seq_lens, self.block_table

    @property
    def q_lens(self) -> list[int]:
        return np.diff(self.query_start_loc).tolist()

    def expected(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return out and lse of the reference."""
        found: tuple[Any, Any] = reference.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            *self.step,
            sm_scale=self.sm_scale,
            causal=self.causal,
            kv_layout=self.layout,
            return_lse=True,
        )
        return found

    def slack(self) -> float:
        """Return what large logits add to the tolerances."""
        scale = self.q.shape[2] ** -0.5 if self.sm_scale is None else abs(self.sm_scale)
        q, k = (torch.linalg.vector_norm(x.double(), dim=-1) for x in (self.q, self.k_cache))
        if not self.q.numel():
            return 0.0
        return PER_LOGIT * scale * float(q.max()) * max(k[k.isfinite()].tolist(), default=0.0)

    def by_slot(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the caches, ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
        k, v = self.k_cache, self.v_cache
        return (k, v) if self.layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        """Return block and offset of a sequence's position."""
        block_size = self.by_slot()[0].shape[1]
        return int(self.block_table[seq, position // block_size]), position % block_size

    def only(self, seq: int) -> "Case":
        """Return the step of one of the sequences, alone, over the same caches."""
        begin, end = (int(x) for x in self.query_start_loc[seq : seq + 2])
        return replace(
            self,
            q=self.q[begin:end],
            query_start_loc=np.array([0, end - begin], np.int32),
            seq_lens=self.seq_lens[seq : seq + 1],
            block_table=self.block_table[seq : seq + 1],
        )


def random_rows(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return standard normal numbers."""
    return torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype)


def starts_of(q_lens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return ``query_start_loc``."""
    return np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)


def make_case(
    rng: np.random.Generator,
    attn: PagedAttention,
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    causal: bool = True,
    scale: float = 1.0,
    unused: float = NAN,
) -> Case:
    """Return a random step: shuffled blocks, and `unused` in all slots that no sequence sees.

    Parameters
    ----------
    rng : Generator
        Makes the numbers.
    attn : PagedAttention
        Gives sizes, dtypes and layout.
    q_lens, seq_lens : sequence of int
        Of each sequence.
    causal : bool
        Kept in the case.
    scale : float
        Factor on q: what the logits are multiplied by.
    unused : float
        Stands in the caches wherever no token does.
    """
    needed = [-(-length // attn.block_size) for length in seq_lens]
    layout = "NHD" if attn.kv_layout == "NHD" else "HND"
    inner = inner_shape(layout, attn.num_kv_heads, attn.block_size, attn.head_dim)
    k_cache, v_cache = (
        zero_pages((sum(needed) + 3, *inner), attn.kv_dtype).fill_(unused) for _ in range(2)
    )
    free = rng.permutation(len(k_cache)).tolist()
    block_table = np.full((len(seq_lens), max(needed, default=0) + 1), -1, np.int32)
    for seq, count in enumerate(needed):
        block_table[seq, :count] = [free.pop() for _ in range(count)]
    q = random_rows(rng, (sum(q_lens), attn.num_qo_heads, attn.head_dim), torch.float32) * scale
    case = Case(
        q.to(attn.dtype),
        k_cache,
        v_cache,
        starts_of(q_lens),
        np.array(seq_lens, np.int32),
        block_table,
        causal,
        layout=layout,
    )
    for cache in case.by_slot():
        for seq, length in enumerate(seq_lens):
            position = np.arange(length)
            blocks = torch.from_numpy(block_table[seq, position // attn.block_size]).long()
            offsets = torch.from_numpy(position % attn.block_size)
            shape = (length, attn.num_kv_heads, attn.head_dim)
            cache[blocks, offsets] = random_rows(rng, shape, attn.kv_dtype)
    return case


def stored(attn: PagedAttention, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches as the kernels read them."""
    if attn.kv_layout == case.layout:
        return case.k_cache, case.v_cache
    k_cache, v_cache = (
        from_hnd(cache, which, attn.kv_layout)
        for which, cache in (("k", case.k_cache), ("v", case.v_cache))
    )
    return k_cache, v_cache


def run(attn: PagedAttention, case: Case, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse; out held NaN before, so that a row left unwritten shows."""
    plan = attn.plan(*case.step, causal=case.causal)
    changes.setdefault("out", torch.full(case.q.shape, NAN, dtype=attn.dtype))
    caches = stored(attn, case)
    out, lse = attn.run(plan, case.q, *caches, case.sm_scale, return_lse=True, **changes)
    return out, lse


def relative_error(found: Any, expected: np.ndarray[Any, Any]) -> float:
    """Return ||found - expected|| / ||expected|| in float64; 0 when both are zero."""
    difference = np.linalg.norm(reference.as_array(found) - expected)
    return float(difference and difference / np.linalg.norm(expected))


def assert_equals_reference(attn: PagedAttention, case: Case, **changes: Any) -> None:
    """Run a case and hold out and lse against the reference."""
    out, lse = run(attn, case, **changes)
    assert_close(out, lse, *case.expected(), slack=case.slack())


def assert_close(
    out: torch.Tensor,
    lse: torch.Tensor,
    expected: np.ndarray[Any, Any],
    expected_lse: np.ndarray[Any, Any],
    slack: float = 0.0,
) -> None:
    """Hold out and lse against what they must be, within the tolerance of out's dtype."""
    tolerance = TOLERANCE[str(out.dtype).removeprefix("torch.")] + slack
    found, found_lse = reference.as_array(out), reference.as_array(lse)
    seen = np.isfinite(expected_lse)
    assert np.isfinite(found).all(), f"not finite: {np.argwhere(~np.isfinite(found))[:3].tolist()}"
    assert (np.isneginf(found_lse) == ~seen).all(), "rows that see nothing, and they alone: -inf"
    assert not found[~seen].any(), "a row that sees nothing is 0"
    rounding = 2.0**-24 * np.abs(expected_lse[seen])
    error = (np.abs(found_lse[seen] - expected_lse[seen]) - rounding).max(initial=0)
    assert error <= LSE_TOLERANCE + ROW_FACTOR * slack, (
        f"lse is off by {error:.2e} more than its rounding"
    )
    error = relative_error(found, expected)
    assert error <= tolerance, f"out is off by {error:.2e}"
    norms = np.linalg.norm(expected[seen], axis=-1)
    errors = np.linalg.norm((found - expected)[seen], axis=-1) / norms
    worst = errors.max(initial=0)
    assert worst <= ROW_FACTOR * tolerance, f"a row of out is off by {worst:.2e}"
