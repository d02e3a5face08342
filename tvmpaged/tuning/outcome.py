"""What a search found, as the record and the page beside it."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from tvmpaged.records import Record
from tvmpaged.roofs import MeasuredRoof
from tvmpaged.spec import AttentionSpec, TargetKey
from tvmpaged.tuning.finalists import Result
from tvmpaged.tuning.session import Session
from tvmpaged.tuning.setting import Setting


def make_record(
    session: Session,
    setting: Setting,
    result: Result,
    seed: int,
    mlflow_run_id: str | None,
    roof: MeasuredRoof | None = None,
    gpu: dict[str, str] | None = None,
) -> Record:
    """Return what a search found as a record.

    Parameters
    ----------
    session, setting, result, seed, mlflow_run_id
        What was found, and how.
    roof : MeasuredRoof, optional
        That the winner was measured beside, in turns.
    gpu : dict, optional
        What the driver said of the GPU.
    """
    spec: AttentionSpec = session.task.spec
    target: TargetKey = session.task.target
    name, rate = setting.workload.rate(spec, result.latency_us.median)
    rates: dict[str, Any] = {"gb_per_s": None, "gflop_per_s": None} | {name: round(rate, 3)}
    rates |= {"roof_gb_per_s": None, "roof_gflop_per_s": None, "roof_fraction": None}
    if roof is not None and roof.fraction is not None:
        # They were timed in turns, so their ratio holds whatever the machine's speed was then; the
        # roof is given by the winner's time, as all candidates' times are by the default's.
        rates[f"roof_{roof.name}"] = round(rate / roof.fraction, 3)
        rates["roof_fraction"] = round(roof.fraction, 4)
    failures = Counter(session.failures()) + Counter(each.reason for each in result.failures)
    return Record(
        spec=spec,
        target=target,
        choices=dict(result.choices),
        is_default=result.is_default,
        source_sha256=setting.source_sha256,
        tvm=setting.tvm,
        tvm_ffi=setting.tvm_ffi,
        device=setting.device,
        num_threads=setting.num_threads,
        caches_bytes=setting.caches_bytes,
        rotation_bytes=setting.rotation_bytes,
        latency_us=result.latency_us,
        default_latency_us=result.default_latency_us,
        speedup=round(result.speedup, 4),
        workload=setting.workload.as_dict(),
        trials=len(session.trials),
        failures=dict(failures),
        seed=seed,
        mlflow_run_id=mlflow_run_id,
        created_at=datetime.now(UTC).replace(microsecond=0).isoformat(),
        gpu=gpu,
        **rates,
    )
