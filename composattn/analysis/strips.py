"""Masks on the positions of an image, row by row, as 2-D neighbourhoods are: how they read in strips of its columns.

128 queries that lie together are a part of a row, or a few rows: of each row they see, tiles of keys have all columns.
The same number of queries from a few columns, 16 of 8 rows each, sees fewer keys: of each row the columns around these.
So the image is cut into strips of `QUERIES` columns, whose keys are `KEYS` columns wide and overlap; each is a sequence
of its own, row by row.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import ClassVar

import torch

from ..graph.evaluate import Env, evaluate
from ..graph.expr import Dep, Expr, const, index, walk
from ..graph.ops import apply
from ..graph.rebuilt import substitute
from .residues import terms

QUERIES = 16  # columns of a strip
KEYS = 32  # columns of its keys
_MOST = 1024  # columns of an image: who sees which is found for each pair of them
POSITIONS = Dep.Q | Dep.KV


@dataclasses.dataclass(frozen=True)
class Strips:
    """Strips of an image of `columns` columns. Keys begin `before` columns in front of the queries, also outside.

    `beyond`: whether the mask's own terms would show columns that are outside, as those of causal axes do.
    """

    columns: int
    before: int
    beyond: bool = False

    apart: ClassVar[int] = QUERIES
    wide: ClassVar[int] = KEYS

    @property
    def count(self) -> int:
        return self.columns // QUERIES

    @property
    def words(self) -> str:
        """For people to read."""
        return (
            f"{self.count} of {QUERIES} columns of an image of {self.columns}, keys of {KEYS} from {self.before} before"
        )

    def mask(self, mask: Expr) -> Expr:
        """`of` a mask, false outside of the image."""
        if not self.beyond:
            return self.of(mask)
        column = self._places()[_coordinates("kv", self.columns)[1]]
        inside = apply("and", apply("ge", column, const(0)), apply("lt", column, const(self.columns)))
        return apply("and", self.of(mask), inside)

    def of(self, graph: Expr) -> Expr:
        """`graph`, which `reads_image` alone, for strip b % count: of place i is row i // QUERIES of the image (for
        keys i // KEYS), and column i % QUERIES of the strip (i % KEYS).
        """
        return substitute(graph, self._places())

    def _places(self) -> dict[Expr, Expr]:
        """Row and column of the image by a strip's places."""
        first = apply("mul", apply("mod", index("b"), const(self.count)), const(QUERIES))
        places: dict[Expr, Expr] = {}
        for name, wide, start in (("q", QUERIES, first), ("kv", KEYS, apply("sub", first, const(self.before)))):
            row, column = _coordinates(name, wide)
            own = row, apply("add", column, start)
            places |= dict(zip(_coordinates(name, self.columns), own, strict=True))
        return places


def in_columns(term: Expr) -> bool:
    """Whether a term of a mask `of` strips is of the columns of keys, the same for all rows of the image."""
    return bool(term.deps & Dep.KV) and not _deps_without(term, _coordinates("kv", KEYS)[1]) & Dep.KV


def reads_image(graph: Expr, columns: int) -> bool:
    """Whether it knows positions by their row and column in the image alone."""
    return not _deps_without(graph, *_coordinates("q", columns), *_coordinates("kv", columns)) & POSITIONS


def strips_of(mask: Expr) -> Strips | None:
    """Strips whose queries see nothing but their own keys, with as few columns before as can be; None: there are none.

    Looks for a conjunction of terms of rows (q // n, kv // n) and terms of columns (q % n, kv % n), with one n.
    """
    columns = _columns(mask)
    if columns is None or columns % QUERIES or columns > _MOST:
        return None
    (q_row, q_column), (kv_row, kv_column) = _coordinates("q", columns), _coordinates("kv", columns)
    of_columns = []
    for term in terms(mask):
        if not term.deps & ~POSITIONS and not _deps_without(term, q_column, kv_column):
            of_columns.append(substitute(term, {q_column: index("q"), kv_column: index("kv")}))
        elif _deps_without(term, q_row, kv_row) & POSITIONS:
            return None
    return _around(functools.reduce(partial(apply, "and"), of_columns), columns) if of_columns else None


def _around(sees: Expr, columns: int) -> Strips | None:
    """Strips whose keys are all columns that their queries see; None where they would be too wide, or none is seen."""
    q, kv = torch.arange(columns)[:, None], torch.arange(-KEYS, columns + KEYS)
    seen = evaluate(sees, Env({"q": q, "kv": kv})).expand(columns, len(kv))
    # by strip, and by column from KEYS before the image's first one on
    of_strips = seen.reshape(-1, QUERIES, len(kv)).any(1).tolist()
    inside = range(KEYS, KEYS + columns)
    ahead = [c - KEYS - s * QUERIES for s, row in enumerate(of_strips) for c in inside if row[c]]
    if not ahead or max(ahead) - min(0, *ahead) >= KEYS:
        return None
    before = max(0, -min(ahead))
    firsts = [s * QUERIES + KEYS - before for s in range(len(of_strips))]
    own = [(row[c], c) for row, first in zip(of_strips, firsts, strict=True) for c in range(first, first + KEYS)]
    return Strips(columns, before, any(shown and c not in inside for shown, c in own))


def _columns(mask: Expr) -> int | None:
    """The n of all q // n, q % n and the same of kv; None where there are several."""
    positions = index("q"), index("kv")
    found = {n.args[1] for n in walk(mask) if n.op in ("floordiv", "mod") and n.args[0] in positions}
    columns = found.pop().attr if len(found) == 1 else None
    return columns if isinstance(columns, int) and columns > 1 else None


def _coordinates(name: str, columns: int) -> tuple[Expr, Expr]:
    """Row and column of a position in an image with so many columns."""
    return apply("floordiv", index(name), const(columns)), apply("mod", index(name), const(columns))


def _deps_without(graph: Expr, *known: Expr) -> int:
    """What it changes with besides these; the batch may be of them."""
    return substitute(graph, dict.fromkeys(known, index("b"))).deps & ~Dep.B  # a constant would be computed with
