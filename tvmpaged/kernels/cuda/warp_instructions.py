"""What the lanes of a warp do together, by the GPU's own instructions.

`warp_loops` has the same parts written out, for devices that have none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvmpaged.kernels.cuda.warp_grid import REGISTERS, Place, Warps
from tvmpaged.kernels.tile import Expr
from tvmpaged.sm import ALL_LANES, WARP_SIZE

_PTX_TYPE = {"float16": "f16", "bfloat16": "bf16"}


class Instructions:
    """The parts of a program that need a warp's instructions.

    Fragments are ``[1, 1, registers]``: a lane's own.
    """

    fragment_scope, tile_scope = "local", "shared.dyn"

    def __init__(self, w: Warps) -> None:
        self.w = w
        self.type = _PTX_TYPE[w.tile.cache.spec.kv_dtype]

    def fragment(self, registers: int) -> tuple[int, ...]:
        """Return the shape of a fragment of so many registers a lane."""
        return (1, 1, registers)

    def place(self, warp: Expr, lane: Expr) -> Place:
        """Return where a thread stands."""
        return self.w.place(warp, lane, 0, 0)

    def each(self, count: int) -> Any:
        """Return a loop over registers, which have no index at run time."""
        return T.unroll(count)

    def bits(self, value: Any) -> Any:
        """Return the bits of a 16-bit number, as uint32."""
        return T.Cast("uint32", T.reinterpret("uint16", value))

    def copy(self) -> Callable[..., Any]:
        """Return the part that starts copying 16 bytes of the cache; zeros where `exists` is not.

        Nothing is read then, and the copy is complete when `wait` says so.
        """
        c, start = self.w.tile.cache, T.ptx.cp.async_.cg.shared.global_

        @T.inline
        def copy(cache, block, kv_head, slot, dim, exists, tile, place):
            T.evaluate(
                start(
                    T.address_of(tile[place]),
                    T.address_of(c.at(cache, block, kv_head, slot, dim)),
                    16,
                    T.Select(exists, T.uint32(16), T.uint32(0)),
                )
            )

        return copy

    def commit(self) -> Any:
        """Close a group of copies."""
        return T.ptx.cp.async_.commit_group()

    def wait(self, pending: int) -> Any:
        """Wait until no more than so many groups of copies, the latest, may be under way."""
        return T.ptx.cp.async_.wait_group(pending)

    def load(self, place: Callable[[Any], Any], transposed: bool = False) -> Callable[..., Any]:
        """Return the part that loads four 8 x 8 matrices from `base` of a tile: 16 x 16.

        ``place(lane)`` is where, from there on, the 8 elements begin that a lane names.
        """
        matrices = T.ptx.ldmatrix.sync.aligned.m8n8.x4
        load_four = (matrices.trans if transposed else matrices).shared.b16

        @T.inline
        def load(factor, f, at, tile, base):
            T.evaluate(
                load_four(
                    factor[at.y, at.x, f],
                    factor[at.y, at.x, f + 1],
                    factor[at.y, at.x, f + 2],
                    factor[at.y, at.x, f + 3],
                    T.address_of(tile[base + place(at.lane)]),
                )
            )

        return load

    def multiply(self, sums_pitch: int, left_pitch: int) -> Callable[..., Any]:
        """Return the part that adds to sums 16 rows times two right factors, for all heights.

        Fragments of the next height are so many registers further.
        """
        heights = self.w.heights
        dense = T.ptx.mma.sync.aligned.m16n8k16.row.col
        multiply_add = getattr(getattr(dense.f32, self.type), self.type).f32

        @T.inline
        def product(sums, s, left, a, factor, b, at):
            T.evaluate(
                multiply_add(
                    sums[at.y, at.x, s],
                    sums[at.y, at.x, s + 1],
                    sums[at.y, at.x, s + 2],
                    sums[at.y, at.x, s + 3],
                    left[at.y, at.x, a],
                    left[at.y, at.x, a + 1],
                    left[at.y, at.x, a + 2],
                    left[at.y, at.x, a + 3],
                    factor[at.y, at.x, b],
                    factor[at.y, at.x, b + 1],
                    sums[at.y, at.x, s],
                    sums[at.y, at.x, s + 1],
                    sums[at.y, at.x, s + 2],
                    sums[at.y, at.x, s + 3],
                )
            )

        @T.inline
        def multiply(sums, s, left, a, factor, at):
            for h in T.unroll(heights):
                for side in T.unroll(2):
                    product(
                        sums,
                        s + h * sums_pitch + side * REGISTERS,
                        left,
                        a + h * left_pitch,
                        factor,
                        side * 2,
                        at,
                    )

        return multiply

    def pack(self) -> Callable[..., Any]:
        """Return the part that rounds two float32 to 16 bits, the first in the lower half."""
        convert = getattr(T.ptx.cvt.rn, f"{self.type}x2").f32

        @T.inline
        def pack(packed, p, low, high, at):
            T.evaluate(convert(packed[at.y, at.x, p], high, low))

        return pack

    def fold(self, combine: Callable[[Any, Any], Any], count: int) -> Callable[..., Any]:
        """Return the part that combines each of `count` values over the lanes of a quad."""

        @T.inline
        def fold(values, at):
            for stage in T.unroll(2):
                for i in T.unroll(count):
                    values[at.y, at.x, i] = combine(
                        values[at.y, at.x, i],
                        T.tvm_warp_shuffle_xor(
                            T.uint32(ALL_LANES),
                            values[at.y, at.x, i],
                            1 << stage,
                            WARP_SIZE,
                            WARP_SIZE,
                        ),
                    )

        return fold
