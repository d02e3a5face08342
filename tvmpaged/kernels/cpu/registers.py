"""Vector registers, as buffers of one vector each, for parts of programs that Python unrolls.

TVM takes a buffer of 1,024 bytes or more from a pool at run time, and shares the memory of others;
LLVM can make no registers of such memory: an accumulator would be stored after every product. A
buffer of one vector stays on the stack, and all its accesses are whole, so it becomes a register.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


class Register:
    """One vector of `lanes` elements."""

    def __init__(self, lanes: int, dtype: str = "float32") -> None:
        self._buffer = T.sblock_alloc_buffer((lanes,), dtype)
        self._lanes = T.Ramp(0, 1, lanes)
        self.dtype = dtype

    @property
    def value(self) -> Any:
        """What it holds, as an expression."""
        return self._buffer[self._lanes]

    def set(self, value: Any) -> None:
        """Emit the store of a vector."""
        T.buffer_store(self._buffer, value, [self._lanes])


def registers(count: int, lanes: int, dtype: str = "float32") -> list[Register]:
    """Allocate some."""
    return [Register(lanes, dtype) for _ in range(count)]


def zero(vectors: list[Register], lanes: int) -> None:
    """Emit the clearing of some."""
    for each in vectors:
        each.set(T.Broadcast(T.float32(0), lanes))
