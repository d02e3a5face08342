"""Measure kernels as they are served, beside torch in the same run.

Machines are shared and noisy, so nothing is measured alone: each round times our `run`, torch's
attention over the same keys in contiguous memory, and the machine's roof (`tvmpaged.roofs`), in
turns. Ratios of one run are what counts; an absolute time says little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tvmpaged.bundle import host_for, resolve, scan
from tvmpaged.cpu import native_target, num_threads
from tvmpaged.roofs import roof_for
from tvmpaged.runtime.attention import PagedAttention
from tvmpaged.spec import ATTENTION_KERNELS, DTYPE_BYTES, AttentionSpec

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Case:
    """One measurement: a spec and the sizes it leaves open.

    Parameters
    ----------
    spec : AttentionSpec
        Decode or prefill.
    num_kv_heads, batch, context : int
        K/V heads; sequences; keys of each, the new ones included.
    q_len : int
        New tokens of each sequence: 1 for decode, `context` for a whole prefill.
    """

    spec: AttentionSpec
    num_kv_heads: int
    batch: int
    context: int
    q_len: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a decode step has to read."""
        row = (self.spec.head_dim + self.spec.head_dim_v) * DTYPE_BYTES[self.spec.kv_dtype]
        return self.batch * self.context * self.num_kv_heads * row

    @property
    def bound(self) -> tuple[str, int]:
        """What bounds the kernel: its rate's name, and its bytes or operations."""
        if self.spec.kernel == "decode":
            return "gb_per_s", self.kv_bytes
        return "gflop_per_s", self.flops

    @property
    def flops(self) -> int:
        """Operations of q.K and P.V over the keys that are visible."""
        past = self.context - self.q_len
        pairs = self.q_len * past + self.q_len * (self.q_len + 1) // 2
        heads = self.num_kv_heads * self.spec.group_size
        return 2 * self.batch * heads * pairs * (self.spec.head_dim + self.spec.head_dim_v)


@dataclass(frozen=True)
class Row:
    """What one case took; ratios are medians of ratios, round by round.

    Parameters
    ----------
    spec, kind, artifact : str
        What ran.
    layout : str
        The cache's layout.
    num_kv_heads, batch, context, q_len, num_threads : int
        The case.
    median_us, p10_us, p90_us : float
        Time of `run`, microseconds.
    rounds : int
        How often each was timed.
    gb_per_s, gflop_per_s : float
        K and V read, and operations done, per second, at the median.
    roof_gb_per_s, roof_gflop_per_s : float or None
        What bounds the kernel on this machine (`tvmpaged.roofs`): a read of as many bytes for
        decode, a matrix product for prefill; at the median.
    roof_fraction : float
        Our rate over the roof's.
    torch_ratio : float or None
        Our time over that of torch's attention on contiguous K and V; less than 1 is faster.
    """

    spec: str
    kind: str
    artifact: str
    layout: str
    num_kv_heads: int
    batch: int
    context: int
    q_len: int
    num_threads: int
    median_us: float
    p10_us: float
    p90_us: float
    rounds: int
    gb_per_s: float
    gflop_per_s: float
    roof_gb_per_s: float | None
    roof_gflop_per_s: float | None
    roof_fraction: float
    torch_ratio: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def bench(
    cases: Iterable[Case],
    *,
    bundle: str | None = None,
    against_torch: bool = True,
    rounds: int = 15,
    seed: int = 0,
    on_row: Callable[[Row], None] = lambda _row: None,
) -> list[Row]:
    """Measure cases one after the other.

    Parameters
    ----------
    cases : iterable of Case
        What to measure.
    bundle : path, optional
        A bundle to look in first.
    against_torch : bool
        Whether to time torch's attention too.
    rounds : int
        How often each is timed.
    seed : int
        Of the random inputs.
    on_row : callable
        Called with each finished row.

    Raises
    ------
    ValueError
        When a spec is no attention kernel or leaves its sizes open.
    FileNotFoundError
        When no artifact serves a spec.
    """
    rows = []
    for case in cases:
        if case.spec.kernel not in ATTENTION_KERNELS or case.spec.is_generic:
            raise ValueError(f"spec={case.spec} cannot be measured: name its sizes")
        if not 1 <= case.q_len <= case.context:
            raise ValueError(f"q_len={case.q_len} must be in 1..context={case.context}")
        rows.append(_measure(case, bundle, against_torch, rounds, seed))
        on_row(rows[-1])
    return rows


def specs_in(bundle: str) -> list[AttentionSpec]:
    """Return the specs of a bundle's attention kernels that run here and fix their sizes.

    Raises
    ------
    ValueError
        When there is none.
    """
    host = host_for(native_target())
    found = [
        artifact.spec
        for folder in scan(Path(bundle))
        for artifact in (folder.manifest.artifacts if folder.manifest else ())
        if artifact.spec.kernel in ATTENTION_KERNELS
        and not artifact.spec.is_generic
        and resolve(artifact.spec, host, [folder]).accepted
    ]
    if not found:
        raise ValueError(
            f"bundle={bundle!r} holds no attention kernel for this machine that fixes its sizes; "
            "name specs (tvmpaged show tells what is in it)"
        )
    return list(dict.fromkeys(found))


def _measure(case: Case, bundle: str | None, against_torch: bool, rounds: int, seed: int) -> Row:
    spec = case.spec
    attn = PagedAttention(
        case.num_kv_heads * spec.group_size,
        case.num_kv_heads,
        spec.head_dim,
        spec.block_size,
        spec.q_dtype,
        kv_dtype=spec.kv_dtype,
        kv_layout=spec.layout,
        bundle=bundle,
    )
    torch.set_num_threads(num_threads())
    torch.manual_seed(seed)
    ours, k, v, q = _paged(case, attn)
    # Each contender reads bytes of its own, once a turn: none profits from another's.
    sizes = {"num_bytes": case.kv_bytes, "rotation_bytes": case.kv_bytes}
    roof = roof_for(spec.kernel, spec.q_dtype, num_threads(), **sizes)
    contenders: dict[str, Callable[[], Any]] = {"ours": ours, "roof": roof.call}
    if against_torch:
        contenders["torch"] = _contiguous(case, k, v, q)
    times = _interleave(contenders, rounds)
    described = attn.describe()["kernels"][spec.kernel]
    name, amount = case.bound
    roofs = {"roof_gb_per_s": None, "roof_gflop_per_s": None}
    fractions = amount / times["ours"] / 1e3 / roof.rate(times["roof"])
    median, p10, p90 = (float(np.percentile(times["ours"], p)) for p in (50, 10, 90))
    return Row(
        spec=str(spec),
        kind=described["kind"],
        artifact=str(described["sha256"]),
        layout=attn.kv_layout,
        num_kv_heads=case.num_kv_heads,
        batch=case.batch,
        context=case.context,
        q_len=case.q_len,
        num_threads=num_threads(),
        median_us=median,
        p10_us=p10,
        p90_us=p90,
        rounds=rounds,
        gb_per_s=case.kv_bytes / median / 1e3,
        gflop_per_s=case.flops / median / 1e3,
        roof_fraction=float(np.median(fractions)),
        torch_ratio=float(np.median(times["ours"] / times["torch"])) if against_torch else None,
        **(roofs | {f"roof_{name}": float(roof.rate(np.median(times["roof"])))}),
    )


def _paged(
    case: Case, attn: PagedAttention
) -> tuple[Callable[[], Any], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill a paged cache in random block order; return the call, K and V by sequence, and q."""
    blocks_per_seq = -(-case.context // case.spec.block_size)
    block_table = torch.randperm(case.batch * blocks_per_seq, dtype=torch.int32)
    block_table = block_table.view(case.batch, blocks_per_seq)
    seq_lens = torch.full((case.batch,), case.context, dtype=torch.int32)
    k_cache, v_cache = attn.new_cache(case.batch * blocks_per_seq)
    starts = torch.arange(case.batch + 1, dtype=torch.int32)
    whole = attn.plan(starts * case.context, seq_lens, block_table)
    shape = (case.batch * case.context, case.num_kv_heads, case.spec.head_dim)
    k, v = torch.randn(shape).to(attn.dtype), torch.randn(shape).to(attn.dtype)
    attn.append_kv(k, v, k_cache, v_cache, whole.slot_mapping)
    plan = attn.plan(starts * case.q_len, seq_lens, block_table)
    q = torch.randn(case.batch * case.q_len, attn.num_qo_heads, case.spec.head_dim)
    q = q.to(attn.dtype)
    out = torch.empty_like(q)
    by_seq = (case.batch, case.context, case.num_kv_heads, case.spec.head_dim)
    k, v = (each.view(by_seq).transpose(1, 2).contiguous().to(attn.kv_dtype) for each in (k, v))
    return lambda: attn.run(plan, q, k_cache, v_cache, out=out), k, v, q


def _contiguous(
    case: Case, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return torch's attention over the same keys: not paged, so a bound and no peer."""
    q = q.view(case.batch, case.q_len, -1, case.spec.head_dim).transpose(1, 2)
    k, v = k.to(q.dtype), v.to(q.dtype)
    whole = case.q_len == case.context and case.q_len > 1
    mask = None
    if case.q_len > 1 and not whole:
        rows = torch.arange(case.q_len)[:, None] + case.context - case.q_len
        mask = torch.arange(case.context) <= rows
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=whole, enable_gqa=case.spec.group_size > 1
    )


def _interleave(
    contenders: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Time each contender once per round, the order rotated; microseconds.

    Kernels and torch have threads of their own, and those that wait spin for a while. So each turn
    begins with a call that is not timed: the other's threads go to sleep, its own wake up.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            contenders[name]()
            begin = time.perf_counter_ns()
            contenders[name]()
            times[name].append((time.perf_counter_ns() - begin) / 1e3)
    return {name: np.array(each) for name, each in times.items()}
