"""The tiles of a mask by its elements: what the analysis of bounds is compared with."""

from __future__ import annotations

import torch


def tiles_of(visible: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """int8 (B|1, H|1, Tq, Tkv) of a dense mask: 0 empty, 1 partial, 2 full; tiles at the edges count what exists."""
    q_len, kv_len = visible.shape[-2:]
    rows, columns = -(-q_len // tile[0]), -(-kv_len // tile[1])
    padding = (0, columns * tile[1] - kv_len, 0, rows * tile[0] - q_len)

    def any_in_tile(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, padding)
        return padded.unflatten(3, (columns, tile[1])).unflatten(2, (rows, tile[0])).any(5).any(3)

    some, hidden = any_in_tile(visible), any_in_tile(~visible)
    return some.to(torch.int8) + (some & ~hidden).to(torch.int8)
