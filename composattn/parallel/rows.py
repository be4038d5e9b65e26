"""Rows of tensors by their numbers, which are a slice wherever they are one run: taken, put and added."""

from __future__ import annotations

import torch

T = torch.Tensor

Where = slice | T


def where(rows: T, device: torch.device) -> Where:
    """Rows of some tensor: a slice where they are one run, else their numbers on `device`."""
    if len(rows) == 0:
        return slice(0, 0)
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows.to(device)


def taken(rows: T, at: Where) -> T:
    """`rows[at]` along the first dimension."""
    return rows[at] if isinstance(at, slice) else rows.index_select(0, at)


def put(into: T, at: Where, rows: T) -> None:
    """into[at] = rows."""
    if isinstance(at, slice):
        into[at].copy_(rows)
    else:
        into.index_copy_(0, at, rows)


def added(into: T, at: Where, rows: T) -> None:
    """into[at] += rows; no row is named twice, so there is no order to depend on."""
    if isinstance(at, slice):
        into[at].add_(rows)
    else:
        into.index_add_(0, at, rows.to(into.dtype))


def by_rows(x: T) -> T:
    """(B, H, S, D) as (S, B, H, D), a view; and `by_heads` the way back."""
    return x.permute(2, 0, 1, 3)


def by_heads(x: T) -> T:
    return x.permute(1, 2, 0, 3)
