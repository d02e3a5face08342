"""A worker that checks and times compiled candidates on one device; needs no compiler.

Which device stands in its environment (`DEVICE_VARIABLE`).

``{spec, workload, seed, rotation_bytes, num_workers, merge, candidates: [{path, choices}], ...}``
-> ``{samples: [{times_us, disturbed, speedup}], checks: [[{what, error, limit}]]}``, one of each
per candidate, or ``{wrong: why}``.

With ``"roof": true`` it measures the roof instead, in turns with the only candidate if there is
one -> ``{roof: {name, value, fraction}}``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import cache, lru_cache, partial
from typing import Any

import torch

from tvmpaged import tvm_libs
from tvmpaged.cpu import cpu_flags
from tvmpaged.roofs import roof_for
from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.case import Call, Case
from tvmpaged.tuning.check import check, wrong
from tvmpaged.tuning.child import serve
from tvmpaged.tuning.clock import clock_for
from tvmpaged.tuning.device import DEVICE_VARIABLE
from tvmpaged.tuning.roof import measure_roof
from tvmpaged.tuning.timing import measure
from tvmpaged.tuning.workload import Workload


@cache
def _device() -> torch.device:
    """Return the device, ready for kernels; torch's current stream on it is what they run on."""
    import tvm_ffi  # noqa: F401, what is loaded next links to it

    cpu_flags()  # asks for tile registers: a new process has none, and AMX would end it
    device = torch.device(os.environ.get(DEVICE_VARIABLE, "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    tvm_libs.load(device.type)
    return device


@lru_cache(maxsize=8)
def _load(path: str, symbol: str) -> Call:
    _device()
    import tvm_ffi

    function: Call = tvm_ffi.load_module(path).get_function(symbol)
    return function


@lru_cache(maxsize=1)
def _case(spec: AttentionSpec, workload: str, seed: int, rotation_bytes: int) -> Case:
    step = Workload.from_dict(json.loads(workload))
    num_steps = max(2, -(-rotation_bytes // step.kv_bytes(spec)))
    return Case.make(spec, step, num_steps=num_steps, seed=seed, device=_device())


def measure_candidates(request: dict[str, Any]) -> dict[str, Any]:
    """Check each candidate against the reference, then time them in turns."""
    if request.get("ping"):
        _device()
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
        found = check(spec, function, merge, candidate["choices"], num_workers, _device())
        if why := wrong(found):
            return {"wrong": why}
        checks.append([asdict(each) for each in found])
        calls.append(case.bind(function, merge, candidate["choices"], num_workers))
    samples = measure(
        calls,
        partial(clock_for, _device()),
        min_seconds=request["min_seconds"],
        max_seconds=request["max_seconds"],
        leading_speedup=request["leading_speedup"],
    )
    return {"samples": [asdict(each) for each in samples], "checks": checks}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request; end the process when a kernel broke the GPU's context.

    After an illegal access every call there fails, so the candidates that follow would bear it.
    """
    try:
        return measure_candidates(request)
    except Exception:
        if _device().type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as broken:
                print(str(broken).splitlines()[0], file=sys.stderr, flush=True)
                os._exit(1)
        raise


def _measure_roof(spec: AttentionSpec, num_workers: int, request: dict[str, Any]) -> dict[str, Any]:
    workload, rotation_bytes = Workload.from_dict(request["workload"]), request["rotation_bytes"]
    roof = roof_for(
        spec.kernel,
        spec.q_dtype,
        num_workers,
        num_bytes=workload.kv_bytes(spec),
        rotation_bytes=rotation_bytes,
        device=_device(),
    )
    make_clock = partial(clock_for, _device())
    if not request["candidates"]:
        return measure_roof(roof, make_clock)
    (candidate,) = request["candidates"]
    function = _load(candidate["path"], spec.kernel)
    text = json.dumps(request["workload"], sort_keys=True)
    case = _case(spec, text, request["seed"], rotation_bytes)
    call = case.bind(function, _load(request["merge"], "merge"), candidate["choices"], num_workers)
    return measure_roof(roof, make_clock, call, workload.amount(spec))


if __name__ == "__main__":
    serve(answer)
