"""Tensors that the analysis derives from captured tensors: range minima of per-row values, where columns match a row.

A `Derived` is a capture like any other to whoever reads it, computed by a few torch operations on the captured
tensor's device, with no host synchronisation and O(S log S) work. It is computed when it is made, and again, into the
same storage, by `refresh` when a tensor it comes from was written to (torch's version counter says so). Whoever runs a
kernel calls `refresh` on its captures before: a few attribute reads where nothing changed. A tensor made in inference
mode has no counter and is recomputed at every call. Inside a captured CUDA graph nothing is recomputed at replay unless
the tensor was written to between the last call and the capture: capture a call that follows the write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeGuard

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ..graph.expr import Capture, Expr, const, read, size
from ..graph.lent import Lent
from ..graph.linear import FAR, larger, smaller
from ..graph.ops import apply

Recipe = Callable[..., torch.Tensor]


class Derived(Capture):
    """A tensor computed from captured ones; `tensor` stays the same object for as long as this lives."""

    __slots__ = ("__weakref__", "_seen", "recipe", "sources", "version")

    def __init__(self, recipe: Recipe, sources: tuple[Capture, ...]) -> None:
        self.recipe, self.sources, self.version = recipe, sources, 0
        self._seen = self._stamp()
        super().__init__(self._compute())

    @property
    def range(self) -> tuple[int, int]:
        if isinstance(self, Windows):
            return self.sources[0].range
        return (0, FAR) if is_matches(self) else super().range

    def _stamp(self) -> tuple[Hashable, ...]:
        return tuple(stamp(s) for s in self.sources)

    def _compute(self) -> torch.Tensor:
        with _plain_tensors():
            return self.recipe(*(s.tensor for s in self.sources)).contiguous()

    def refresh(self) -> None:
        """Bring the tensor up to date with what it comes from; costs nothing where that has not changed."""
        for source in self.sources:
            if isinstance(source, Derived):
                source.refresh()
        stamp = self._stamp()
        if stamp != self._seen or None in stamp:
            made = self._compute()
            if made is not self.tensor:
                self.tensor.copy_(made)
            self._seen, self.version = stamp, self.version + 1

    def __repr__(self) -> str:
        return f"Derived({getattr(self.recipe, '__name__', 'recipe')}, {list(self.tensor.shape)})"


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Inside, tensors are made that can be written to anywhere: not so an inference tensor outside of its mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def refresh(captures: Iterable[Capture]) -> None:
    """Bring every derived tensor among `captures` up to date; to be called before each launch."""
    for capture in captures:
        if isinstance(capture, Derived):
            capture.refresh()


class Upkeep:
    """Brings the derived tensors among `captures` up to date; where nothing was written to it only reads versions."""

    def __init__(self, captures: Iterable[Capture]) -> None:
        self.derived = [c for c in captures if isinstance(c, Derived)]
        self.written = list(_written(self.derived))
        self._seen: list[Hashable] | None = None

    def __call__(self) -> None:
        """To be called before each launch."""
        if self.derived:
            seen: list[Hashable] = [stamp(c) for c in self.written]
            if seen != self._seen or None in seen:
                refresh(self.derived)
                self._seen = seen


def _written(derived: Iterable[Derived]) -> dict[Capture, None]:
    """The captured tensors that others write to, from which all of `derived` come."""
    found: dict[Capture, None] = {}
    for source in (s for d in derived for s in d.sources):
        found |= _written([source]) if isinstance(source, Derived) else {source: None}
    return found


def value_of(capture: Capture, replaced: Mapping[Capture, torch.Tensor]) -> torch.Tensor:
    """What is to be read for `capture` where other tensors stand in for captured ones.

    Where their memory is another than the captures hold (compiled code copies its inputs at times), what is derived
    from it is computed anew.
    """
    if capture in replaced or not isinstance(capture, Derived):
        return replaced.get(capture, capture.tensor)
    sources = [value_of(s, replaced) for s in capture.sources]
    if all(_same_memory(now, s.tensor) for now, s in zip(sources, capture.sources, strict=True)):
        return capture.tensor
    with torch.no_grad():
        return capture.recipe(*sources).contiguous()


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())


def stamp(source: Capture) -> Hashable:
    """Changes when what `source` stands for was written to, or it stands for another; None where nobody says so."""
    if isinstance(source, Derived):
        return source.version
    now = version(source.tensor)
    return (now, source.epoch) if now is not None and isinstance(source, Lent) else now


def version(tensor: torch.Tensor) -> tuple[object, int] | None:
    """Changes when `tensor` is written to or its memory is another; None where nobody says so.

    Torch counts writes by the version, but not `tensor.data = other`, which the address shows. Inference tensors and
    those below a transform of torch.func have neither.
    """
    if tensor.is_inference() or is_functorch_wrapped_tensor(tensor):
        return None
    return _distrust.get() or tensor._version, tensor.data_ptr()


_distrust: ContextVar[object] = ContextVar("distrust", default=None)


@contextmanager
def distrusting() -> Iterator[None]:
    """Inside, no tensor counts as unwritten since before: what is derived is computed anew, once."""
    token = _distrust.set(object())
    try:
        yield
    finally:
        _distrust.reset(token)


_made: weakref.WeakValueDictionary[Any, Derived] = weakref.WeakValueDictionary()


def derive(name: Hashable, recipe: Recipe, *sources: Capture, kind: type[Derived] = Derived) -> Derived:
    """The one `Derived` of this name and these sources."""
    key = (name, *(s.identity for s in sources))
    found = _made.get(key)  # it keeps its sources alive, so an id in the key can't have been taken over
    if found is None:
        found = _made[key] = kind(recipe, sources)
    return found


# --- minimum and maximum of a captured tensor over a range of one index ------------------------------------

LEVELS = 9  # windows of 1, 2, 4, ... 256 rows: exact for ranges up to 512 rows; the last level is the whole


def range_extreme(capture: Capture, dim: int, others: tuple[Expr, ...], low: Expr, high: Expr, largest: bool) -> Expr:
    """The smallest (largest) of `capture` over positions low..high of `dim`, the other indices given.

    `low` must be provably at least 0; positions beyond the end read the last element, as reads do.
    Two overlapping windows of 2^k rows cover a range exactly (Bender and Farach-Colton 2000, section 3).
    """
    if low is high:
        return read(capture, (*others[:dim], low, *others[dim:]))
    given = (*others[:dim], low, *others[dim:])
    # of a dimension read at a constant only that part is needed
    fixed = tuple(i.attr if i.is_const and d != dim else None for d, i in enumerate(given))
    recipe = _WindowsOf(dim, largest, fixed)
    if is_matches(capture) and largest is (fixed[0] in LARGEST_OF_TILE):
        fixed = (None, *fixed[1:])  # but all of the four ends, which a tile asks for: one table for them
        recipe = _WindowsOf(dim, False, fixed, turned=END)
    table = derive(recipe, recipe, capture, kind=Windows)
    last = apply("sub", size(table, 1 + dim - sum(i is not None for i in fixed[:dim])), const(1))
    low, high = smaller(low, last), smaller(high, last)
    count = apply("add", apply("sub", high, low), const(1))
    level: Expr = const(0)
    for k in range(1, LEVELS):
        level = apply("add", level, apply("cast_int32", apply("ge", count, const(1 << k))))
    level = apply("add", level, apply("cast_int32", apply("gt", count, const(1 << LEVELS))))
    start = apply("sub", apply("add", high, const(1)), apply("lshift", const(1), level))
    ends = (low, larger(start, const(0)))
    values = [
        read(table, (level, *(i for i, f in zip((*others[:dim], at, *others[dim:]), fixed, strict=True) if f is None)))
        for at in ends
    ]
    return apply("maximum" if largest else "minimum", *values)


@dataclass(frozen=True)
class _WindowsOf:
    """The recipe of a table of windows over `dim`, of what is left of a tensor at the positions that are `fixed`.

    `turned`: from which part of the first dimension on the other extreme is kept; None, of no part.
    """

    __name__: ClassVar[str] = "windows"

    dim: int
    largest: bool
    fixed: tuple[int | None, ...]
    turned: int | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Table(self, x).of(x)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """`x` at the positions that are fixed."""
        for d in reversed(range(len(self.fixed))):
            at = self.fixed[d]
            x = x if at is None else x.select(d, at)
        return x


class Windows(Derived):
    """A table of windows, computed in place by one operation a level."""

    __slots__ = ("_table",)

    def _compute(self) -> torch.Tensor:
        with _plain_tensors():
            x = self.sources[0].tensor
            if not hasattr(self, "_table"):
                self._table = _Table(self.recipe, x)  # type: ignore[arg-type]
            return self._table.of(x)


class _Table:
    """The extreme of each window of 2^k positions, k along a new first dimension, and last that of the whole.

    It stands, too, where a window would reach beyond the end: nobody asks for those. The views that operations read and
    write are kept: a dozen operations remain where making the views anew takes three times as many.
    """

    def __init__(self, recipe: _WindowsOf, x: torch.Tensor) -> None:
        self.recipe = recipe
        x, dim = countable(recipe.part(x)), recipe.dim - sum(i is not None for i in recipe.fixed[: recipe.dim])
        self.tensor = x.new_empty((LEVELS + 1, *x.shape))
        levels = self.tensor.unbind()
        self.rows, self.wider, self.dim = levels[0], self.tensor[1:], dim
        self.pairs = []  # neighbouring windows, and those of twice their width
        for k, (last, level) in enumerate(pairwise(levels[:LEVELS])):
            kept = x.shape[dim] - (1 << k)
            if kept <= 0:
                break
            self.pairs.append((last.narrow(dim, 0, kept), last.narrow(dim, 1 << k, kept), level.narrow(dim, 0, kept)))
        self.pick, self.over = (torch.maximum, torch.amax) if recipe.largest else (torch.minimum, torch.amin)
        # inverted bits turn the order around, with no number that has no opposite
        self.turned = None if recipe.turned is None else self.tensor[:, recipe.turned :]
        self.turned_rows = None if self.turned is None else self.turned[0]

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The table of `x`, a tensor of the first one's form; always in the same memory."""
        self.rows.copy_(self.recipe.part(x))
        if self.turned_rows is not None:
            self.turned_rows.bitwise_not_()
        self.wider.copy_(self.over(self.rows, self.dim, keepdim=True))
        for here, there, both in self.pairs:
            self.pick(here, there, out=both)
        if self.turned is not None:
            self.turned.bitwise_not_()
        return self.tensor


# --- columns whose captured value compares with that of the row -----------------------------------------------

START, FULL_END, END, FULL_START = range(4)
LARGEST_OF_TILE = (END, FULL_START)  # what rows see together begins at the smallest START, what all see at the largest


def matches(
    op: str,
    rows: Capture,
    columns: Capture,
    rows_order: tuple[int, ...],
    columns_order: tuple[int, ...],
) -> Derived:
    """int32 (4, B|1, H|1, Sq): per row, where the columns with `column op row` begin and end, and a range of such only.

    In the order of `START`, `FULL_END`, `END`, `FULL_START`.

    `op` is eq, lt, le, gt or ge; the values are integers. `*_order` are the dimensions of the tensors that stand for
    (b, h, position); -1 where there is none. A row with no such column gets empty ranges. The range of such only is
    the whole where it has no gap, else (of an inequality) the longer of those that begin at 0 and that reach the end.
    The columns beyond the end of `columns` repeat its last one, as reads do, hence a range that reaches it has no end.
    """

    same = rows == columns and rows_order == columns_order

    def bounds_of_matches(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        c = _arranged(c, columns_order)
        if same and op == "eq":
            return _equal_to_itself(c.contiguous()).to(torch.int32)
        r, c = _arranged(r, rows_order), c.to(torch.int64)
        lead = [max(sizes) for sizes in zip(r.shape[:2], c.shape[:2], strict=True)]
        r, c = _reaching(r.to(torch.int64), lead), _reaching(c, lead)
        if op == "eq":
            return _equal(r, c)
        if op in ("gt", "ge"):
            r, c = ~r, ~c  # turns the order around, with no number that has no opposite
        return _below(r, c, strictly=op in ("lt", "gt"))

    return derive((op, rows_order, columns_order), bounds_of_matches, rows, columns)


def is_matches(capture: Capture) -> TypeGuard[Derived]:
    """Whether this is a table of `matches`."""
    return isinstance(capture, Derived) and capture.recipe.__name__ == "bounds_of_matches"


def without_gaps(table: Derived) -> Derived:
    """Of a table of `matches`, int32 (B|1, H|1): whether the columns that match a row have no gaps, in any row."""
    return derive(("without gaps",), _without_gaps, table)


def _without_gaps(table: torch.Tensor) -> torch.Tensor:
    # START and FULL_END against FULL_START and END
    return (table[:END] == table[END:].flip(0)).amin((0, -1)).to(torch.int32)


def _equal(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    n = c.shape[-1]
    ordered, where = c.sort(dim=-1, stable=True)
    left, right = torch.searchsorted(ordered, r), torch.searchsorted(ordered, r, right=True)
    some = right > left
    start = where.gather(-1, left.clamp(max=n - 1))
    end = where.gather(-1, (right - 1).clamp(min=0)) + 1
    whole = some & (end - start == right - left)
    return _ranges(start, end, some, start, end, whole, n)


def _equal_to_itself(c: torch.Tensor) -> torch.Tensor:
    """`_equal` of a tensor and itself, where no row is without a match."""
    n = c.shape[-1]
    if c.device.type == "cpu" and bool((c[..., 1:] >= c[..., :-1]).all()):  # elsewhere a look would wait
        return _runs(c)
    ordered, where = c.sort(dim=-1, stable=True)
    first, stop = torch.searchsorted(ordered, c), torch.searchsorted(ordered, c, right=True)
    start, end = where.gather(-1, first), where.gather(-1, stop - 1).add_(1)
    apart = end - start != stop.sub_(first)
    end.masked_fill_(end == n, FAR)
    table = torch.stack([start, end, end, start])
    table[FULL_END].masked_fill_(apart, 0)
    table[FULL_START].masked_fill_(apart, FAR)
    return table


def _runs(c: torch.Tensor) -> torch.Tensor:
    """`_equal_to_itself` of ascending values: with no search, several times as fast on a CPU."""
    n = c.shape[-1]
    at = torch.arange(n, dtype=torch.int32).expand_as(c)
    same = torch.zeros((2, *c.shape), dtype=torch.bool)  # as the one before, as the one behind
    torch.eq(c[..., 1:], c[..., :-1], out=same[0, ..., 1:])
    same[1, ..., :-1] = same[0, ..., 1:]
    first = at.masked_fill(same[0], 0).cummax(-1).values
    last = at.masked_fill(same[1], n - 1).flip(-1).cummin(-1).values.flip(-1)
    end = (last + 1).masked_fill_(last == n - 1, FAR)
    return torch.stack([first, end, end, first])


def _below(r: torch.Tensor, c: torch.Tensor, strictly: bool) -> torch.Tensor:
    """Where c <= r, or c < r: running extremes are monotone, whatever c is, and bound it from both sides."""
    n = c.shape[-1]
    smallest, largest = c.cummin(-1).values, c.cummax(-1).values
    smallest_after, largest_after = c.flip(-1).cummin(-1).values.flip(-1), c.flip(-1).cummax(-1).values.flip(-1)
    start = torch.searchsorted((~smallest).contiguous(), ~r, right=strictly)
    end = torch.searchsorted(smallest_after.contiguous(), r, right=not strictly)
    all_before = torch.searchsorted(largest.contiguous(), r, right=not strictly)
    all_from = torch.searchsorted((~largest_after).contiguous(), ~r, right=strictly)
    at_start = all_before >= n - all_from
    full_start, full_end = torch.where(at_start, 0, all_from), torch.where(at_start, all_before, n)
    return _ranges(start, end, end > 0, full_start, full_end, full_start < full_end, n)


def _ranges(
    start: torch.Tensor,
    end: torch.Tensor,
    some: torch.Tensor,
    full_start: torch.Tensor,
    full_end: torch.Tensor,
    full: torch.Tensor,
    n: int,
) -> torch.Tensor:
    end, full_end = torch.where(end == n, FAR, end), torch.where(full_end == n, FAR, full_end)
    return torch.stack(
        [
            torch.where(some, start, FAR), torch.where(full, full_end, 0),
            torch.where(some, end, 0), torch.where(full, full_start, FAR),
        ]
    ).to(torch.int32)  # fmt: skip


def _arranged(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`x` as (b, h, position), of a type that torch searches."""
    x = countable(x.detach())
    x = x.permute([d for d in order if d >= 0])
    for position, d in enumerate(order):
        if d < 0:
            x = x.unsqueeze(position)
    return x


def countable(x: torch.Tensor) -> torch.Tensor:
    """`x` of a type that torch orders: a number where it is a bool, wider where it has no sign."""
    if x.dtype is torch.bool or x.dtype is torch.uint16:
        return x.to(torch.int32)
    return x.to(torch.int64) if x.dtype is torch.uint32 else x


def _reaching(x: torch.Tensor, lead: list[int]) -> torch.Tensor:
    """`x` for `lead` batches and heads: beyond its end its last one stands, as in reads."""
    for d, count in enumerate(lead):
        if 1 < x.shape[d] < count:
            x = x.index_select(d, torch.arange(count, device=x.device).clamp(max=x.shape[d] - 1))
    return x.expand(*lead, -1).contiguous()
