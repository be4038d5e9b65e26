"""Tiles of queries to ranks: as many rows each, pairs balanced, and of all balanced divisions the one that moves least.

Candidates keep runs of tiles together: from one run per rank (a window then moves halos only) down to single tiles.
Runs go to ranks longest first (Graham 1969), each to the rank with the fewest pairs that has room; tiles that change
places then even out what is left. Every rank computes the same division from the same mask, with no exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .visits import Visits

TOLERANCE = 0.03
_ABOUT = 0.01
_MOST_SWAPS = 4096


@dataclass(frozen=True)
class Division:
    """Which rank computes each tile (`owner`), pairs of each rank, and rows that each fetches from other ranks."""

    visits: Visits
    ranks: int
    owner: tuple[int, ...]

    @property
    def pairs(self) -> list[float]:
        return (
            torch.zeros(self.ranks, dtype=torch.float64, device="cpu")
            .index_add_(0, self._owners, self.visits.pairs)
            .tolist()
        )

    @property
    def imbalance(self) -> float:
        """How much more the rank with the most pairs has than the average."""
        pairs = self.pairs
        mean = sum(pairs) / self.ranks
        return max(pairs) / mean - 1 if mean else 0.0

    @property
    def runs(self) -> int:
        """Runs of neighbouring tiles that one rank has."""
        return 1 + sum(a != b for a, b in zip(self.owner, self.owner[1:], strict=False))

    @cached_property
    def _owners(self) -> torch.Tensor:
        return torch.tensor(self.owner, device="cpu")

    def tiles_of(self, rank: int) -> torch.Tensor:
        """The tiles of a rank, ascending."""
        return (self._owners == rank).nonzero().flatten()

    def needs(self, rank: int, seen: torch.Tensor) -> torch.Tensor:
        """bool (grains,): what the queries of a rank see, of an attention whose tiles have `seen`."""
        return seen[self.tiles_of(rank)].any(0)

    def owns(self, rank: int) -> torch.Tensor:
        """bool (grains,): the keys of a rank."""
        return (self._owners == rank).repeat_interleave(self.visits.tile // self.visits.grain)

    @cached_property
    def fetched(self) -> list[int]:
        return self.fetched_of(self.visits.seen)

    def fetched_of(self, seen: torch.Tensor) -> list[int]:
        """Rows that each rank fetches for an attention that sees so."""
        each = ((self.needs(r, seen) & ~self.owns(r)).sum() for r in range(self.ranks))
        return [int(n) * self.visits.grain for n in each]


def divide(visits: Visits, ranks: int, tolerance: float = TOLERANCE) -> Division:
    """The division whose busiest rank fetches the fewest rows, among those whose imbalance is at most `tolerance`.

    If no division is so even, the most even ones are compared. Among divisions that fetch at most a fiftieth more than
    the best, the one of the fewest runs is taken.
    """
    share = visits.tiles // ranks
    found = [_divided(visits, ranks, run, tolerance) for run in range(share, 0, -1) if share % run == 0]
    # where none is even enough, those about as even as the most even one
    even = [d for d in found if d.imbalance <= max(tolerance, min(f.imbalance for f in found) + _ABOUT)]
    moved = {id(d): max(d.fetched) for d in even}
    least = min(moved.values())
    room = max(least * 0.02, visits.grain)
    return min((d for d in even if moved[id(d)] <= least + room), key=lambda d: d.runs)


def _divided(visits: Visits, ranks: int, run: int, tolerance: float) -> Division:
    """Runs of `run` tiles, longest first, then single tiles that change places."""
    pairs = visits.pairs.view(-1, run).sum(1).tolist()
    room, load = [len(pairs) // ranks] * ranks, [0.0] * ranks
    owner = [0] * len(pairs)
    for n in sorted(range(len(pairs)), key=lambda n: (-pairs[n], n)):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (load[r], r))
        owner[n], room[rank], load[rank] = rank, room[rank] - 1, load[rank] + pairs[n]
    owners = torch.tensor(owner, device="cpu").repeat_interleave(run)
    owner = _swapped(owners, visits.pairs, ranks, tolerance).tolist()
    names = {r: n for n, r in enumerate(dict.fromkeys(owner))}  # ranks in the order of their first tiles
    return Division(visits, ranks, tuple(names[r] for r in owner))


def _swapped(owner: torch.Tensor, pairs: torch.Tensor, ranks: int, tolerance: float) -> torch.Tensor:
    """`owner` after tiles of the fullest and the emptiest rank changed places, until they are even."""
    load = torch.zeros(ranks, dtype=torch.float64, device="cpu").index_add_(0, owner, pairs)
    limit = float(load.mean()) * (1 + tolerance)
    for _ in range(_MOST_SWAPS):
        most, least = int(load.argmax()), int(load.argmin())
        if float(load[most]) <= limit:
            break
        swap = _best_swap(owner, pairs, most, least, float(load[most] - load[least]) / 2)
        if swap is None:
            break
        a, b = swap
        owner[a], owner[b] = least, most
        moved = pairs[a] - pairs[b]
        load[most] -= moved
        load[least] += moved
    return owner


def _best_swap(
    owner: torch.Tensor, pairs: torch.Tensor, most: int, least: int, wanted: float
) -> tuple[int, int] | None:
    """A tile of each whose exchange moves about `wanted` pairs; None where no exchange helps."""
    given, taken = (owner == most).nonzero().flatten(), (owner == least).nonzero().flatten()
    taken = taken[pairs[taken].sort(stable=True).indices]
    at = torch.searchsorted(pairs[taken], pairs[given] - wanted).clamp(0, len(taken) - 1)
    at = torch.stack([at, (at - 1).clamp(min=0)])
    moved = pairs[given] - pairs[taken[at]]
    best = int((moved - wanted).abs().argmin())
    if not 0 < float(moved.flatten()[best]) < 2 * wanted:
        return None
    return int(given[best % len(given)]), int(taken[at.flatten()[best]])
