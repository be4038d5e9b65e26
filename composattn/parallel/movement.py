"""What one rank sends, fetches and computes for one attention: parts, and the calls that compute each.

A part is some of the keys that a rank's queries see: its own, or those of some other ranks, fetched together. With one
part all keys are fetched, laid in order, and computed at once; with more, the rank's own are computed while the others
are on their way. A `SubCall` is one call of a backend: a run of queries and the run of keys that they see, or, if runs
are many, all rows of the part with tables that say where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .division import Division

MOST_RUNS = 4  # calls that stand for one; beyond it tables of positions serve


@dataclass(frozen=True, eq=False)
class SubCall:
    """Queries `rows` of the rank's and keys `keys` of the part's.

    `first`: their positions where both are runs; None where tables say them.
    """

    rows: slice
    keys: slice
    first: tuple[int, int] | None


@dataclass(frozen=True)
class Part:
    """Keys that a rank computes with together; all positions ascend.

    sends, receives: positions of what goes to each rank, and of what comes from it. positions: of the part's keys. own:
    of those among them that are the rank's own: all it has, or none. moves: whether any rank fetches anything in this
    part, so that all take part.
    """

    sends: tuple[torch.Tensor, ...]
    receives: tuple[torch.Tensor, ...]
    positions: torch.Tensor
    own: torch.Tensor
    sub_calls: tuple[SubCall, ...]
    moves: bool

    @property
    def fetches(self) -> bool:
        """Whether this rank fetches anything; else the keys are its own as they lie, or none."""
        return len(self.positions) > len(self.own)


@dataclass(frozen=True)
class Movement:
    """All that ranks move for one attention, as one of them sees it; `seen` may be of another mask than was divided."""

    division: Division
    seen: torch.Tensor
    rank: int
    gather: bool
    parts_asked: int

    @staticmethod
    def of(division: Division, seen: torch.Tensor, rank: int, *, gather: bool, parts: int) -> Movement:
        """`gather`: whether every rank gets all keys."""
        most = 1 if division.ranks == 1 else 2 if gather else division.ranks
        return Movement(division, seen, rank, gather, min(parts, most))

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 positions of the rank's rows, ascending."""
        return rows_of(self.division.tiles_of(self.rank), self.division.visits.tile)

    @cached_property
    def fetched(self) -> list[int]:
        """Rows that each rank fetches."""
        if self.gather:
            rows = self.division.visits.tiles * self.division.visits.tile
            return [rows - rows // self.division.ranks] * self.division.ranks
        return self.division.fetched_of(self.seen)

    @cached_property
    def _owned(self) -> list[torch.Tensor]:
        return [self.division.owns(r) for r in range(self.division.ranks)]

    @cached_property
    def _wanted(self) -> list[torch.Tensor]:
        """bool (grains,) of each rank: what it fetches."""
        if self.gather:
            return [~owned for owned in self._owned]
        return [self.division.needs(r, self.seen) & ~owned for r, owned in enumerate(self._owned)]

    def group_of(self, to: int, source: int) -> int:
        """In which part a rank fetches from another one: nearer ones first, so that all send and fetch at one time."""
        if self.parts_asked == 1:
            return 0
        distance = (source - to) % self.division.ranks - 1
        return 1 + distance * (self.parts_asked - 1) // (self.division.ranks - 1)

    @cached_property
    def parts(self) -> list[Part]:
        """The rank's own keys first, or together with all others where there is one part."""
        made = [self._part(p) for p in range(self.parts_asked)]
        return [part for n, part in enumerate(made) if n == 0 or part.moves]

    def _part(self, number: int) -> Part:
        ranks, me, grain = self.division.ranks, self.rank, self.division.visits.grain
        nothing = torch.zeros(0, dtype=torch.int64, device="cpu")
        sent, received = [nothing] * ranks, [nothing] * ranks
        for other in (r for r in range(ranks) if r != me):
            if self.group_of(other, me) == number:
                sent[other] = rows_of((self._wanted[other] & self._owned[me]).nonzero().flatten(), grain)
            if self.group_of(me, other) == number:
                received[other] = rows_of((self._wanted[me] & self._owned[other]).nonzero().flatten(), grain)
        own = self.positions if number == 0 else nothing
        positions = torch.cat([own, *received]).sort().values
        calls, moves = self._sub_calls(positions), self._moves(number)
        return Part(tuple(sent), tuple(received), positions, own, calls, moves)

    def _moves(self, number: int) -> bool:
        """Whether any rank fetches anything in a part: then all of them take part in the exchange."""
        ranks = range(self.division.ranks)
        pairs = ((to, source) for to in ranks for source in ranks if to != source)
        return any(
            self.group_of(to, source) == number and bool((self._wanted[to] & self._owned[source]).any())
            for to, source in pairs
        )

    def _sub_calls(self, keys: torch.Tensor) -> tuple[SubCall, ...]:
        """The calls that the queries which see any of `keys` (ascending positions) are computed in."""
        tile, grain = self.division.visits.tile, self.division.visits.grain
        tiles = self.division.tiles_of(self.rank)
        there = torch.zeros(self.division.visits.grains, dtype=torch.bool, device="cpu")
        there[keys // grain] = True
        seen = self.seen[tiles] & there
        visiting = seen.any(1)
        if not visiting.any():
            return ()
        runs, first = [], 0  # of neighbouring tiles that see something: (first, stop) among the rank's tiles
        for n in range(1, len(tiles) + 1):
            if n == len(tiles) or tiles[n] != tiles[n - 1] + 1 or visiting[n] != visiting[n - 1]:
                if visiting[first]:
                    runs.append((first, n))
                first = n
        found = []
        for start, stop in runs[: MOST_RUNS + 1]:
            columns = seen[start:stop].any(0).nonzero().flatten()
            low, high = int(columns[0]) * grain, (int(columns[-1]) + 1) * grain
            begin, end = torch.searchsorted(keys, torch.tensor([low, high], device="cpu")).tolist()
            if int(keys[end - 1] - keys[begin]) != end - 1 - begin:
                break
            at = int(tiles[start]) * tile, int(keys[begin])
            found.append(SubCall(slice(start * tile, stop * tile), slice(begin, end), at))
        if len(found) == len(runs) and len(runs) <= MOST_RUNS:
            return tuple(sorted(found, key=lambda p: p.keys.start - p.keys.stop))
        rows = slice(runs[0][0] * tile, runs[-1][1] * tile)
        return (SubCall(rows, slice(0, len(keys)), None),)


def rows_of(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """The rows of tiles or grains."""
    return (numbers[:, None] * size + torch.arange(size, device="cpu")).flatten()
