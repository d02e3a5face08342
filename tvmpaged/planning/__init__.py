"""One step's work list: lengths checked once, and cut into items. Pure NumPy, no tensor."""
