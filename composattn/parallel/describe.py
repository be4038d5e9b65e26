"""A division and its traffic as text, and as a picture of who computes what."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..analysis import drawing, pictures
from .division import Division
from .movement import Movement
from .traffic import Traffic


@dataclass(frozen=True)
class RankRow:
    """What one rank has to do: rows, pairs, rows and bytes that it fetches, parts and calls."""

    rank: int
    rows: int
    pairs: float
    fetched_rows: int
    fetched_bytes: int
    parts: int
    calls: int
    tiles: str


@dataclass(frozen=True)
class Described:
    """Prints as a table."""

    division: Division
    traffic: Traffic
    rows: tuple[RankRow, ...]

    @property
    def imbalance(self) -> float:
        return self.division.imbalance

    def __str__(self) -> str:
        visits, traffic = self.division.visits, self.traffic
        lines = [
            f"{visits.tiles * visits.tile} tokens on {self.division.ranks} ranks, tiles of {visits.tile}, "
            f"imbalance of pairs {self.imbalance:.2%}, method {traffic.method}",
            "rank   rows        pairs  fetches rows         bytes  parts   calls  tiles",
        ]
        for r in self.rows:
            lines.append(
                f"{r.rank:4} {r.rows:6} {r.pairs:12.4g} {r.fetched_rows:13} {r.fetched_bytes:13,} {r.parts:6} "
                f"{r.calls:7}  {r.tiles}"
            )
        lines.append(_overlap(traffic))
        return "\n".join(lines)

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Saves an SVG file: each tile of queries in its rank's colour where it sees keys.

        Raises: `InvalidArgument` for a path that does not end in .svg.
        """
        visits = self.division.visits
        seen = visits.seen.unflatten(1, (visits.tiles, -1)).any(2)
        drawing.save(
            path, pictures.of_ranks(seen, torch.tensor(self.division.owner, device="cpu"), self.division.ranks)
        )


def describe(division: Division, seen: torch.Tensor, traffic: Traffic) -> Described:
    """What each rank does in one attention."""
    rows = []
    for rank, pairs in enumerate(division.pairs):
        gather = traffic.method == "gather"
        movement = Movement.of(division, seen, rank, gather=gather, parts=traffic.parts)
        by_heads = traffic.method == "heads"
        rows.append(
            RankRow(
                rank,
                len(movement.positions),
                pairs,
                0 if by_heads else movement.fetched[rank],
                traffic.received[rank],
                1 if by_heads else len(movement.parts),
                1 if by_heads else sum(len(p.sub_calls) for p in movement.parts),
                spans(division.tiles_of(rank).tolist()),
            )
        )
    return Described(division, traffic, tuple(rows))


def spans(numbers: list[int]) -> str:
    """Runs of numbers in words, the first six: 0-3, 8, 10-11."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:6]]
    return ", ".join(words) + (f", … ({len(runs)} runs)" if len(runs) > 6 else "")


def _overlap(traffic: Traffic) -> str:
    if traffic.method == "heads":
        return "q, k and v change places before attention, the output after it: nothing overlaps"
    if traffic.parts == 1:
        return "all keys are fetched, then computed with at once: nothing overlaps, nothing is merged"
    return "the rank's own keys are computed with while others come; parts are merged by their LSE"
