"""Whether two blocks share a tile of keys in the backward: by the area that the mask leaves tiles of either size."""

from __future__ import annotations

import dataclasses

from ....analysis.captured_gradient import Pattern
from ....analysis.program import Program
from ....analysis.tile_lists import QueryLists, reason_for_lists
from ....call.problem import Problem
from ..tiles.order import exchanged, mirror, of_mean_length
from ..tiles.traits import extent_of, sees_score, sums_by
from ..tiles.work import visits_now


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How many blocks share a tile of keys, and why, for people to read."""

    blocks: int
    reason: str

    def __str__(self) -> str:
        return f"{self.blocks} for a tile of keys, {self.reason}"


def sharing_of(
    problem: Problem,
    program: Program,
    alone: tuple[int, int],
    together: tuple[int, int],
    most: float,
    unpaired: tuple[Pattern, ...] = (Pattern.ROW, Pattern.PAIR),
) -> Sharing:
    """Two where their tiles visit at most so many times the area of those of one; tiles of (keys, queries).

    One where registers don't do for two, or where the area is known on the device alone. Of packed sequences it is
    that of sequences of their mean length. `unpaired`: gradients whose sums take the registers.
    """
    if _fills_registers(program, unpaired):
        return Sharing(1, "as sums of gradients take the registers")
    if reason_for_lists(QueryLists, program.mask, extent_of(problem), alone[::-1]) is not None:
        return Sharing(1, "as lists say what each visits")
    areas = [_visited(problem, program, *tile) for tile in (alone, together)]
    if None in areas:
        return Sharing(1, "as tensors decide what each visits")
    one, two = areas
    ratio = two / one if one else 1.0  # type: ignore[operator]
    if ratio > most:
        return Sharing(1, f"as larger ones visit {ratio:.2f} times the area, of {most:.2f} that would pay")
    return Sharing(2, f"which visit {ratio:.2f} times the area of smaller ones, of {most:.2f} that would pay")


def _fills_registers(program: Program, unpaired: tuple[Pattern, ...]) -> bool:
    """Whether sums spilled by two: by row and pair 10 at least, by distance where the derivative sees the score 44."""
    if any(sums_by(program, pattern) for pattern in unpaired):
        return True
    return sees_score(program) and sums_by(program, Pattern.DISTANCE)


def _visited(problem: Problem, program: Program, keys: int, queries: int) -> int | None:
    """Pairs that tiles of so many keys and queries visit, of a head; None where tensors decide."""
    visits = visits_now(mirror(of_mean_length(problem)), exchanged(program.of_keys[0]), keys, queries)
    return None if visits is None else int(visits.sum()) * keys * queries
