"""A worker that checks and times compiled candidates on the CPU; needs no compiler.

``{spec, workload, seed, rotation_bytes, num_workers, merge, candidates: [{path, choices}], ...}``
-> ``{samples: [{times_us, disturbed, speedup}], checks: [[{what, error, limit}]]}``, one of each
per candidate, or ``{wrong: why}``.

With ``"roof": true`` it measures the roof instead, in turns with the only candidate if there is
one -> ``{roof: {name, value, fraction}}``.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict
from functools import cache, lru_cache
from typing import Any

from tvmpaged import tvm_libs
from tvmpaged.roofs import roof_for
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.case import Call, Case
from tvmpaged.tuning.check import check, wrong
from tvmpaged.tuning.child import serve
from tvmpaged.tuning.roof import measure_roof
from tvmpaged.tuning.timing import measure
from tvmpaged.tuning.workload import Workload


@cache
def _load_runtime() -> None:
    import tvm_ffi  # noqa: F401, the library links to it

    ctypes.CDLL(str(tvm_libs.find()), ctypes.RTLD_GLOBAL)


@lru_cache(maxsize=8)
def _load(path: str, symbol: str) -> Call:
    _load_runtime()
    import tvm_ffi

    function: Call = tvm_ffi.load_module(path).get_function(symbol)
    return function


@lru_cache(maxsize=1)
def _case(spec: AttentionSpec, workload: str, seed: int, rotation_bytes: int) -> Case:
    step = Workload.from_dict(json.loads(workload))
    num_steps = max(2, -(-rotation_bytes // step.kv_bytes(spec)))
    return Case.make(spec, step, num_steps=num_steps, seed=seed)


def measure_candidates(request: dict[str, Any]) -> dict[str, Any]:
    """Check each candidate against the reference, then time them in turns."""
    if request.get("ping"):
        _load_runtime()
        return {}
    spec, num_workers = AttentionSpec.parse(request["spec"]), request["num_workers"]
    if request.get("roof"):
        return {"roof": _measure_roof(spec, num_workers, request)}
    merge = _load(request["merge"], "merge")
    workload = json.dumps(request["workload"], sort_keys=True)
    case = _case(spec, workload, request["seed"], request["rotation_bytes"])
    calls, checks = [], []
    for candidate in request["candidates"]:
        function = _load(candidate["path"], spec.kernel)
        found = check(spec, function, merge, candidate["choices"], num_workers)
        if why := wrong(found):
            return {"wrong": why}
        checks.append([asdict(each) for each in found])
        calls.append(case.bind(function, merge, candidate["choices"], num_workers))
    samples = measure(
        calls,
        min_seconds=request["min_seconds"],
        max_seconds=request["max_seconds"],
        leading_speedup=request["leading_speedup"],
    )
    return {"samples": [asdict(each) for each in samples], "checks": checks}


def _measure_roof(spec: AttentionSpec, num_workers: int, request: dict[str, Any]) -> dict[str, Any]:
    workload, rotation_bytes = Workload.from_dict(request["workload"]), request["rotation_bytes"]
    roof = roof_for(
        spec.kernel,
        spec.q_dtype,
        num_workers,
        num_bytes=workload.kv_bytes(spec),
        rotation_bytes=rotation_bytes,
    )
    if not request["candidates"]:
        return measure_roof(roof)
    (candidate,) = request["candidates"]
    function = _load(candidate["path"], spec.kernel)
    text = json.dumps(request["workload"], sort_keys=True)
    case = _case(spec, text, request["seed"], rotation_bytes)
    call = case.bind(function, _load(request["merge"], "merge"), candidate["choices"], num_workers)
    return measure_roof(roof, call, workload.amount(spec))


if __name__ == "__main__":
    serve(measure_candidates)
