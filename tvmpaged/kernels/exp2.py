"""2**x for x <= 0 as a polynomial, so that it vectorises (the library call does not).

2**x = 2**i * 2**f with i = floor(x), f in [0, 1). 2**i is put together from its exponent bits;
2**f is a degree-6 polynomial, the Chebyshev interpolant of 2**f on [0, 1] converted to powers of f
(relative error below 2e-7, about the rounding of float32 itself; `tests/test_exp2.py` measures it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def _constant(value: float, dtype: str, lanes: int) -> tirx.PrimExpr:
    scalar = tirx.const(value, dtype)
    return scalar if lanes == 1 else tirx.Broadcast(scalar, lanes)


def exp2(x: tirx.PrimExpr, lanes: int = 1) -> tirx.PrimExpr:
    """Return the float32 expression of 2**x for x <= 0, a scalar or a vector.

    -inf and everything below `FLUSH_BELOW` give exactly 0; NaN gives NaN (the comparison with NaN
    is false, so it passes through: a NaN in q or in a visible key must show in the output).
    """
    least = _constant(FLUSH_BELOW, "float32", lanes)
    clamped = tirx.Select(x < least, least, x)
    whole = tirx.floor(clamped)
    rest = clamped - whole
    power = _constant(COEFFICIENTS[-1], "float32", lanes)
    for coefficient in reversed(COEFFICIENTS[:-1]):
        power = power * rest + _constant(coefficient, "float32", lanes)
    vector = "" if lanes == 1 else f"x{lanes}"
    exponent = tirx.Cast(f"int32{vector}", whole) + _constant(127, "int32", lanes)
    exponent = exponent << _constant(23, "int32", lanes)
    return power * tirx.reinterpret(f"float32{vector}", exponent)


#: For probabilities that are rounded to bfloat16: degree 4, relative error below 4e-6, which the
#: log-sum-exp keeps.
SHORT_COEFFICIENTS = _coefficients(4)
#: Lanes of a vector of AVX-512, which has instructions for both ends of the calculation.
NATIVE_LANES = 16


def exp2_native(
    x: tirx.PrimExpr, coefficients: Sequence[float] = tuple(COEFFICIENTS)
) -> tirx.PrimExpr:
    """Return 2**x for 16 lanes of float32 x <= 0, for code that AVX-512 runs.

    VREDUCEPS gives x - floor(x) and VSCALEFPS multiplies by 2**floor(x), down to denormals and 0;
    -inf gives 0, NaN gives NaN. Where `exp2` does not flush, the two differ by a rounding at most.
    """
    vector = f"float32x{NATIVE_LANES}"
    every = tirx.const(-1, "int16")

    rest = tirx.call_llvm_pure_intrin(
        vector,
        "llvm.x86.avx512.mask.reduce.ps.512",
        x,
        tirx.const(9, "int32"),  # towards -inf, exceptions suppressed
        x,
        every,
        tirx.const(4, "int32"),
    )
    power = _constant(coefficients[-1], "float32", NATIVE_LANES)
    for coefficient in reversed(coefficients[:-1]):
        power = power * rest + _constant(coefficient, "float32", NATIVE_LANES)
    return tirx.call_llvm_pure_intrin(
        vector,
        "llvm.x86.avx512.mask.scalef.ps.512",
        power,
        x,
        power,
        every,
        tirx.const(4, "int32"),
    )


def exp2_vector(x: tirx.PrimExpr, lanes: int) -> tirx.PrimExpr:
    """Return 2**x for a vector of x <= 0: by AVX-512's instructions where it is that wide."""
    return exp2_native(x) if lanes == NATIVE_LANES else exp2(x, lanes)
