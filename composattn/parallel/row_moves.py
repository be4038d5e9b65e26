"""Rows of tensors: a few runs where they are neighbours, else their numbers; taken, put and added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

T = torch.Tensor

Where = tuple[slice, ...] | T
"""Runs of rows, or numbers of rows on the device of what they are rows of; ascending."""

MOST_RUNS = 16  # that move one by one, from where they lie to where they belong; of more a copy moves


def located(positions: T, among: T, device: torch.device) -> Where:
    """Where `positions` lie in `among`, both ascending; a run is one of positions, which both sides of a move know."""
    places = torch.searchsorted(among, positions)
    if len(places) == 0:
        return ()
    cuts = [0, *((positions.diff() != 1).nonzero().flatten() + 1).tolist(), len(positions)]
    if len(cuts) - 1 > MOST_RUNS:
        return places.to(device)
    firsts = places[cuts[:-1]].tolist()
    return tuple(slice(a, a + m - n) for a, n, m in zip(firsts, cuts[:-1], cuts[1:], strict=True))


def row_counts(at: Where) -> list[int]:
    """Rows of each tensor that moves for `at`."""
    return [run.stop - run.start for run in at] if isinstance(at, tuple) else [len(at)]


def views(rows: T, at: Where) -> list[T]:
    """`rows[at]` along the first dimension, run by run as it lies; of numbers a copy."""
    return [rows[run] for run in at] if isinstance(at, tuple) else [rows.index_select(0, at)]


def taken(rows: T, at: Where) -> T:
    """`rows[at]`; a view where that is one run."""
    found = views(rows, at)
    return found[0] if len(found) == 1 else torch.cat(found) if found else rows[:0]


def put(into: T, at: Where, rows: T) -> None:
    """into[at] = rows."""
    if isinstance(at, tuple):
        for run, part in zip(at, rows.split(row_counts(at)), strict=True):
            into[run].copy_(part)
    else:
        into.index_copy_(0, at, rows)


def added(into: T, at: Where, parts: Sequence[T]) -> None:
    """into[at] += what moved for it; no row is named twice, so there is no order to depend on."""
    if isinstance(at, tuple):
        for run, part in zip(at, parts, strict=True):
            into[run].add_(part)
    else:
        into.index_add_(0, at, parts[0].to(into.dtype))


def by_rows(x: T) -> T:
    """(B, H, S, D) as (S, B, H, D), a view; and `by_heads` the way back."""
    return x.permute(2, 0, 1, 3)


def by_heads(x: T) -> T:
    return x.permute(1, 2, 0, 3)
