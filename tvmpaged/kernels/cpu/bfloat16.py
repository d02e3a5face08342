"""Rounding to bfloat16 by AVX-512's own instructions, which every CPU with AMX for bfloat16 has.

To nearest, ties to even; NaN stays NaN, denormals become 0.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

_LLVM = "llvm.x86.avx512bf16"


def round_vector(value: Any) -> Any:
    """Return the bits of the bfloat16 that 16 lanes of float32 round to."""
    rounded = tirx.call_llvm_pure_intrin("bfloat16x16", f"{_LLVM}.cvtneps2bf16.512", value)
    return tirx.reinterpret("uint16x16", rounded)


def round_two(first: Any, second: Any) -> Any:
    """Return the same of two vectors, laid end to end, as 16 lanes of two bfloat16."""
    rounded = tirx.call_llvm_pure_intrin("bfloat16x32", f"{_LLVM}.cvtne2ps2bf16.512", second, first)
    return tirx.reinterpret("uint32x16", rounded)
