"""2**x for x <= 0 as a polynomial, so that it vectorises (the library call does not).

2**x = 2**i * 2**f with i = floor(x), f in [0, 1). 2**i is put together from its exponent bits;
2**f is a degree-6 polynomial, the Chebyshev interpolant of 2**f on [0, 1] converted to powers of f
(relative error below 2e-7, about the rounding of float32 itself; `tests/test_exp2.py` measures it).
"""

from __future__ import annotations

import math

from numpy.polynomial import Chebyshev, Polynomial
from tvm import tirx

#: e**x = 2**(x * LOG2E).
LOG2E = 1.0 / math.log(2.0)

#: Below this 2**x is flushed to exactly 0: the exponent bits of 2**-127 are all zero.
FLUSH_BELOW = -127.0


def _coefficients(degree: int) -> list[float]:
    fit = Chebyshev.interpolate(lambda f: 2.0**f, degree, domain=[0, 1])
    return [float(c) for c in fit.convert(kind=Polynomial).coef]


COEFFICIENTS = _coefficients(6)


def exp2(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the float32 expression of 2**x for x <= 0.

    -inf and everything below `FLUSH_BELOW` give exactly 0; NaN gives NaN (the comparison with NaN
    is false, so it passes through: a NaN in q or in a visible key must show in the output).
    """
    clamped = tirx.Select(
        x < tirx.const(FLUSH_BELOW, "float32"), tirx.const(FLUSH_BELOW, "float32"), x
    )
    whole = tirx.floor(clamped)
    rest = clamped - whole
    power = tirx.const(COEFFICIENTS[-1], "float32")
    for coefficient in reversed(COEFFICIENTS[:-1]):
        power = power * rest + tirx.const(coefficient, "float32")
    exponent = (tirx.Cast("int32", whole) + tirx.const(127, "int32")) << tirx.const(23, "int32")
    return power * tirx.reinterpret("float32", exponent)


#: For probabilities that are rounded to bfloat16: degree 4, relative error below 4e-6, which the
#: log-sum-exp keeps.
SHORT_COEFFICIENTS = _coefficients(4)
_LANES = 16


def exp2_native(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return 2**x for 16 lanes of float32 x <= 0, for code that AVX-512 runs and 16 bits store.

    VREDUCEPS gives x - floor(x) and VSCALEFPS multiplies by 2**floor(x), down to denormals and 0;
    -inf gives 0, NaN gives NaN.
    """
    vector = f"float32x{_LANES}"
    every = tirx.const(-1, "int16")

    def constant(value: float) -> tirx.PrimExpr:
        return tirx.Broadcast(tirx.const(value, "float32"), _LANES)

    rest = tirx.call_llvm_pure_intrin(
        vector,
        "llvm.x86.avx512.mask.reduce.ps.512",
        x,
        tirx.const(9, "int32"),  # towards -inf, exceptions suppressed
        x,
        every,
        tirx.const(4, "int32"),
    )
    power = constant(SHORT_COEFFICIENTS[-1])
    for coefficient in reversed(SHORT_COEFFICIENTS[:-1]):
        power = power * rest + constant(coefficient)
    return tirx.call_llvm_pure_intrin(
        vector,
        "llvm.x86.avx512.mask.scalef.ps.512",
        power,
        x,
        power,
        every,
        tirx.const(4, "int32"),
    )
