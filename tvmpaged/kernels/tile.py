"""What the programs' parts share: the paged cache's addresses and one tile's constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvmpaged.kernels.tile_registers import SIDE, TileRegisters
from tvmpaged.layout import LINE, PAIRS, layout_of, pair_place, stretch
from tvmpaged.spec import MAX_HEAD_DIM, AttentionSpec

Expr = Any  # a tirx expression, or an int where the size is a constant
NEG_INF = float("-inf")
#: Least float32 above 0 without denormals: a scale of 0 must leave the -inf of masked keys alone.
TINY = 1.2e-38

#: What the host is told where a cache's vectors cannot be loaded whole.
WHOLE = "the block stride of a cache must be a multiple of 16 bytes"


def extent(value: int, name: str) -> Expr:
    """Return a constant, or a variable for an extent known at run time only; int64 either way.

    TVM computes an argument's default strides from its extents and wants both of one type; strides
    are int64, so that offsets into a large pool are.
    """
    return tirx.const(value, "int64") if value else tirx.Var(name, "int64")


def index(value: Expr) -> Expr:
    """Return an extent as the int32 that loops count in."""
    return int(value) if isinstance(value, tirx.IntImm) else tirx.Cast("int32", value)


class PagedCache:
    """One layer's K and V caches as a program sees them: extents and addresses under a layout."""

    def __init__(self, spec: AttentionSpec, choices: dict[str, Any]) -> None:
        self.spec = spec
        layout = layout_of(spec, choices)
        self.nhd, self.pairs = layout == "NHD", layout == PAIRS
        self.num_blocks = tirx.Var("num_blocks", "int64")
        self.num_kv_heads = tirx.Var("num_kv_heads", "int64")
        self.head_dim_extent = extent(spec.head_dim, "head_dim")
        self.head_dim_v_extent = (
            self.head_dim_extent
            if spec.head_dim_v == spec.head_dim
            else extent(spec.head_dim_v, "head_dim_v")
        )
        self.block_size_extent = extent(spec.block_size, "block_size")
        self.head_dim = index(self.head_dim_extent)
        self.head_dim_v = index(self.head_dim_v_extent)
        self.block_size = index(self.block_size_extent)

    def shape(self, dim: Expr) -> tuple[Expr, ...]:
        """Return a cache's shape; `dim` is its row's extent."""
        if self.pairs:
            lines = tirx.const(self.spec.block_size * int(dim) // LINE, "int64")
            return (self.num_blocks, self.num_kv_heads, lines, tirx.const(LINE, "int64"))
        inner = (self.num_kv_heads, self.block_size_extent)
        return (self.num_blocks, *(reversed(inner) if self.nhd else inner), dim)

    def strides(self, dim: Expr, name: str) -> tuple[Expr, ...]:
        """Return a cache's strides: that of blocks is free, the rest is packed."""
        shape = self.shape(dim)
        return (
            tirx.Var(f"{name}_block_stride", "int64"),
            shape[2] * shape[3],
            shape[3],
            tirx.const(1, "int64"),
        )

    def is_whole(self, cache: Any, lanes: int) -> Expr:
        """Return whether a cache's block stride is a multiple of `lanes` elements."""
        return tirx.truncmod(cache.strides[0], tirx.const(lanes, "int64")) == 0

    def whole_strides(self, cache: Any, dim: Expr, lanes: int) -> tuple[Expr, ...]:
        """Return a cache's strides as multiples of `lanes` elements; `dim` is its row's extent.

        On a GPU a vector is one load only where its address is known to be a multiple of its size.
        """
        each = tirx.const(lanes, "int64")
        row = tirx.truncdiv(dim, each) * each
        block = tirx.truncdiv(cache.strides[0], each) * each
        return (block, self.shape(dim)[2] * row, row, tirx.const(1, "int64"))

    def at(self, cache: Any, block: Expr, head: Expr, slot: Expr, dim: Expr) -> Any:
        """Return the element of a cache buffer."""
        return cache[block, slot, head, dim] if self.nhd else cache[block, head, slot, dim]

    def k_line(self, slot: Expr, dim: Expr) -> Any:
        """Return the first line of pairs of K from a slot and a dim on."""
        return pair_place("k", slot, dim, self.spec.block_size, self.spec.head_dim)[0]

    def v_line(self, slot: Expr, dim: Expr) -> Any:
        """Return the first line of pairs of V from a slot and a dim on."""
        return pair_place("v", slot, dim, self.spec.block_size, self.spec.head_dim_v)[0]

    def block(self, block_table: Any, seq: Expr, position: Expr) -> Any:
        """Return the id of the block that holds a kv position, as int64."""
        return tirx.Cast("int64", block_table[seq, self.block_number(position)])

    def block_number(self, position: Expr) -> Any:
        """Return which of its sequence's blocks holds a kv position.

        Positions are not negative; told so, a compiler divides in half as many instructions.
        """
        size = tirx.Cast("uint32", self.block_size)
        return tirx.Cast("int32", tirx.truncdiv(tirx.Cast("uint32", position), size))

    def slot(self, position: Expr) -> Any:
        """Return the slot of a kv position in its block."""
        size = tirx.Cast("uint32", self.block_size)
        return tirx.Cast("int32", tirx.truncmod(tirx.Cast("uint32", position), size))

    def wide(self, value: Any, lanes: int = 1) -> Any:
        """Widen an element of the cache, or a vector, to float32."""
        if self.spec.kv_dtype == "float32":
            return value
        return tirx.Cast("float32" if lanes == 1 else f"float32x{lanes}", value)


@dataclass(frozen=True)
class Tile:
    """The constants of one attention program.

    Parameters
    ----------
    cache : PagedCache
        What it reads.
    rows, keys, lanes : int
        Query rows of a tile, keys of a step, elements of a vector.
    prefetch_keys, prefetch_level : int
        How many keys ahead K and V are asked for (0: not at all), and into which cache level.
    """

    cache: PagedCache
    rows: int
    keys: int
    lanes: int
    prefetch_keys: int
    prefetch_level: int
    choices: dict[str, Any]

    @classmethod
    def make(cls, spec: AttentionSpec, choices: dict[str, Any]) -> Tile:
        """Collect the constants of a spec under a choice list."""
        return cls(
            cache=PagedCache(spec, choices),
            rows=choices["row_tile"],
            keys=choices["keys_per_step"],
            lanes=choices["lanes"],
            prefetch_keys=choices.get("prefetch_keys", 0),
            prefetch_level=choices.get("prefetch_level", 1),
            choices=choices,
        )

    @property
    def few_rows(self) -> bool:
        """Whether a score row is a vector along the keys."""
        return bool(self.choices["step"] == "rows")

    @property
    def columns(self) -> int:
        """Rows of a tile, as columns of whole tile registers."""
        return -(-self.rows // SIDE) * SIDE

    @property
    def registers(self) -> TileRegisters:
        """What the tile registers hold."""
        return TileRegisters.plan(self.cache.spec, self.choices)

    @property
    def tiles_fit(self) -> bool:
        """Whether the keys of a tile register always lie in one block."""
        return self.cache.spec.block_size % SIDE == 0

    @property
    def key_rows(self) -> int:
        """Keys of a tile of K where K is the left operand."""
        return TileRegisters.key_rows(self.cache.spec, self.choices)

    @property
    def copies_keys(self) -> bool:
        """Whether keys are copied before tiles are loaded from them."""
        return not self.tiles_fit and self.key_rows == SIDE

    @property
    def value_keys(self) -> int:
        """Keys of one tile of V where pairs are read."""
        return TileRegisters.value_keys(self.cache.spec, self.choices)

    @property
    def gathers_values(self) -> bool:
        """Whether lines of V from several blocks make a tile."""
        return self.value_keys > stretch(self.cache.spec.block_size)

    @property
    def head_dim_cap(self) -> int:
        """Largest head_dim this program meets: bounds its scratch."""
        return self.cache.spec.head_dim or MAX_HEAD_DIM

    @property
    def head_dim_v_cap(self) -> int:
        """Largest head_dim_v this program meets."""
        return self.cache.spec.head_dim_v or MAX_HEAD_DIM

    @property
    def run(self) -> int:
        """Longest stretch of a step's keys that always lies in one block.

        Steps start at multiples of ``keys``, so gcd(keys, block_size) keys never cross an edge.
        """
        block_size = self.cache.spec.block_size
        return math.gcd(self.keys, block_size) if block_size else 1

    @property
    def one_block(self) -> bool:
        """Whether a group of `lanes` keys always lies in one block."""
        return self.run % self.lanes == 0

    @property
    def vectors(self) -> Expr:
        """Vectors of `lanes` elements in a K row."""
        return tirx.truncdiv(self.cache.head_dim, self.lanes)

    @property
    def vectors_v(self) -> Expr:
        """Vectors of `lanes` elements in a V row."""
        return tirx.truncdiv(self.cache.head_dim_v, self.lanes)

    @property
    def line(self) -> int:
        """Elements of K or V in a cache line of 64 bytes."""
        return 16 if self.cache.spec.kv_dtype == "float32" else 32

    def ahead(
        self, kv_head: Expr, position: Expr, kv_begin: Expr, kv_end: Expr, unit: int
    ) -> tuple[Any, Any]:
        """Return the kv head and position that will be read when `position` was to be.

        A worker's next item is the same kv range of the next kv head, which is taken in whole units
        of keys. (After the last head the address is that of nobody, or of the next block, which
        harms no prefetch.)
        """
        past = position >= kv_end
        further = tirx.truncdiv(position - kv_end, unit) * unit
        begin = tirx.min(kv_begin + further, kv_end - 1)
        return kv_head + tirx.Cast("int32", past), tirx.Select(past, begin, position)

    def prefetch(self, cache: Any, block: Expr, head: Expr, slot: Expr, dim: Expr) -> Any:
        """Prefetch the cache line of an element for reading into the chosen level."""
        return self.prefetch_at(tirx.address_of(self.cache.at(cache, block, head, slot, dim)))

    def prefetch_at(self, address: Any) -> Any:
        """Prefetch the cache line at an address (llvm.prefetch: 3 is L1)."""
        locality = 4 - self.prefetch_level
        return tirx.call_llvm_intrin("void", "llvm.prefetch", address, 0, locality, 1)
