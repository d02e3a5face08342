"""Which of the eight AMX tile registers holds what, and in which shape; no compiler needed.

A tile register holds up to 16 rows of 64 bytes. ``TDPBF16PS`` adds to C ``[M, N]`` float32 the
product of A ``[M, 2K]`` and B ``[K, N, 2]`` bfloat16: B holds *pairs* of rows, element by element
(Intel 64 and IA-32 Architectures Software Developer's Manual, "TDPBF16PS"). Two products are made::

    scores [keys, rows]      K [keys, head_dim] as it lies . q in pairs along head_dim
    acc    [rows, head_dim]  probs [rows, keys]            . V in pairs along the keys

Where the cache holds pairs (`tvmpaged.layout`) K is the right operand too::

    scores [rows, keys]      q [rows, head_dim]            . K in pairs along head_dim

The shapes are loaded once per worker and hold for both products, so that a product whose shapes
differ from the other's needs registers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvmpaged import layout
from tvmpaged.spec import AttentionSpec

NUM_REGISTERS = 8
#: Rows of a register; bfloat16 of one of its rows.
SIDE, DEPTH = layout.SIDE, layout.LINE
_ROW_BYTES = 64
#: Least keys of a tile of K.
LEAST_ROWS = 4


@dataclass(frozen=True)
class TileRegisters:
    """Numbers of tile registers, and the shapes of all.

    Parameters
    ----------
    score, k, q : int
        First register of the score tiles (``dot_keys`` x ``dot_vectors``), of K, and of the q tiles
        (``dot_vectors``).
    k_tail, q_tail : int
        The same for the last 16 of a head_dim that is no multiple of 32.
    acc, probs, v : int
        First register of the accumulators (``weigh_rows`` x ``weigh_vectors``), of the
        probabilities (``weigh_rows``), and of V.
    shapes : tuple of (int, int)
        Rows and bytes per row of each register in use.
    """

    score: int
    k: int
    q: int
    k_tail: int
    q_tail: int
    acc: int
    probs: int
    v: int
    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def plan(cls, spec: AttentionSpec, choices: Mapping[str, Any]) -> TileRegisters:
        """Give out registers, as many as it takes (more than `NUM_REGISTERS` cannot be built)."""
        if choices["step"] == "pairs":
            return cls._plan_pairs(spec, choices)
        keys, columns = choices["dot_keys"], choices["dot_vectors"]
        rows, vectors = choices["weigh_rows"], choices["weigh_vectors"]
        num_acc, num_score = rows * vectors, keys * columns
        num_full = num_score + 1 + columns
        few, height = choices["row_tile"] < SIDE, cls.key_rows(spec, choices)
        if not few:  # when the second product begins, the first is done with its registers
            num_full = max(num_full, num_acc + rows + 1)
        shapes = [(height, _ROW_BYTES)] * (num_score + 1)
        shapes += [(SIDE, _ROW_BYTES)] * (num_full - len(shapes))
        k_tail = q_tail = len(shapes)
        if spec.head_dim % DEPTH:
            q_tail = k_tail + 1
            shapes += [(SIDE, _ROW_BYTES // 2)] + [(SIDE // 2, _ROW_BYTES)] * columns
        acc, v = 0, num_acc + rows
        if few:
            acc, v = len(shapes), num_score
            shapes += [(choices["row_tile"], _ROW_BYTES)] * (num_acc + rows)
            if height < SIDE:  # V cannot share K's register
                v = len(shapes)
                shapes.append((SIDE, _ROW_BYTES))
        return cls(
            score=0,
            k=num_score,
            q=num_score + 1,
            k_tail=k_tail,
            q_tail=q_tail,
            acc=acc,
            probs=acc + num_acc,
            v=v,
            shapes=tuple(shapes),
        )

    @classmethod
    def _plan_pairs(cls, spec: AttentionSpec, choices: Mapping[str, Any]) -> TileRegisters:
        """Give out registers where q and probabilities are left operands, K and V right ones."""
        num_score = choices["dot_keys"] * choices["dot_vectors"]
        num_acc = choices["weigh_rows"] * choices["weigh_vectors"]
        num_q, num_probs = choices["dot_vectors"], choices["weigh_rows"]
        rows = min(choices["row_tile"], SIDE)
        halved = cls.value_keys(spec, choices) < DEPTH
        # Accumulators and left operands are `rows` high, right operands 16 lines. The tail of a
        # head_dim, and V where 16 keys make a tile, are half as deep: registers of their own.
        num_left = max(num_score + num_q, num_acc + (0 if halved else num_probs))
        shapes = [(rows, _ROW_BYTES)] * num_left + [(SIDE, _ROW_BYTES)]
        half = len(shapes)
        num_half = max(num_q if spec.head_dim % DEPTH else 0, num_probs if halved else 0)
        if num_half:
            shapes += [(rows, _ROW_BYTES // 2)] * num_half + [(SIDE // 2, _ROW_BYTES)]
        return cls(
            score=0,
            k=num_left,
            q=num_score,
            k_tail=half + num_half,
            q_tail=half,
            acc=0,
            probs=half if halved else num_acc,
            v=half + num_half if halved else num_left,
            shapes=tuple(shapes),
        )

    @staticmethod
    def key_rows(spec: AttentionSpec, choices: Mapping[str, Any]) -> int:
        """Return the keys of a tile of K: fewer than 16 where tiles of 16 do not fit the blocks.

        Few rows take equal tiles of each block as it lies, the last two overlapping where they must
        (a product takes as long as its left operand has rows, which here is K). Blocks of less than
        4 keys would take too many tiles, the tail of a head_dim too many registers, and with many
        rows a copy costs little: there, tiles are of 16 copied keys.
        """
        size = spec.block_size
        few = choices["step"] == "rows"
        if not few or size % SIDE == 0 or size < LEAST_ROWS or spec.head_dim % DEPTH:
            return SIDE
        return -(-size // -(-size // SIDE))

    @staticmethod
    def value_keys(spec: AttentionSpec, choices: Mapping[str, Any]) -> int:
        """Return the keys of a tile of V that is read as pairs.

        A product of few rows takes as long as it has rows, so half its depth costs little; with
        many rows it is worth putting lines of two blocks together.
        """
        return layout.stretch(spec.block_size) if choices["row_tile"] < SIDE else DEPTH

    @property
    def fits(self) -> bool:
        """Whether the machine has as many."""
        return len(self.shapes) <= NUM_REGISTERS

    def configuration(self) -> tuple[int, ...]:
        """Return the operand of ``LDTILECFG`` as eight little-endian 64-bit words."""
        data = bytearray(64)
        data[0] = 1  # the palette
        for number, (rows, row_bytes) in enumerate(self.shapes):
            data[16 + 2 * number : 18 + 2 * number] = row_bytes.to_bytes(2, "little")
            data[48 + number] = rows
        words = [data[start : start + 8] for start in range(0, 64, 8)]
        return tuple(int.from_bytes(word, "little", signed=True) for word in words)
