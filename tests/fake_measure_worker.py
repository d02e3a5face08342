"""A measuring worker without kernels: a candidate's file says what becomes of it.

``python -m fake_measure_worker`` with tests/ on the path. A file holds a fate and microseconds:
``ok 500``, ``slow 500`` (takes a while to answer), ``crash``, ``hang``, ``wrong``,
``error``, ``odd`` or ``early`` (something else comes before its answer).
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from tvmpaged.spec import AttentionSpec
from tvmpaged.tuning.child import serve
from tvmpaged.tuning.limits import limits


def handle(request: dict[str, Any]) -> dict[str, Any]:
    if request.get("ping"):
        return {}
    if request.get("roof"):
        fraction = 0.5 if request["candidates"] else None
        return {"roof": {"name": "gb_per_s", "value": 120.0, "fraction": fraction}}
    spec = AttentionSpec.parse(request["spec"])
    times, checks = [], []
    for each in request["candidates"]:
        fate, _, us = Path(each["path"]).read_text().partition(" ")
        if fate == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fate in ("hang", "slow"):
            time.sleep(45 if fate == "hang" else 0.15)
        if fate in ("odd", "early"):
            # Over the pipe that holds the answers, as a stray write would.
            for pipe in Path("/proc/self/fd").iterdir():
                if int(pipe.name) > 2 and str(pipe.readlink()).startswith("pipe:"):
                    os.write(int(pipe.name), b"{}\n" if fate == "odd" else b'{"samples": [1]}\n')
        if fate == "wrong":
            return {"wrong": "relative error 1.00e+00 of sequence 3, of length 16, is over 1.0e-05"}
        if fate == "error":
            raise ValueError("no such symbol")
        times.append(float(us or 1))
        allowed = limits(spec, each["choices"]).items()
        checks.append(
            [{"what": what, "error": limit / 2, "limit": limit} for what, limit in allowed]
        )
    samples = [
        {
            "times_us": [us * factor for factor in (1.0, 1.01, 0.99, 1.02, 0.98, 1.0)],
            "disturbed": 0,
            "speedup": times[0] / us,
        }
        for us in times
    ]
    return {"samples": samples, "checks": checks}


if __name__ == "__main__":
    serve(handle)
