"""AMX instructions as expressions: LLVM's intrinsics that name a tile register by its number.

No schedule primitive fits them: what a register holds outlives the loop that filled it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvmpaged.kernels.tile_registers import TileRegisters


def _intrinsic(name: str, *arguments: Any) -> Any:
    return tirx.call_llvm_intrin("void", f"llvm.x86.{name}", *arguments)


def _number(register: Any) -> Any:
    return T.uint8(register) if isinstance(register, int) else tirx.Cast("uint8", register)


def zero(register: Any) -> Any:
    """Clear a register."""
    return _intrinsic("tilezero", _number(register))


def load(register: Any, address: Any, stride_bytes: Any) -> Any:
    """Load a register's rows from memory, `stride_bytes` apart."""
    return _intrinsic("tileloadd64", _number(register), address, tirx.Cast("int64", stride_bytes))


def store(register: Any, address: Any, stride_bytes: Any) -> Any:
    """Store a register's rows to memory, `stride_bytes` apart."""
    return _intrinsic("tilestored64", _number(register), address, tirx.Cast("int64", stride_bytes))


def dot(c: Any, a: Any, b: Any) -> Any:
    """Add to register `c` the product of `a` and `b` (`tile_registers`)."""
    return _intrinsic("tdpbf16ps", _number(c), _number(a), _number(b))


def configure(registers: TileRegisters) -> Callable[..., Any]:
    """Return the program part that gives the registers their shapes; `words` is 8 x int64."""
    data = registers.configuration()

    @T.inline
    def start(words):
        words[0] = T.int64(data[0])
        words[1] = T.int64(data[1])
        words[2] = T.int64(data[2])
        words[3] = T.int64(data[3])
        words[4] = T.int64(data[4])
        words[5] = T.int64(data[5])
        words[6] = T.int64(data[6])
        words[7] = T.int64(data[7])
        T.evaluate(_intrinsic("ldtilecfg", T.address_of(words[0])))

    return start


def release() -> Any:
    """Give the registers back: their state need not be saved any longer."""
    return _intrinsic("tilerelease")
