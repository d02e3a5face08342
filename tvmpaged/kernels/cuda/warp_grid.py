"""How the warps of a thread block stand over a tile of rows, and what each lane of one holds.

A warp multiplies 16 rows by 16 dims, or keys, at a time (PTX's ``mma.m16n8k16``, twice). Its 32
lanes hold the factors and the sums together, in *fragments*: 32-bit registers of which each lane
has some. Four lanes that follow each other, a *quad*, share two rows, `HALF` apart::

    lane = 4 * row + pair       a row of 8 columns:  0 1 | 2 3 | 4 5 | 6 7
                                pair                  0     1     2     3

    left factor   4 registers of two 16-bit columns each:  row, row + 8; then 8 columns further
    right factor  2 registers of two 16-bit rows (k) each: k, then k + 8; the lane's `row` is its
                  column. A load of 16 x 16 fills two of them, or a left one.
    sums          4 float32: two columns of row, two of row + 8

So the sums of two products that lie side by side are, rounded and packed, a left factor: the
probabilities never leave their lanes.

Warps stand along the rows, `row_warps` of them, and along a step's keys, `key_warps`. Those along
the keys keep maxima and sums of their own, which are folded at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvmpaged.kernels.tile import Expr, Tile
from tvmpaged.sm import STATIC_SHARED_BYTES, WARP_SIZE

#: Rows, and columns of the left factor, of one product.
SIDE = 16
#: Columns of sums that one product makes; rows and columns of what a load of matrices is made of.
HALF = 8
#: Registers of a left factor, of two right ones, and of a product's sums.
REGISTERS = 4
#: Elements by which rows in shared memory are longer than their dims: 16 bytes. Dims are multiples
#: of 16, so rows are odd multiples of 16 bytes, and 8 rows that follow each other meet all banks.
PADDING = 8
#: Of an element of K, V and q.
ELEMENT_BYTES = 2


def left_holder(row: Expr, k: Expr) -> tuple[Expr, Expr, Expr]:
    """Return which lane holds an element of a left factor, in which register and half of it."""
    return row % HALF * 4 + k % HALF // 2, row // HALF + k // HALF * 2, k % 2


def right_holder(k: Expr, column: Expr) -> tuple[Expr, Expr, Expr]:
    """Return which lane holds an element of a right factor, in which register and half of it."""
    return column * 4 + k % HALF // 2, k // HALF, k % 2


def sum_place(lane: Expr, register: Expr) -> tuple[Expr, Expr]:
    """Return row and column of the sum that a lane holds in a register."""
    return lane // 4 + register // 2 * HALF, lane % 4 * 2 + register % 2


@dataclass(frozen=True)
class Place:
    """Where a thread stands: its warp, among those along rows and keys; its lane.

    ``y`` and ``x`` are the first two indices of its own part of a fragment.
    """

    warp: Expr
    row_warp: Expr
    key_warp: Expr
    lane: Expr
    y: Expr
    x: Expr


@dataclass(frozen=True)
class Warps:
    """How the warps of a block are laid over a tile of rows and a step of keys."""

    tile: Tile

    @property
    def key_warps(self) -> int:
        """Warps that share rows and take different keys of a step."""
        return int(self.tile.choices["key_warps"])

    @property
    def row_warps(self) -> int:
        """Warps that share keys and take different rows."""
        return int(self.tile.choices["threads"]) // WARP_SIZE // self.key_warps

    @property
    def heights(self) -> int:
        """Products of 16 rows above each other in one warp."""
        return self.tile.rows // self.row_warps // SIDE

    @property
    def keys(self) -> int:
        """Keys of a step that one warp takes."""
        return self.tile.keys // self.key_warps

    @property
    def q_registers(self) -> int:
        """Registers of q for 16 rows: all of it, or what 16 dims take."""
        return (self.tile.head_dim_cap // SIDE if self.keeps_q else 1) * REGISTERS

    @property
    def p_registers(self) -> int:
        """Registers of a step's probabilities for 16 rows."""
        return self.keys // SIDE * REGISTERS

    @property
    def score_registers(self) -> int:
        """Registers of a step's scores for 16 rows."""
        return self.keys // HALF * REGISTERS

    @property
    def acc_registers(self) -> int:
        """Registers of the weighted sums of V for 16 rows."""
        return self.tile.head_dim_v_cap // HALF * REGISTERS

    @property
    def q_pitch(self) -> int:
        """Elements from one row of q to the next in shared memory."""
        return self.tile.head_dim_cap + PADDING

    @property
    def q_elements(self) -> int:
        """Elements of a tile's q in shared memory."""
        return self.tile.rows * self.q_pitch

    @property
    def keeps_q(self) -> bool:
        """Whether q is kept in registers, or read from shared memory at each step."""
        return bool(self.tile.choices["q_in"] == "registers")

    @property
    def k_pitch(self) -> int:
        """Elements from one key's K to the next in shared memory."""
        return self.tile.head_dim_cap + PADDING

    @property
    def v_pitch(self) -> int:
        """Elements from one key's V to the next in shared memory."""
        return self.tile.head_dim_v_cap + PADDING

    @property
    def stages(self) -> int:
        """Steps of which K and V lie in shared memory, or are on their way there."""
        return int(self.tile.choices["stages"])

    @property
    def q_begin(self) -> int:
        """Element of shared memory where q begins: behind all stages, or before they are needed."""
        return 0 if self.keeps_q else self.stages * self.stage

    @property
    def tile_elements(self) -> int:
        """Elements of q and all stages in shared memory, which is asked for at launch.

        TVM's runtime raises the driver's limit, which is for this and static memory together, only
        where this alone comes to as much: if it takes both to pass the limit, the tile is enlarged.
        """
        elements = max(self.stages * self.stage, self.q_begin + self.q_elements)
        most = STATIC_SHARED_BYTES // ELEMENT_BYTES
        over = elements * ELEMENT_BYTES + 4 * self.fold_elements > STATIC_SHARED_BYTES
        return max(elements, most) if over else elements

    @property
    def fold_elements(self) -> int:
        """Numbers, float32 in static shared memory, that warps along the keys fold at the end."""
        if self.key_warps == 1:
            return 0
        # Of each lane its rows' maxima and sums, and of one warp's lanes the weighted sums.
        each = 2 * 2 * self.heights * self.key_warps + self.heights * self.acc_registers
        return self.row_warps * WARP_SIZE * each

    @property
    def stage(self) -> int:
        """Elements of a step's K and V in shared memory."""
        return self.tile.keys * (self.k_pitch + self.v_pitch)

    @property
    def v_begin(self) -> int:
        """Element of a stage where V begins."""
        return self.tile.keys * self.k_pitch

    def place(self, warp: Expr, lane: Expr, y: Expr, x: Expr) -> Place:
        """Return where a thread stands."""
        return Place(warp, warp % self.row_warps, warp // self.row_warps, lane, y, x)

    def row(self, at: Place, value: Expr) -> Expr:
        """Return the row of the tile that a lane's value, two of each height, belongs to."""
        return at.row_warp * (self.heights * SIDE) + value * HALF + at.lane // 4

    def q_place(self, lane: Expr) -> Expr:
        """Return the element of a 16 x 16 part of q whose 8 dims a lane names to a load.

        A row of a matrix is 8 dims of a row; matrices follow each other along the rows, then along
        the dims, as a left factor's registers do.
        """
        return lane % SIDE * self.q_pitch + lane // SIDE * HALF

    def k_place(self, lane: Expr) -> Expr:
        """Return the element of a 16 x 16 part of K whose 8 dims a lane names to a load.

        Keys are the columns of the right factor: a row of a matrix is 8 dims of a key, matrices
        follow each other along the dims, then along the keys.
        """
        key = lane // SIDE * HALF + lane % HALF
        return key * self.k_pitch + lane // HALF % 2 * HALF

    def v_place(self, lane: Expr) -> Expr:
        """Return the element of a 16 x 16 part of V whose 8 dims a lane names to a load.

        Keys are the rows of the right factor: matrices are transposed as they are loaded, and
        follow each other along the keys, then along the dims.
        """
        return lane % SIDE * self.v_pitch + lane // SIDE * HALF
