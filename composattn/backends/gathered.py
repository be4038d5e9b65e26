"""Adds the gradients of captured reads into the tensors that were read, in an order that never changes.

What the positions of a read change with decides how: axes along which they stay are summed first (a scalar, a number
a head, a row, a column need no more than that), positions that follow the distance q - kv are summed along diagonals,
and what is left is scattered. The pattern is seen on the positions themselves, so any way to write it is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def total_for(tensor: torch.Tensor, working: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that gradients of `tensor` are added into.

    Many pairs meet in one element only where elements are few: then fp64 costs nothing and keeps every bit.
    """
    wide = torch.float64 if tensor.numel() <= 1 << 16 else working
    return torch.zeros(tensor.shape, dtype=wide, device=device)


def accumulate(total: torch.Tensor, values: torch.Tensor, indices: Sequence[torch.Tensor]) -> None:
    """total[indices] += values, where several values may meet in one element.

    `total` is contiguous; `values` has all axes of the tile, (..., rows, columns); each of `indices` (one per dimension
    of `total`) has the same axes or size 1 where it does not change. Negative positions count from the end, positions
    outside are clamped, as reads are.
    """
    if not indices:
        total += values.sum(dtype=total.dtype)
        return
    position = _flat(total, indices)
    position = position.view((1,) * (values.ndim - position.ndim) + position.shape)
    still = [d for d in range(values.ndim) if position.shape[d] == 1 and values.shape[d] != 1]
    if still:
        values = values.sum(still, keepdim=True, dtype=total.dtype)
    if _follows_distance(position):
        values, position = _along_diagonals(values.to(total.dtype), position)
    values, position = values.to(total.dtype).reshape(-1), position.reshape(-1)
    # Both add in a fixed order: on a CPU index_add is a plain loop, on a GPU index_put sorts by position first.
    if total.device.type == "cpu":
        total.view(-1).index_add_(0, position, values)
    else:
        total.view(-1).index_put_((position,), values, accumulate=True)


def _flat(total: torch.Tensor, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    flat: torch.Tensor | None = None
    for i, size, stride in zip(indices, total.shape, total.stride(), strict=True):
        part = torch.where(i < 0, i + size, i).clamp(0, max(size - 1, 0)) * stride
        flat = part if flat is None else flat + part
    assert flat is not None
    return flat.to(torch.int64)


def _follows_distance(position: torch.Tensor) -> bool:
    rows, columns = position.shape[-2:]
    return rows > 1 and columns > 1 and torch.equal(position[..., 1:, 1:], position[..., :-1, :-1])


def _along_diagonals(values: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over each diagonal (row - column = const) and its position.

    Rows upside down, padded to rows + columns and read back one narrower, each row moves one to the right of the row
    above it, and diagonals become columns.
    """
    rows, columns = values.shape[-2:]
    skewed = F.pad(values.flip(-2), (0, rows)).flatten(-2)[..., : rows * (rows + columns - 1)]
    sums = skewed.unflatten(-1, (rows, rows + columns - 1)).sum(-2)
    return sums, torch.cat((position[..., :, 0].flip(-1), position[..., 0, 1:]), -1).expand(sums.shape)
