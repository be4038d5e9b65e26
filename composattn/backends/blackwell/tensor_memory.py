"""Which columns of tensor memory hold what: a map that is made and checked when a kernel is planned."""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Mapping
from functools import cached_property
from typing import Any

COLUMNS = 512  # of `LANES` of 32 bits, that an SM has
LANES = 128
GROUPS = 2  # of warps that compute P and dS of a tile in the backward


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


def in_a_row(*counts: int) -> list[Columns]:
    """Regions of so many columns, one after the other."""
    return [Columns(*region) for region in zip(itertools.accumulate(counts, initial=0), counts, strict=False)]


class ColumnMap(abc.ABC):
    """Who has which columns. Raises `ValueError` where regions overlap or leave tensor memory."""

    @property
    @abc.abstractmethod
    def regions(self) -> Mapping[str, Columns]:
        """By name, those that must be apart."""

    @property
    def at_once(self) -> tuple[Mapping[str, Columns], ...]:
        """Columns that are in use at one time, for each time at which others are."""
        return (self.regions,)

    def __post_init__(self) -> None:
        for there in self.at_once:
            regions = sorted(there.items(), key=lambda region: region[1].first)
            for (name, columns), (other, beside) in itertools.pairwise(regions):
                if columns.stop > beside.first:
                    raise ValueError(f"{name} (columns {columns}) lies over {other} (columns {beside})")
            name, last = regions[-1]
            if last.stop > COLUMNS or regions[0][1].first < 0:
                raise ValueError(f"{name} (columns {last}) leaves tensor memory, which has {COLUMNS} columns")

    @property
    def allocated(self) -> int:
        """Columns a block asks for, a power of two."""
        used = max(columns.stop for columns in self.regions.values())
        return max(32, 1 << (used - 1).bit_length())

    def describe(self, over: str) -> str:
        words = ", ".join(f"{name} {columns}" for name, columns in self.regions.items())
        return f"columns {words}, {over}; {self.allocated} of {COLUMNS}"


@dataclasses.dataclass(frozen=True)
class TensorMemory(ColumnMap):
    """Scores and outputs side by side; probabilities, two in a column, over the scores that they were made of.

    `scores[t][s]`: those of query tile t in its place s. A thread has read its row of scores before it writes its
    probabilities there, and the product that reads these is issued before the next scores of that place.
    """

    scores: tuple[tuple[Columns, ...], ...]
    outputs: tuple[Columns, ...]

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

    def __str__(self) -> str:
        return self.describe("P over S")


@dataclasses.dataclass(frozen=True)
class BackwardColumns(ColumnMap):
    """S and dP, which others come over; the sums dV and dK; parts of dQ, one after the other."""

    scores: Columns
    gradients: Columns
    dv: Columns
    dk: Columns
    dq_parts: tuple[Columns, ...]

    @property
    def dq(self) -> Columns:
        """Where all of dQ comes, or its first part."""
        return self.dq_parts[0]

    @property
    def dq_is_apart(self) -> bool:
        """Whether neither scores nor dP begin where dQ does."""
        return self.dq.first not in (self.scores.first, self.gradients.first)

    @property
    def apart(self) -> int:
        """Columns from what one group has left to the next one's: each leaves it over its own scores, or dP."""
        return self.scores.count // GROUPS


class BackwardTensorMemory(BackwardColumns):
    """Sᵀ and then Pᵀ, dPᵀ and then dSᵀ in one region each, two numbers in a column; dV, dK; dQ.

    Where no columns are left, dQ comes over dSᵀ, whose product with Q is issued before it, and the next dPᵀ waits until
    it has been read.
    """

    @staticmethod
    def of(tiling: Any) -> BackwardTensorMemory:
        queries, d, dv = tiling.tile_m, tiling.d, tiling.dv
        scores, gradients, of_dv, of_dk = in_a_row(queries, queries, dv, d)
        first = of_dk.stop if of_dk.stop + d <= COLUMNS else gradients.first
        return BackwardTensorMemory(scores, gradients, of_dv, of_dk, (Columns(first, d),))

    @cached_property
    def regions(self) -> Mapping[str, Columns]:
        apart = {"dQ": self.dq} if self.dq_is_apart else {}
        return {"S": self.scores, "dP": self.gradients, "dV": self.dv, "dK": self.dk, **apart}

    def __str__(self) -> str:
        return self.describe("P over S, dS over dP" if self.dq_is_apart else "P over S, dS and dQ over dP")


class PairBackwardTensorMemory(BackwardColumns):
    """Columns of each block of a pair: Sᵀ, dPᵀ, dV and dK of its keys, for all queries; dQ of half of these queries.

    P lies at both ends of its scores, two numbers in a column. The next dQ comes between, once all scores have been
    read. It has 64 rows: the right half of its columns lies in the upper lanes.
    """

    @staticmethod
    def of(tiling: Any) -> PairBackwardTensorMemory:
        queries, d, dv = tiling.tile_m, tiling.d, tiling.dv
        scores, gradients, of_dv, of_dk = in_a_row(queries, queries, dv, d)
        return PairBackwardTensorMemory(scores, gradients, of_dv, of_dk, (Columns(queries // 4, d // 2),))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dq.count > self.scores.count // 2:
            raise ValueError(f"dQ (columns {self.dq}) lies over P, at both ends of columns {self.scores}")

    @property
    def apart(self) -> int:
        """Columns from the P that one group has left to the other's, which ends where its scores do."""
        return 3 * self.scores.count // 4

    @property
    def left_gradients(self) -> Columns:
        """Where dS is."""
        return self.gradients

    @cached_property
    def regions(self) -> Mapping[str, Columns]:
        return {"S": self.scores, "dP": self.gradients, "dV": self.dv, "dK": self.dk}

    def __str__(self) -> str:
        return self.describe(f"P over both ends of S, dQ {self.dq} between, dS over dP")


STRIP = 32  # columns of scores, and queries of a thread, that lie side by side


class WidePairBackwardTensorMemory(PairBackwardTensorMemory):
    """Columns of each block of a pair where dV and dK leave six strips of `STRIP` columns, used one after the other:

        strip   0    1    2    3    4    5
        1       S    S    S    S    dS   dS    the next scores, while dS of this tile is multiplied
        2       P    P    dQ   dQ   dQ         P over strips of S that its threads have read
        3       P    P    dP   dP   dP   dP    dQ has been read
        1       S    S    S    S    dS   dS    dS over strips of dP that its threads have read

    The groups of threads have strips in turns. So who leaves P or dS there writes over what it has read itself.
    """

    @staticmethod
    def of(tiling: Any) -> WidePairBackwardTensorMemory:
        queries, d, dv = tiling.tile_m, tiling.d, tiling.dv
        of_dv, of_dk, scores = in_a_row(dv, d, queries)
        first = scores.first + queries // 2
        return WidePairBackwardTensorMemory(scores, Columns(first, queries), of_dv, of_dk, (Columns(first, d // 2),))

    def __post_init__(self) -> None:
        ColumnMap.__post_init__(self)

    @property
    def apart(self) -> int:
        return STRIP

    @property
    def probabilities(self) -> Columns:
        return Columns(self.scores.first, self.scores.count // 2)

    @property
    def left_gradients(self) -> Columns:
        half = self.gradients.count // 2
        return Columns(self.gradients.first + half, half)

    @cached_property
    def regions(self) -> Mapping[str, Columns]:
        return {"dV": self.dv, "dK": self.dk, "S": self.scores, "dP": self.gradients, "dQ": self.dq}

    @property
    def at_once(self) -> tuple[Mapping[str, Columns], ...]:
        sums = {"dV": self.dv, "dK": self.dk}
        return (
            {**sums, "S": self.scores, "dS": self.left_gradients},
            {**sums, "P": self.probabilities, "dQ": self.dq},
            {**sums, "P": self.probabilities, "dP": self.gradients},
        )

    def __str__(self) -> str:
        return self.describe(f"one after the other, P {self.probabilities}, dS {self.left_gradients}")


class WideBackwardTensorMemory(BackwardColumns):
    """Sums over queries of wide rows, transposed: a lane has a column of dV or dK, of `LANES` at a time, for all keys.

    S and dP have a lane for each query. P and dS go to shared memory, so scores are free when they have been read. dQ
    comes in parts, one after the other to the same columns, where there are not enough for all of it.
    """

    @staticmethod
    def of(tiling: Any) -> WideBackwardTensorMemory:
        keys, d, dv = tiling.tile_n, tiling.d, tiling.dv
        scores, gradients, of_dv, of_dk = in_a_row(keys, keys, *(keys * -(-width // LANES) for width in (dv, d)))
        used = of_dk.stop
        widths = [d] if used + d <= COLUMNS else [min(LANES, d - first) for first in range(0, d, LANES)]
        parts = tuple(Columns(used, width) for width in widths)
        return WideBackwardTensorMemory(scores, gradients, of_dv, of_dk, parts)

    @staticmethod
    def lane_columns(width: int) -> list[tuple[int, int]]:
        """(first column, first lane that counts) of each product that gives `LANES` columns of a row a lane each.

        The last one begins early where `width` is no multiple: its first lanes are the one before's last.
        """
        return [(min(n, width - LANES), max(0, n - (width - LANES))) for n in range(0, width, LANES)]

    @cached_property
    def regions(self) -> Mapping[str, Columns]:
        dq = max(self.dq_parts, key=lambda part: part.count)
        return {"S": self.scores, "dP": self.gradients, "dVt": self.dv, "dKt": self.dk, "dQ": dq}

    def __str__(self) -> str:
        parts = " and ".join(str(part.count) for part in self.dq_parts)
        return self.describe(f"dQ in {parts} columns" if len(self.dq_parts) > 1 else "dQ at once")


class QueryPairTensorMemory(BackwardColumns):
    """Columns of each block of a pair: S and dP of its half of the queries, for all keys; half of dVᵀ and dKᵀ.

    P and dS go to shared memory, dS also over dP, two numbers in a column. dQ comes in parts to where the scores were.
    """

    @staticmethod
    def of(tiling: Any) -> QueryPairTensorMemory:
        scores, gradients, dv, dk = in_a_row(*[tiling.tile_n] * 4)
        return QueryPairTensorMemory(scores, gradients, dv, dk, (scores,) * (tiling.d // tiling.tile_n))

    @cached_property
    def regions(self) -> Mapping[str, Columns]:
        return {"S": self.scores, "dP": self.gradients, "dVt": self.dv, "dKt": self.dk}

    def __str__(self) -> str:
        parts = " and ".join(str(part.count) for part in self.dq_parts)
        return self.describe(f"dS over dP, dQ in {parts} columns over S")
