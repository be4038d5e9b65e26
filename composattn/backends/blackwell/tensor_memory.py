"""Which columns of tensor memory hold what: a map that is made and checked when a kernel is planned."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property

COLUMNS = 512  # of 128 lanes of 32 bits, that a multiprocessor has


@dataclasses.dataclass(frozen=True)
class Columns:
    """`count` columns from `first` on."""

    first: int
    count: int

    @property
    def stop(self) -> int:
        return self.first + self.count

    def __str__(self) -> str:
        return f"{self.first}-{self.stop - 1}"


@dataclasses.dataclass(frozen=True)
class TensorMemory:
    """Scores and outputs side by side; probabilities, two in a column, over the scores that they were made of.

    `scores[t][s]`: those of query tile t in its place s. A thread has read its row of scores before it writes its
    probabilities there, and the product that reads these is issued before the next scores of that place.
    Raises `ValueError` where regions overlap or leave tensor memory.
    """

    scores: tuple[tuple[Columns, ...], ...]
    outputs: tuple[Columns, ...]

    def __post_init__(self) -> None:
        regions = sorted(self.regions.items(), key=lambda region: region[1].first)
        for (name, columns), (other, beside) in itertools.pairwise(regions):
            if columns.stop > beside.first:
                raise ValueError(f"{name} (columns {columns}) lies over {other} (columns {beside})")
        name, last = regions[-1]
        if last.stop > COLUMNS or regions[0][1].first < 0:
            raise ValueError(f"{name} (columns {last}) leaves tensor memory, which has {COLUMNS} columns")

    @staticmethod
    def of(tiles: int, places: int, keys: int, dv: int) -> TensorMemory:
        """For `tiles` query tiles with `places` for scores each, one after the other."""
        scores = [Columns(keys * n, keys) for n in range(tiles * places)]
        start = keys * tiles * places
        return TensorMemory(
            tuple(tuple(scores[places * t : places * (t + 1)]) for t in range(tiles)),
            tuple(Columns(start + dv * t, dv) for t in range(tiles)),
        )

    @cached_property
    def regions(self) -> Mapping[str, Columns]:
        """By name, those that must be apart."""
        scores = {f"S{t}{'ab'[s]}" if len(places) > 1 else f"S{t}": columns
                  for t, places in enumerate(self.scores) for s, columns in enumerate(places)}  # fmt: skip
        return {**scores, **{f"O{t}": columns for t, columns in enumerate(self.outputs)}}

    @property
    def allocated(self) -> int:
        """Columns a block asks for, a power of two."""
        used = max(columns.stop for columns in self.regions.values())
        return max(32, 1 << (used - 1).bit_length())

    def __str__(self) -> str:
        words = ", ".join(f"{name} {columns}" for name, columns in self.regions.items())
        return f"columns {words}, P over S; {self.allocated} of {COLUMNS}"
