"""Relations between two runs of an attention artifact that hold whatever the numbers are.

A comparison with the reference asks whether one result is right; a relation asks whether a change
of the input changes the result as it must. What no reference case happens to show, a slot that is
read though nobody owns it or a batch that moves the bits of one of its rows, breaks a relation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

#: What a change of the input must not move by a bit.
_SAME_BITS = 0.0
#: A log-sum-exp is float32 under every dtype: a few units of its last place, absolute.
_LSE_LIMIT = 1e-4


@dataclass(frozen=True)
class Relation:
    """One relation, tried once.

    Parameters
    ----------
    what : str
        What was changed, and what must follow.
    error : float
        How far the two runs are apart: rows whose bits differ, or ``||a - b|| / ||b||``.
    limit : float
        The greatest error with which it holds.
    """

    what: str
    error: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit

    def __str__(self) -> str:
        if self.limit == _SAME_BITS:
            return f"{self.what}: {self.error:.0f} rows differ"
        return f"{self.what}: apart by {self.error:.2e}, at most {self.limit:.1e}"


@dataclass(frozen=True)
class _Step:
    """A step's sequences by what they hold, not by where it lies.

    Parameters
    ----------
    q : torch.Tensor
        ``[num_tokens, num_qo_heads, head_dim]``.
    k, v : list of torch.Tensor
        Of each sequence, ``[seq_len, num_kv_heads, head_dim]`` in q's dtype.
    q_lens : list of int
        New tokens of each sequence.
    """

    q: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    q_lens: list[int]
    causal: bool = True

    def only(self, index: int) -> _Step:
        """Return one of the sequences alone."""
        begin = sum(self.q_lens[:index])
        rows = slice(begin, begin + self.q_lens[index])
        k, v = ([each[index]] for each in (self.k, self.v))
        return replace(self, q=self.q[rows], k=k, v=v, q_lens=[self.q_lens[index]])

    def keys(self, begin: int, end: int | None) -> _Step:
        """Return the step over a range of each sequence's keys."""
        k, v = ([each[begin:end] for each in rows] for rows in (self.k, self.v))
        return replace(self, k=k, v=v)

    def chunks(self, cuts: Sequence[int]) -> Iterator[_Step]:
        """Yield the steps that bring the tokens of a single sequence in pieces."""
        before = len(self.k[0]) - self.q_lens[0]
        for begin, end in pairwise([0, *cuts, self.q_lens[0]]):
            yield replace(self.keys(0, before + end), q=self.q[begin:end], q_lens=[end - begin])


@dataclass(frozen=True)
class _Bench:
    """Runs steps on an attention, each in new caches whose blocks lie in a new order."""

    attention: Any
    random: np.random.Generator

    def rows(self, *shape: int) -> torch.Tensor:
        """Return random rows in q's dtype that K and V hold without rounding."""
        values = torch.from_numpy(self.random.standard_normal(shape, np.float32))
        return values.to(self.attention.kv_dtype).to(self.attention.dtype)

    def step(self, q_lens: Sequence[int], seq_lens: Sequence[int], causal: bool = True) -> _Step:
        a = self.attention
        k, v = (
            [self.rows(length, a.num_kv_heads, a.head_dim) for length in seq_lens] for _ in range(2)
        )
        q = self.rows(sum(q_lens), a.num_qo_heads, a.head_dim)
        return _Step(q, k, v, list(q_lens), causal)

    def run(
        self, step: _Step, unused: float = 0.0, before: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``out`` and ``lse``; `unused` in all slots without a key, `before` in ``out``."""
        a = self.attention
        lengths = [len(each) for each in step.k]
        counts = [-(-length // a.block_size) for length in lengths]
        ids = self.random.permutation(sum(counts) + 2).tolist()
        table = np.full((len(lengths), max([1, *counts])), -1, np.int32)
        slots: list[int] = []
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = [ids.pop() for _ in range(count)]
            table[row, :count] = own
            slots += [
                own[i // a.block_size] * a.block_size + i % a.block_size for i in range(length)
            ]
        caches = a.new_cache(sum(counts) + 2)
        for cache in caches:
            cache.fill_(unused)
        if slots:
            k, v = (torch.cat(each).to(a.device) for each in (step.k, step.v))
            a.append_kv(k, v, *caches, torch.tensor(slots))
        starts = np.cumsum([0, *step.q_lens]).astype(np.int32)
        plan = a.plan(starts, np.array(lengths, np.int32), table, causal=step.causal)
        q = step.q.to(a.device)
        out, lse = a.run(plan, q, *caches, out=torch.full_like(q, before), return_lse=True)
        return out.cpu(), lse.cpu()


def relations(attention: Any, kernel: str, limit: float, seed: int = 0) -> Iterator[Relation]:
    """Try every relation once, on sizes and numbers drawn from a seed.

    Parameters
    ----------
    attention : PagedAttention
        What runs the steps.
    kernel : str
        ``decode``: every sequence has one new token; ``prefill``: several.
    limit : float
        Greatest ``||a - b|| / ||b||`` of two results that may be rounded differently.
    seed : int
        Of the sizes and the numbers.
    """
    bench = _Bench(attention, np.random.default_rng(seed))
    yield from _of_the_place(bench, kernel)
    yield from _of_the_numbers(bench, kernel, limit)
    yield _one_by_one(bench, limit)


def _lengths(bench: _Bench, kernel: str) -> tuple[list[int], list[int]]:
    random, block = bench.random, bench.attention.block_size
    seq_lens = [1, block, block + 1, 0, *random.integers(1, 700, 3).tolist(), 2500]
    if kernel == "decode":
        return [1] * len(seq_lens), seq_lens
    # More new tokens than keys too: rows that see nothing.
    return [2, *random.integers(2, 40, len(seq_lens) - 1).tolist()], seq_lens


def _of_the_place(bench: _Bench, kernel: str) -> Iterator[Relation]:
    """Where keys lie, what lies beside them and who else is in the batch: not a bit."""
    step = bench.step(*_lengths(bench, kernel), causal=bool(bench.random.integers(2)))
    base = bench.run(step)
    yield Relation("blocks in another order: same bits", _bits(bench.run(step), base), _SAME_BITS)
    for unused in (torch.nan, torch.inf):
        found = _bits(bench.run(step, unused=unused), base)
        yield Relation(f"{unused} in unused slots: same bits", found, _SAME_BITS)
    found = _bits(bench.run(step, before=torch.nan), base)
    yield Relation("nan in out beforehand: same bits", found, _SAME_BITS)
    alone = [bench.run(step.only(index)) for index in range(len(step.q_lens))]
    together = torch.cat([out for out, _ in alone]), torch.cat([lse for _, lse in alone])
    yield Relation("each sequence alone: same bits", _bits(together, base), _SAME_BITS)


def _of_the_numbers(bench: _Bench, kernel: str, limit: float) -> Iterator[Relation]:
    group = bench.attention.num_qo_heads // bench.attention.num_kv_heads
    # Without a mask each row sees all keys, so ranges of keys are steps of their own.
    step = bench.step([1, 1] if kernel == "decode" else [3, 2], [300, 41], causal=False)
    out, lse = bench.run(replace(step, q=torch.zeros_like(step.q)))
    per_row = [index for index, count in enumerate(step.q_lens) for _ in range(count)]
    means = torch.stack([each.double().mean(0) for each in step.v]).repeat_interleave(group, 1)
    counts = torch.tensor([float(len(each)) for each in step.k]).log()
    yield Relation("q = 0: out is the mean of V", _apart(out, means[per_row]), limit)
    yield Relation("q = 0: lse is log of the keys", _most(lse, counts[per_row, None]), _LSE_LIMIT)

    base = bench.run(step)
    merged = _merged([bench.run(step.keys(0, 29)), bench.run(step.keys(29, None))])
    yield Relation("two ranges of keys, merged: out", _apart(base[0], merged[0]), 2 * limit)
    yield Relation("two ranges of keys, merged: lse", _most(base[1], merged[1]), _LSE_LIMIT)

    # Through a dimension of q and k that is the same for all. Powers of two: nothing is rounded.
    scale = bench.attention.head_dim**-0.5
    with_one = [each.index_fill(2, torch.tensor(0), 0.0) for each in step.k]
    plain = replace(step, q=step.q.index_fill(2, torch.tensor(0), 4.0), k=with_one)
    moved = replace(plain, k=[each.index_fill(2, torch.tensor(0), -8.0) for each in with_one])
    (out, lse), (moved_out, moved_lse) = bench.run(plain), bench.run(moved)
    constant = "a constant added to every logit"
    yield Relation(f"{constant}: out stays", _apart(moved_out, out.double()), limit)
    yield Relation(f"{constant}: lse moves by it", _most(moved_lse, lse - 32 * scale), _LSE_LIMIT)


def _one_by_one(bench: _Bench, limit: float) -> Relation:
    """Bring a sequence's new tokens at once, one by one, and in two pieces."""
    count = 12
    step = bench.step([count], [count + int(bench.random.integers(0, 200))])
    whole = bench.run(step)[0].double()
    cut = int(bench.random.integers(1, count))
    apart = [
        _apart(torch.cat([bench.run(each)[0] for each in step.chunks(cuts)]), whole)
        for cuts in (list(range(1, count)), [cut])
    ]
    return Relation("new tokens at once, one by one, in two pieces: out", max(apart), 2 * limit)


def _bits(
    found: tuple[torch.Tensor, torch.Tensor], base: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """Return how many rows are not the same in bits; NaN is the same as nothing."""
    differ = (found[0] != base[0]).any(-1).any(-1) | (found[1] != base[1]).any(-1)
    return float(differ.sum())


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm(expected.double())
    return float(torch.linalg.vector_norm(found.double() - expected.double()) / norm)


def _most(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def _merged(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.stack([each.double() for _, each in parts])
    whole = torch.logsumexp(lse, 0)
    weights = (lse - whole).exp()[..., None]
    return (weights * torch.stack([out.double() for out, _ in parts])).sum(0), whole
