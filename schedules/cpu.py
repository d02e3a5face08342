"""How the programs lie on an x86 CPU: workers over threads, small loops unrolled.

Vectors and register tiles are the programs' own: what is asked for ahead stands among the products
of a tile, and a tile outlives the loop that filled it.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import Schedule

from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec

#: Loops of these blocks with a small constant extent are unrolled, so that scratch of a few vectors
#: becomes registers.
UNROLLED_BLOCKS = ("mask", "rescale", "probs")
UNROLL_LIMIT = 16


def schedule(sch: Schedule, spec: AttentionSpec) -> None:
    """Lay a program out in place."""
    sch.work_on(spec.kernel)
    sch.parallel(sch.get_loops(sch.get_sblock("worker"))[0])
    if spec.kernel in ATTENTION_KERNELS:
        _unroll_small_loops(sch)


def _unroll_small_loops(sch: Schedule) -> None:
    for name in UNROLLED_BLOCKS:
        for block in _blocks(sch, name):
            for loop in sch.get_loops(block):
                _unroll_if_small(sch, loop)


def _blocks(sch: Schedule, name: str) -> list[Any]:
    """Return the blocks called `name`, `name_1`, ... (a program part used more than once)."""
    found: list[Any] = []
    while True:
        suffix = f"_{len(found)}" if found else ""
        try:
            found.append(sch.get_sblock(name + suffix))
        except tvm.s_tir.schedule.ScheduleError:
            return found


def _unroll_if_small(sch: Schedule, loop: Any) -> None:
    extent, kind = sch.get(loop).extent, sch.get(loop).kind
    is_small = isinstance(extent, tvm.tirx.IntImm) and int(extent) <= UNROLL_LIMIT
    if is_small and kind == tvm.tirx.ForKind.SERIAL:
        sch.unroll(loop)
