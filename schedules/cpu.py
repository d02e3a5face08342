"""How the programs lie on an x86 CPU: threads, register tiles, unrolling.

Vectors are the programs' own `lanes`. What is laid out here: workers over threads; in the two
products, which loops form the register tile (and are unrolled) and which one runs inside it.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.s_tir import Schedule

from tvmpaged.spec import ATTENTION_KERNELS, AttentionSpec

#: Loops of these blocks with a small constant extent are unrolled, so that scratch of a few vectors
#: becomes registers.
UNROLLED_BLOCKS = (
    "start_dot",
    "fold",
    "start_tops",
    "mask",
    "rescale",
    "rescale_sum",
    "probs",
)
UNROLL_LIMIT = 16


def schedule(sch: Schedule, spec: AttentionSpec, choices: dict[str, Any]) -> None:
    """Lay a program out in place."""
    sch.work_on(spec.kernel)
    sch.parallel(sch.get_loops(sch.get_sblock("worker"))[0])
    if spec.kernel in ATTENTION_KERNELS:
        if choices["isa"] == "amx":
            _unroll_small_loops(sch)
        elif choices["step"] == "columns":
            _tile_columns(sch, choices)
        else:
            _tile_rows(sch, choices)
            _unroll_small_loops(sch)


def _extent(sch: Schedule, loop: Any) -> int | None:
    extent = sch.get(loop).extent
    return int(extent) if isinstance(extent, tvm.tirx.IntImm) else None


def _inner_loops(sch: Schedule, block: str, count: int) -> list[Any]:
    return list(sch.get_loops(sch.get_sblock(block))[-count:])


def _split(sch: Schedule, loop: Any, factor: int) -> Any:
    """Split `factor` iterations off a loop; the rules saw to it that they divide it."""
    return sch.split(loop, [None, factor])


def _tile_rows(sch: Schedule, choices: dict[str, Any]) -> None:
    r, k, do, x = _inner_loops(sch, "dot", 4)
    k_outer, k_inner = _split(sch, k, choices["dot_keys"])
    do_outer, do_inner = _split(sch, do, choices["dot_unroll"])
    sch.reorder(k_outer, do_outer, do_inner, k_inner, r, x)
    for loop in (do_inner, k_inner, r):
        sch.unroll(loop)
    r, do, k, x = _inner_loops(sch, "weigh", 4)
    do_outer, do_inner = _split(sch, do, choices["weigh_vectors"])
    sch.reorder(do_outer, k, do_inner, r, x)
    sch.unroll(do_inner)
    sch.unroll(r)


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
    extent, kind = _extent(sch, loop), sch.get(loop).kind
    if extent is not None and extent <= UNROLL_LIMIT and kind == tvm.tirx.ForKind.SERIAL:
        sch.unroll(loop)


def _tile_columns(sch: Schedule, choices: dict[str, Any]) -> None:
    k, ro, d, x = _inner_loops(sch, "dot", 4)
    k_outer, k_inner = _split(sch, k, choices["dot_keys"])
    ro_outer, ro_inner = _split(sch, ro, choices["dot_vectors"])
    sch.reorder(k_outer, ro_outer, d, k_inner, ro_inner, x)
    sch.unroll(k_inner)
    sch.unroll(ro_inner)
    r, do, k, x = _inner_loops(sch, "weigh", 4)
    r_outer, r_inner = _split(sch, r, choices["weigh_rows"])
    do_outer, do_inner = _split(sch, do, choices["weigh_vectors"])
    sch.reorder(r_outer, do_outer, k, r_inner, do_inner, x)
    sch.unroll(r_inner)
    sch.unroll(do_inner)
