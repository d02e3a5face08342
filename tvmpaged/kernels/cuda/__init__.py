"""How a GPU's thread block walks a tile of rows: with tensor cores or without."""
