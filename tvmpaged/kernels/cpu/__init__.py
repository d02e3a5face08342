"""How a CPU's worker walks a tile of rows: vectors, AMX, and what they share."""
