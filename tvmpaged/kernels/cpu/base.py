"""The base of a row's probabilities: what is taken from its scores before 2**x.

Any base gives the same softmax; a row's maximum keeps 2**x from overflowing, and so does a number a
little below it. So a base stays until a maximum is above it by more than `LAG`, as a power of 2.
Sums and accumulators are on its scale and have to be multiplied when it rises, which is then rare.
Probabilities may reach 2**LAG; rounded or summed they are as exact as others. Which base a row has
follows from its keys alone.

A power is score x factor - shift, one instruction, where the shift is base x factor, rounded. All
keys of a row share its error, at most 2**-5 up to `FAR` and then less than that of the row's
log-sum-exp; a greater base is taken from the scores first, so that finite logits of any size stay
finite.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.tile import NEG_INF
from tvmpaged.kernels.tile_registers import SIDE

#: Enough for most rows to keep the base of their first keys, and little beside float32's range.
LAG = 8.0

#: Above this a base times the factor is no shift.
FAR = 2.0**20


def _every(value: Any) -> Any:
    return T.Broadcast(value, SIDE)


def risen(base: Any, top: Any, factor: Any) -> Any:
    """Return 16 rows' bases after keys whose greatest scores are `top`.

    The factor makes powers of scores. NaN raises no base: it shows in its own probability.
    """
    rises = (top - base) * _every(factor) > _every(T.float32(LAG))
    return T.Select(rises, top, base)


def finite(base: Any) -> Any:
    """Return 0 for the base of a row that has seen no key yet: -inf less -inf would be NaN."""
    return T.Select(base == _every(T.float32(NEG_INF)), _every(T.float32(0)), base)


def is_far(shift: Any) -> Any:
    """Return, lane by lane, whether a shift is too great."""
    return shift * shift > _every(T.float32(FAR * FAR))


def any_lane(condition: Any) -> Any:
    """Return whether a condition holds in any lane of a vector."""
    return tirx.call_llvm_pure_intrin("bool", "llvm.vector.reduce.or", condition)
