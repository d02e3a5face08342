"""From scores ``[rows, keys]`` to probabilities of the same shape, for few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cpu.fold import fold_lanes
from tvmpaged.kernels.cpu.registers import Register, registers
from tvmpaged.kernels.exp2 import LOG2E, exp2_vector
from tvmpaged.kernels.tile import NEG_INF, Tile


def softmax(t: Tile) -> Callable[..., Any]:
    """Return the program part from scores to probabilities, with the running row statistics.

    It takes the first `groups` vectors of scores of each row.
    """
    rows, lanes = t.rows, t.lanes

    def every(value: Any) -> Any:
        return T.Broadcast(value, lanes)

    def at(r: int, g: Any) -> list[Any]:
        return [r, T.Ramp(g * lanes, 1, lanes)]

    def load(row_max: Any) -> list[Register]:
        tops = registers(rows, lanes)
        for r, top in enumerate(tops):
            top.set(every(row_max[r]))
        return tops

    def mask(scores: Any, limit: Any, key: Any, g: Any, sm_scale: Any, tops: Any) -> None:
        """Emit the scaling and masking of a group's scores, and their maxima."""
        for r, top in enumerate(tops):
            row, keys = at(r, g)
            visible = T.Ramp(key + g * lanes, 1, lanes) < every(limit[r])
            scaled = scores[row, keys] * every(sm_scale)
            T.buffer_store(
                scores, T.Select(visible, scaled, every(T.float32(NEG_INF))), [row, keys]
            )
            top.set(T.max(top.value, scores[row, keys]))

    def rescale_sums(row_max: Any, row_sum: Any, rescale: Any, tops: Any) -> list[Register]:
        """Emit the new maxima; return the sums so far, on their scale."""
        sums, factor = registers(rows, lanes), Register(lanes)
        for r, top in enumerate(tops):
            fold_lanes(T.max, top, lanes)
            # All lanes are alike: a vector's instructions take no branch, and move no lane.
            factor.set(every(row_max[r]))
            T.buffer_store(row_max, T.Shuffle([top.value], [0]), [r])
            # A row that has seen no key yet has -inf as its maximum; 0 stands in for it as the
            # base of the exponentials, so that no -inf is subtracted from another.
            unseen = top.value == every(T.float32(NEG_INF))
            top.set(T.Select(unseen, every(T.float32(0)), top.value))
            factor.set((factor.value - top.value) * every(T.float32(LOG2E)))
            factor.set(exp2_vector(factor.value, lanes))
            T.buffer_store(rescale, T.Shuffle([factor.value], [0]), [r])
            sums[r].set(row_sum[r, T.Ramp(0, 1, lanes)] * factor.value)
        return sums

    def weights(scores: Any, probs: Any, g: Any, bases: Any, sums: Any) -> None:
        """Emit a group's probabilities."""
        for r, total in enumerate(sums):
            row, keys = at(r, g)
            power = (scores[row, keys] - bases[r].value) * every(T.float32(LOG2E))
            T.buffer_store(probs, power, [row, keys])
            T.buffer_store(probs, exp2_vector(probs[row, keys], lanes), [row, keys])
            total.set(total.value + probs[row, keys])

    def store(row_sum: Any, sums: Any) -> None:
        for r, total in enumerate(sums):
            T.buffer_store(row_sum, total.value, [r, T.Ramp(0, 1, lanes)])

    @T.inline
    def run(scores, probs, groups, limit, key, sm_scale, row_max, row_sum, rescale):
        tops = T.meta_var(load(row_max))
        for group in range(groups):
            with T.sblock("mask"):
                g = T.axis.opaque(groups, group)
                T.reads()
                T.writes()
                mask(scores, limit, key, g, sm_scale, tops)
        sums = T.meta_var(rescale_sums(row_max, row_sum, rescale, tops))
        for group in range(groups):
            with T.sblock("probs"):
                g = T.axis.opaque(groups, group)
                T.reads()
                T.writes()
                weights(scores, probs, g, tops, sums)
        store(row_sum, sums)

    return run
