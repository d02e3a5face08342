"""Measure kernels as they are served, beside torch in the same run.

Machines are shared and noisy, so nothing is measured alone: each round times our `run`, torch's
attention over the same keys in contiguous memory, and the machine's roof (`tvmpaged.roofs`), in
turns. Ratios of one run are what counts; an absolute time says little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tvmpaged.bench_case import Case, Filled
from tvmpaged.bundle import host_for, resolve, scan
from tvmpaged.roofs import roof_for
from tvmpaged.runtime.attention import PagedAttention
from tvmpaged.runtime.place import Place, place_of
from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec
from tvmpaged.tuning.clock import Clock, clock_for

__all__ = ["Case", "Row", "bench", "specs_in"]

SCHEMA_VERSION = 3


@dataclass(frozen=True)
class Row:
    """What one case took; ratios are medians of ratios, round by round.

    Parameters
    ----------
    spec, kind, artifact, target : str
        What ran, and where.
    layout : str
        The cache's layout.
    num_kv_heads, batch, context, q_len, num_threads : int
        The case; threads, or a GPU's multiprocessors.
    median_us, p10_us, p90_us : float
        Time of `run`, microseconds.
    rounds : int
        How often each was timed.
    gb_per_s, gflop_per_s : float
        K and V read, and operations done, per second, at the median.
    roof_gb_per_s, roof_gflop_per_s : float or None
        What bounds the kernel on this machine (`tvmpaged.roofs`): a read of as many bytes for
        decode (on a GPU a large copy), a matrix product for prefill; at the median.
    roof_fraction : float
        Our rate over the roof's.
    torch_ratio : float or None
        Our time over that of torch's attention on contiguous K and V; less than 1 is faster.
    flashinfer_ratio : float or None
        Our time over FlashInfer's on the same cache; None where it is not installed.
    error : float or None
        ||out - truth|| / ||truth||, where the truth is torch's attention in float32.
    """

    spec: str
    kind: str
    artifact: str
    target: str
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
    flashinfer_ratio: float | None
    error: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def bench(
    cases: Iterable[Case],
    *,
    bundle: str | None = None,
    device: str = "cpu",
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
    device : str
        ``cpu``, or a GPU such as ``cuda:0``.
    against_torch : bool
        Whether to time torch's attention too, and FlashInfer's where it is installed.
    rounds : int
        How often each is timed.
    seed : int
        Of the random inputs.
    on_row : callable
        Called with each finished row.

    Raises
    ------
    ValueError
        When a spec is no attention kernel or leaves its sizes open, or the device is not there.
    FileNotFoundError
        When no artifact serves a spec.
    """
    rows, place = [], place_of(device)
    for case in cases:
        if case.spec.kernel not in ATTENTION_KERNELS or case.spec.is_generic:
            raise ValueError(f"spec={case.spec} cannot be measured: name its sizes")
        if not 1 <= case.q_len <= case.context:
            raise ValueError(f"q_len={case.q_len} must be in 1..context={case.context}")
        rows.append(_measure(case, bundle, place, against_torch, rounds, seed))
        on_row(rows[-1])
    return rows


def specs_in(bundle: str, device: str = "cpu") -> list[AttentionSpec]:
    """Return the specs of a bundle's attention kernels that run on a device and fix their sizes.

    Raises
    ------
    ValueError
        When there is none.
    """
    host = host_for(place_of(device).target)
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


def _measure(
    case: Case, bundle: str | None, place: Place, against_torch: bool, rounds: int, seed: int
) -> Row:
    spec = case.spec
    attn = PagedAttention(
        case.num_kv_heads * spec.group_size,
        case.num_kv_heads,
        spec.head_dim,
        spec.block_size,
        spec.q_dtype,
        kv_dtype=spec.kv_dtype,
        kv_layout=spec.layout,
        device=place.device,
        bundle=bundle,
    )
    if not place.is_gpu:
        torch.set_num_threads(place.num_units)
    filled = Filled.make(case, attn, seed)
    # Each contender reads bytes of its own, once a turn: none profits from another's.
    sizes = {"num_bytes": case.kv_bytes, "rotation_bytes": case.kv_bytes}
    roof = roof_for(spec.kernel, spec.q_dtype, place.num_units, **sizes, device=place.device)
    contenders: dict[str, Callable[[], Any]] = {"ours": filled.ours, "roof": roof.call}
    error = None
    if against_torch:
        error = filled.error()
        contenders["torch"] = filled.torch_attention()
        peer = filled.flashinfer_attention()
        if peer is not None:
            contenders["flashinfer"] = peer
    times = _interleave(contenders, rounds, partial(clock_for, place.device))
    described = attn.describe()["kernels"][spec.kernel]
    name, amount = case.bound
    roofs = {"roof_gb_per_s": None, "roof_gflop_per_s": None}
    fractions = amount / times["ours"] / 1e3 / roof.rate(times["roof"])
    median, p10, p90 = (float(np.percentile(times["ours"], p)) for p in (50, 10, 90))

    def ratio(other: str) -> float | None:
        return float(np.median(times["ours"] / times[other])) if other in times else None

    return Row(
        spec=str(spec),
        kind=described["kind"],
        artifact=str(described["sha256"]),
        target=str(place.target),
        layout=attn.kv_layout,
        num_kv_heads=case.num_kv_heads,
        batch=case.batch,
        context=case.context,
        q_len=case.q_len,
        num_threads=place.num_units,
        median_us=median,
        p10_us=p10,
        p90_us=p90,
        rounds=rounds,
        gb_per_s=case.kv_bytes / median / 1e3,
        gflop_per_s=case.flops / median / 1e3,
        roof_fraction=float(np.median(fractions)),
        torch_ratio=ratio("torch"),
        flashinfer_ratio=ratio("flashinfer"),
        error=error,
        **(roofs | {f"roof_{name}": float(roof.rate(np.median(times["roof"])))}),
    )


def _interleave(
    contenders: dict[str, Callable[[], Any]], rounds: int, make_clock: Callable[[], Clock]
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Time each contender once per round, the order rotated; microseconds.

    Kernels and torch have threads of their own, and those that wait spin for a while. So each turn
    begins with a call that is not timed: the other's threads go to sleep, its own wake up.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    clock = make_clock()
    try:
        for index in range(rounds):
            shift = index % len(names)
            for name in names[shift:] + names[:shift]:
                contenders[name]()
                times[name].append(clock.once(contenders[name]).us)
    finally:
        clock.close()
    return {name: np.array(each) for name, each in times.items()}
