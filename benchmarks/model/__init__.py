"""The cycle model: what each unit of an SM does for a tile, read from machine code; no GPU, no driver."""
