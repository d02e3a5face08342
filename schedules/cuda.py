"""How the programs lie on a GPU.

Threads stand in the programs: which of them shares what with which is the algorithm's business, as
vectors are (`tvmpaged.kernels.cuda.walk_threads`). Here workers become thread blocks.
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmpaged.spec import AttentionSpec


def schedule(sch: Schedule, spec: AttentionSpec) -> None:
    """Lay a program out in place."""
    sch.work_on(spec.kernel)
    sch.bind(sch.get_loops(sch.get_sblock("worker"))[0], "blockIdx.x")
    if spec.kernel == "merge":
        sch.bind(sch.get_loops(sch.get_sblock("head"))[-1], "blockIdx.y")
