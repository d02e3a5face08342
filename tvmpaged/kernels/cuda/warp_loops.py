"""What the lanes of a warp do together, written out: for devices without a GPU's instructions.

Each part does, over all lanes of all warps, what the instruction of the same name in
`warp_instructions` is specified to do (PTX ISA, "Matrix Fragments" and "ldmatrix"). A lane's
registers lie in shared memory, where the others read them between two barriers of the block. So the
rest of a program, which is the same, can be executed where there is no GPU.

Copies are done when they are started, and sums are added one after the other in float32: in which
order a tensor core adds is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.warp_grid import (
    HALF,
    REGISTERS,
    SIDE,
    Place,
    Warps,
    left_holder,
    right_holder,
    sum_place,
)
from tvmpaged.kernels.tile import Expr
from tvmpaged.sm import WARP_SIZE


class Loops:
    """The parts of a program that need a warp's instructions, without them.

    Fragments are ``[warps, lanes, registers]``: all lanes'.
    """

    fragment_scope, tile_scope = "shared", "shared"

    def __init__(self, w: Warps) -> None:
        self.w = w
        self.warps = w.row_warps * w.key_warps
        self.dtype = w.tile.cache.spec.kv_dtype

    def fragment(self, registers: int) -> tuple[int, ...]:
        """Return the shape of a fragment of so many registers a lane."""
        return (self.warps, WARP_SIZE, registers)

    def place(self, warp: Expr, lane: Expr) -> Place:
        """Return where a thread stands."""
        return self.w.place(warp, lane, warp, lane)

    def each(self, count: int) -> Any:
        """Return a loop over registers, which are memory here: the program stays short."""
        return T.serial(count)

    def bits(self, value: Any) -> Any:
        """Return the bits of a 16-bit number, as uint32.

        TVM widens bfloat16 to float32 where a device has none, which leaves 16 zeros below them.
        """
        if self.dtype == "bfloat16":
            wide = T.reinterpret("uint32", T.Cast("float32", value))
            return T.shift_right(wide, T.uint32(16))
        return T.Cast("uint32", T.reinterpret("uint16", value))

    def copy(self) -> Callable[..., Any]:
        """Return the part that copies 16 bytes of the cache; zeros where `exists` is not."""
        c, lanes, bits = self.w.tile.cache, self.w.tile.lanes, self.bits

        @T.inline
        def copy(cache, block, kv_head, slot, dim, exists, tile, place):
            for i in T.serial(lanes):
                tile[place + i] = T.uint16(0)
            if exists:
                for i in T.serial(lanes):
                    tile[place + i] = T.Cast(
                        "uint16", bits(c.at(cache, block, kv_head, slot, dim + i))
                    )

        return copy

    def commit(self) -> Any:
        """Close a group of copies: they are done."""
        return 0

    def wait(self, _pending: int) -> Any:
        """Wait for copies: they are done."""
        return 0

    def load(self, place: Callable[[Any], Any], transposed: bool = False) -> Callable[..., Any]:
        """Return the part that loads four 8 x 8 matrices from `base` of a tile: 16 x 16.

        Of each of four matrices, whose rows begin where 8 lanes say, a lane gets two elements that
        follow each other in a row, or, transposed, in a column; the first in the lower half.
        """

        def element(lane: Expr, matrix: Expr, half: int) -> Expr:
            row, pair = lane // 4, lane % 4 * 2 + half
            if transposed:
                row, pair = pair, row
            return place(matrix * HALF + row) + pair

        @T.inline
        def load(factor, f, at, tile, base):
            for matrix in T.serial(REGISTERS):
                factor[at.y, at.x, f + matrix] = T.bitwise_or(
                    T.Cast("uint32", tile[base + element(at.lane, matrix, 0)]),
                    T.shift_left(
                        T.Cast("uint32", tile[base + element(at.lane, matrix, 1)]), T.uint32(16)
                    ),
                )

        return load

    def _half(self, packed: Any, which: Expr) -> Any:
        """Return one of the two numbers of a register as float32."""
        bits = T.bitwise_and(T.shift_right(packed, T.Cast("uint32", which * 16)), T.uint32(0xFFFF))
        if self.dtype == "bfloat16":
            return T.reinterpret("float32", T.shift_left(bits, T.uint32(16)))
        return T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", bits)))

    def _rounded(self, value: Any) -> Any:
        """Return the bits of a float32 rounded to 16 bits, to the nearest and to even, as uint32.

        In whole numbers for bfloat16: TVM would widen and cut it off without rounding.
        """
        if self.dtype != "bfloat16":
            return self.bits(T.Cast(self.dtype, value))
        wide = T.reinterpret("uint32", value)
        odd = T.bitwise_and(T.shift_right(wide, T.uint32(16)), T.uint32(1))
        near = T.shift_right(wide + T.uint32(0x7FFF) + odd, T.uint32(16))
        return T.if_then_else(value == value, near, T.uint32(0x7FFF))  # noqa: PLR0124

    def multiply(self, sums_pitch: int, left_pitch: int) -> Callable[..., Any]:
        """Return the part that adds to sums 16 rows times two right factors, for all heights.

        Fragments of the next height are so many registers further.
        """
        heights, half = self.w.heights, self._half

        def left_element(left: Any, a: Expr, at: Place, i: Expr, k: Expr) -> Expr:
            lane, register, which = left_holder(sum_place(at.lane, i)[0], k)
            return half(left[at.warp, lane, a + register], which)

        def right_element(factor: Any, b: Expr, at: Place, i: Expr, k: Expr) -> Expr:
            lane, register, which = right_holder(k, sum_place(at.lane, i)[1])
            return half(factor[at.warp, lane, b + register], which)

        @T.inline
        def product(sums, s, left, a, factor, b, at):
            for i in T.serial(REGISTERS):
                for k in T.serial(SIDE):
                    sums[at.y, at.x, s + i] = sums[at.y, at.x, s + i] + left_element(
                        left, a, at, i, k
                    ) * right_element(factor, b, at, i, k)

        @T.inline
        def multiply(sums, s, left, a, factor, at):
            T.evaluate(T.tvm_storage_sync("shared"))
            for h in T.serial(heights):
                for side in T.serial(2):
                    product(
                        sums,
                        s + h * sums_pitch + side * REGISTERS,
                        left,
                        a + h * left_pitch,
                        factor,
                        side * 2,
                        at,
                    )
            T.evaluate(T.tvm_storage_sync("shared"))

        return multiply

    def pack(self) -> Callable[..., Any]:
        """Return the part that rounds two float32 to 16 bits, the first in the lower half."""
        rounded = self._rounded

        @T.inline
        def pack(packed, p, low, high, at):
            packed[at.y, at.x, p] = T.bitwise_or(
                rounded(low), T.shift_left(rounded(high), T.uint32(16))
            )

        return pack

    def fold(self, combine: Callable[[Any, Any], Any], count: int) -> Callable[..., Any]:
        """Return the part that combines each of `count` values over the lanes of a quad."""

        @T.inline
        def fold(values, at):
            mine = T.sblock_alloc_buffer((count,), "float32", scope="local")
            for stage in T.unroll(2):
                T.evaluate(T.tvm_storage_sync("shared"))
                for i in T.serial(count):
                    mine[i] = combine(
                        values[at.y, at.x, i],
                        values[at.warp, T.bitwise_xor(at.lane, 1 << stage), i],
                    )
                T.evaluate(T.tvm_storage_sync("shared"))
                for i in T.serial(count):
                    values[at.y, at.x, i] = mine[i]

        return fold
