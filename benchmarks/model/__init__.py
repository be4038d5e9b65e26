"""The cycle model: what each unit of a multiprocessor does for a tile, read from machine code; no GPU, no driver."""
