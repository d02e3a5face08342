"""How a thread block stands over a tile of rows and a step of keys; drawn in `walk_threads`."""

from __future__ import annotations

from dataclasses import dataclass

from tvmpaged.kernels.tile import Expr, Tile


@dataclass(frozen=True)
class Threads:
    """How a thread block is laid over a tile of rows and a step of keys."""

    tile: Tile

    @property
    def along_dim(self) -> int:
        """Threads that share a key."""
        return int(self.tile.choices["dim_threads"])

    @property
    def groups(self) -> int:
        """Groups of threads, each with keys of its own."""
        return int(self.tile.choices["threads"]) // self.along_dim

    @property
    def keys(self) -> int:
        """Keys of a step that one group takes."""
        return self.tile.keys // self.groups

    def vectors(self, dim_cap: int) -> int:
        """Vectors of a row that one thread holds, at most."""
        return -(-dim_cap // (self.along_dim * self.tile.lanes))

    def is_whole(self, dim: Expr) -> bool:
        """Whether a row fills the vectors of all threads."""
        return isinstance(dim, int) and dim % (self.along_dim * self.tile.lanes) == 0
