"""Masks on the positions of an image, row by row, as 2-D neighbourhoods are: how they read in strips of its columns.

128 queries that lie together are a part of a row, or a few rows: of each row they see, tiles of keys have all columns.
The same number of queries from a few columns, 16 of 8 rows each, sees fewer keys: of each row the columns around these.
So the image is cut into strips of 16 or 8 columns, whose keys are twice as many columns wide and overlap; each is a
sequence of its own, row by row. An image of 32 columns or fewer may be one strip.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.nn.functional import pad

from ..graph.evaluate import Env, evaluate
from ..graph.expr import Dep, Expr, const, index, walk
from ..graph.ops import all_of, apply
from ..graph.rebuilt import rebuild, substitute
from .residues import terms

WIDTHS = (16, 8)  # columns of a strip that is not the whole image
WHOLE_WIDTHS = (32, 16, 8)  # columns of an image that is one: of such rows tiles are made
PART = 64  # keys of a strip, of which it is said at once that their gradient is written: as few as a copy brings
_MOST = 1024  # columns of an image: who sees which is found for each pair of them
POSITIONS = Dep.Q | Dep.KV


@dataclasses.dataclass(frozen=True)
class CutRow:
    """The last row of an image, of which only the first `columns` are there: the one `at` in the image.

    A strip's queries have it at row `q_row` and its keys at row `kv_row`, with which a tile begins: copies bring it by
    a descriptor of its own. Between the rows before and it there may be some that are not there.
    """

    at: int
    columns: int
    q_row: int
    kv_row: int


@dataclasses.dataclass(frozen=True)
class Strips:
    """Strips of an image of `columns` columns. Keys begin `before` columns in front of the queries, also outside.

    `beyond`: whether the mask's own terms would show columns that are outside, as those of causal axes do.
    `several_axes`: rows are of more than one axis, so those that a row sees need not lie together.
    `apart`: columns of a strip; its keys are `wide` columns. `above`: rows in front of the image's first one with which
    keys begin, so that tiles of keys begin where rows of queries do that see them. `cut`: the last row, where it is not
    whole.
    """

    columns: int
    before: int
    beyond: bool = False
    several_axes: bool = False
    apart: int = WIDTHS[0]
    above: int = 0
    cut: CutRow | None = None

    @property
    def is_whole(self) -> bool:
        """Whether one strip is the image, whose keys no other strip has."""
        return self.apart == self.columns

    @property
    def wide(self) -> int:
        return self.columns if self.is_whole else 2 * self.apart

    @property
    def count(self) -> int:
        """The last one may reach beyond the image."""
        return -(-self.columns // self.apart)

    def queries_of(self, length: int) -> int:
        """Queries of a strip of images of `length` positions."""
        return (length // self.columns if self.cut is None else self.cut.q_row + 1) * self.apart

    def keys_of(self, length: int) -> int:
        """Keys of a strip, those above the image counted."""
        return (length // self.columns + self.above if self.cut is None else self.cut.kv_row + 1) * self.wide

    def adds(self, strip: Any) -> Any:
        """1 where strip number `strip` adds what it has of its keys' gradients to what its neighbours write, else 0.

        The last one writes, so that every column is written but those that the first one alone has.
        """
        return (self.count - 1 - strip) % 2

    @property
    def words(self) -> str:
        """For people to read."""
        keys = f"keys of {self.wide} from {self.before} before"
        above = f" and {self.above} rows above" if self.above else ""
        cut = "" if self.cut is None else f", with {self.cut.columns} columns of a last row"
        return f"{self.count} of {self.apart} columns of an image of {self.columns}, {keys}{above}{cut}"

    def mask(self, mask: Expr) -> Expr:
        """`of` a mask, false outside of the image."""
        inside = []
        column = self._places()[_coordinates("kv", self.columns)[1]]
        if self.above:
            inside.append(apply("ge", index("kv"), const(self.above * self.wide)))
        if self.beyond:
            inside += [apply("ge", column, const(0)), apply("lt", column, const(self.columns))]
        if self.cut is not None:
            before = self._before_cut(self.cut)
            inside.append(apply("or", before, apply("ge", index("kv"), const(self.cut.kv_row * self.wide))))
            # a row has so many columns; as an "or" of both, a mask would need more loops over keys than there may be
            there = apply("where", before, const(self.columns), const(self.cut.columns))
            inside.append(apply("lt", column, there))
        return all_of([self.of(mask), *inside])

    def of(self, graph: Expr) -> Expr:
        """`graph`, which `reads_image` alone, for strip b % count of entry b // count: of place i is row i // apart of
        the image (for keys i // wide - above), and column i % apart of the strip (i % wide).
        """
        return substitute(in_image(graph, self.columns), self._places())

    def _places(self) -> dict[Expr, Expr]:
        """Row and column of the image by a strip's places."""
        first = apply("mul", apply("mod", index("b"), const(self.count)), const(self.apart))
        places = {index("b"): apply("floordiv", index("b"), const(self.count))}
        for name, wide, start in (("q", self.apart, first), ("kv", self.wide, apply("sub", first, const(self.before)))):
            row, column = _coordinates(name, wide)
            if name == "kv" and self.above:
                row = apply("sub", row, const(self.above))
            own = self._in_image(name, row), apply("add", column, start)
            places |= dict(zip(_coordinates(name, self.columns), own, strict=True))
        return places

    def _in_image(self, name: str, row: Expr) -> Expr:
        """The row of the image by that of a strip, of which those that are not there count as others."""
        if self.cut is None:
            return row
        if name == "q":
            return apply("minimum", row, const(self.cut.at))
        missing = self.cut.kv_row - self.above - self.cut.at
        return apply("where", self._before_cut(self.cut), row, apply("sub", row, const(missing)))

    def _before_cut(self, cut: CutRow) -> Expr:
        """Whether a key is of a row before the cut one."""
        return apply("lt", index("kv"), const((cut.at + self.above) * self.wide))


def parts_of(keys: Any, tile: int) -> Any:
    """How many flags say which gradients of a strip's `keys` are written: one for `PART` keys of each whole tile."""
    return (keys + (tile - 1)) // tile * -(-tile // PART)


def in_columns(term: Expr, wide: int, name: str = "kv") -> bool:
    """Whether a term of a mask `of` strips is of the columns of keys (or queries: `name` "q"), which are so `wide`, and
    the same for all their rows of the image.
    """
    of = index(name).deps
    return bool(term.deps & of) and not _deps_without(term, _coordinates(name, wide)[1]) & of


def by_rows(term: Expr, wide: int, name: str = "kv") -> tuple[Expr, Expr, Expr] | None:
    """A term that is one of columns in some rows and another one in others: which rows these are, and the two.

    None of a term that is not of that kind; `wide` and `name` as of `in_columns`.
    """
    choices = [node for node in walk(term) if node.op == "where"]
    if len(choices) != 1:
        return None
    rows, *values = choices[0].args
    ours, others = [substitute(term, {choices[0]: value}) for value in values]
    of_columns = in_columns(ours, wide, name) and in_columns(others, wide, name)
    return (rows, ours, others) if of_columns and not in_columns(rows, wide, name) else None


def reads_image(graph: Expr, columns: int) -> bool:
    """Whether it knows positions by their row and column in the image alone."""
    known = *_coordinates("q", columns), *_coordinates("kv", columns)
    return not _deps_without(in_image(graph, columns), *known) & POSITIONS


@functools.lru_cache(maxsize=8)
def rows_seen(mask: Expr, columns: int, rows: tuple[int, int], heads: int) -> torch.Tensor:
    """bool `rows` (of queries, of keys): whether a row may see another, of a mask that has strips, of any head."""
    q_row, kv_row = _coordinates("q", columns)[0], _coordinates("kv", columns)[0]
    found = torch.ones(rows, dtype=torch.bool, device="cpu")
    q, kv, h = (torch.arange(n, device="cpu") for n in (*rows, heads))
    q, h = q[:, None], h[:, None, None]
    at = Env({"q": q, "kv": kv, "h": h})
    for term in terms(in_image(mask, columns)):
        if not _deps_without(term, q_row, kv_row) & POSITIONS:
            seen = evaluate(substitute(term, {q_row: index("q"), kv_row: index("kv")}), at)
            found = found & (seen.any(0) if seen.ndim == 3 else seen)
    return found


def tiles_seen(seen: torch.Tensor, tile: tuple[int, int], cut: bool = False) -> list[float]:
    """How many tiles of keys a tile of queries visits, on average, by the rows that see each other (`rows_seen`): where
    keys begin no row, one, ... above the image, fewer than a tile has.

    `tile`: rows of either. `cut`: whether tiles begin with the last row.
    """
    kv_rows, (m, n) = seen.shape[1], tile
    parts = [seen[:-1], seen[-1:]] if cut else [seen]
    of_queries = torch.cat([pad(rows, (0, 0, 0, -len(rows) % m)).unflatten(0, (-1, m)).any(1) for rows in parts])
    places = (
        torch.arange(kv_rows, device="cpu") + torch.arange(n, device="cpu")[:, None, None]
    ) // n  # by rows above, of each row of keys
    last = (kv_rows + n - 1) // n + 1
    if cut:
        places[..., -1] = last
    shape = n, len(of_queries), kv_rows
    rows = torch.zeros(n, shape[1], last + 1, dtype=torch.int32, device="cpu")
    rows.scatter_add_(2, places.expand(shape), of_queries.int().expand(shape))
    return ((rows > 0).sum((1, 2)) / shape[1]).tolist()


def strips_of(mask: Expr, apart: int = WIDTHS[0]) -> Strips | None:
    """Strips of `apart` columns whose queries see nothing but their own keys; None where there are none. An image of
    `apart` columns is one strip.

    Keys begin 0, 8, 16, ... columns before, or a multiple of 4 or 2 where these would not be all, and few of them.

    Looks for a conjunction of terms of rows (q // n, kv // n) and terms of columns (q % n, kv % n), with one n.
    """
    columns, several_axes = _columns(mask)
    if columns is None or columns < apart or columns > _MOST:
        return None
    mask = in_image(mask, columns)
    (q_row, q_column), (kv_row, kv_column) = _coordinates("q", columns), _coordinates("kv", columns)
    of_columns = []
    for term in terms(mask):
        if not term.deps & ~POSITIONS and not _deps_without(term, q_column, kv_column):
            of_columns.append(substitute(term, {q_column: index("q"), kv_column: index("kv")}))
        elif _deps_without(term, q_row, kv_row) & POSITIONS:
            return None
    if not of_columns:
        return None
    found = _around(all_of(of_columns), columns, apart)
    return None if found is None else dataclasses.replace(found, several_axes=several_axes)


def all_strips(mask: Expr) -> list[Strips]:
    """Strips of each width that serves the mask, and the whole image where it is narrow."""
    columns, _ = _columns(mask)
    widths = dict.fromkeys((*WIDTHS, *(wide for wide in WHOLE_WIDTHS if wide == columns)))
    return [found for apart in widths if (found := strips_of(mask, apart)) is not None]


def _around(sees: Expr, columns: int, apart: int) -> Strips | None:
    """Strips whose keys are all columns that their queries see; None where they would be too wide, or none is seen."""
    wide = columns if apart == columns else 2 * apart
    q, kv = torch.arange(columns, device="cpu")[:, None], torch.arange(-wide, columns + wide, device="cpu")
    seen = evaluate(sees, Env({"q": q, "kv": kv})).expand(columns, len(kv))
    # by strip, and by column from wide before the image's first one on
    seen = pad(seen, (0, 0, 0, -columns % apart))
    of_strips = seen.reshape(-1, apart, len(kv)).any(1).tolist()
    inside = range(wide, wide + columns)
    ahead = [c - wide - s * apart for s, row in enumerate(of_strips) for c in inside if row[c]]
    if not ahead or max(ahead) - min(0, *ahead) >= wide:
        return None
    least, most = max(0, -min(ahead)), min(apart, wide - 1 - max(ahead))
    if least > most:  # keys of the second strip would begin in front of the image too
        return None
    before = next(b for step in (8, 4, 2, 1) if (b := -(-least // step) * step) <= most)
    firsts = [s * apart + wide - before for s in range(len(of_strips))]
    own = [(row[c], c) for row, first in zip(of_strips, firsts, strict=True) for c in range(first, first + wide)]
    return Strips(columns, before, any(shown and c not in inside for shown, c in own), apart=apart)


def _columns(mask: Expr) -> tuple[int | None, bool]:
    """The n of all q // n, q % n and the same of kv, or of several the one that divides all others; whether there are
    several. None where there is none.
    """
    positions = index("q"), index("kv")
    found = {n.args[1].attr for n in walk(mask) if n.op in ("floordiv", "mod") and n.args[0] in positions}
    if not found or not all(isinstance(n, int) and n > 1 for n in found):
        return None, False
    least: int = min(found)
    return None if any(n % least for n in found) else least, len(found) > 1


def in_image(graph: Expr, columns: int) -> Expr:
    """`graph` with positions by their row and column in an image: q // (m * columns) is row // m, and so on.

    Of three axes, as of a video, all but the last one are rows, one below the other.
    """
    done: dict[Expr, Expr] = {}
    for node in walk(graph):
        args = tuple(done[a] for a in node.args)
        done[node] = _by_row(node, columns) or (node if args == node.args else rebuild(node, args))
    return done[graph]


def _by_row(node: Expr, columns: int) -> Expr | None:
    """A quotient or a remainder of a position, by more than a row; None of anything else."""
    if node.op not in ("floordiv", "mod") or not isinstance(node.args[1].attr, int):
        return None
    of, by = node.args[0], node.args[1].attr
    if of.op == "mod" and node.op == "floordiv" and of.args[0] in (index("q"), index("kv")):
        size = of.args[1].attr
        if isinstance(size, int) and size % columns == 0 == by % columns:
            row = apply("mod", _coordinates(of.args[0].attr, columns)[0], const(size // columns))
            return row if by == columns else apply("floordiv", row, const(by // columns))
    if of not in (index("q"), index("kv")) or by % columns or by == columns:
        return None
    row, column = _coordinates(of.attr, columns)
    if node.op == "floordiv":
        return apply("floordiv", row, const(by // columns))
    above = apply("mul", apply("mod", row, const(by // columns)), const(columns))
    return apply("add", above, column)


def _coordinates(name: str, columns: int) -> tuple[Expr, Expr]:
    """Row and column of a position in an image with so many columns."""
    return apply("floordiv", index(name), const(columns)), apply("mod", index(name), const(columns))


def _deps_without(graph: Expr, *known: Expr) -> int:
    """What it changes with besides these; the batch may be of them."""
    return substitute(graph, dict.fromkeys(known, index("b"))).deps & ~Dep.B  # a constant would be computed with
