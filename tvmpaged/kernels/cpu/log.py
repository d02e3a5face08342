"""The natural logarithm of sums as a polynomial, so that it vectorises (the library call does not).

log x = e log 2 + log m with x = 2**e m, m in [1, 2). log(1 + t) / t on [0, 1] is the Chebyshev
interpolant of degree 9, converted to powers of t; the error is about the rounding of float32
(`tests/test_log.py` measures it).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from tvm import tirx


def _coefficients(degree: int) -> list[float]:
    def ratio(t: np.ndarray) -> np.ndarray:
        return np.log1p(t) / t

    fit = Chebyshev.interpolate(ratio, degree, domain=[0, 1])
    return [float(c) for c in fit.convert(kind=Polynomial).coef]


_COEFFICIENTS = _coefficients(9)
_ONE_BITS, _FRACTION = 0x3F800000, 0x7FFFFF


def log(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Return the float32 expression of log x for a normal x > 0; 0 gives 0, NaN gives NaN."""
    bits = tirx.reinterpret("int32", x)
    exponent = (bits >> tirx.const(23, "int32")) - tirx.const(127, "int32")
    fraction = (bits & tirx.const(_FRACTION, "int32")) | tirx.const(_ONE_BITS, "int32")
    t = tirx.reinterpret("float32", fraction) - tirx.const(1.0, "float32")
    power = tirx.const(_COEFFICIENTS[-1], "float32")
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        power = power * t + tirx.const(coefficient, "float32")
    whole = tirx.Cast("float32", exponent) * tirx.const(math.log(2.0), "float32")
    # The bits of a NaN were taken for a number; a NaN is not greater than anything.
    return tirx.Select(x > tirx.const(0.0, "float32"), power * t + whole, x)
