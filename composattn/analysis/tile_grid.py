"""A grid of tiles over queries and keys: where each begins, and what its positions and constants can be in it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..graph.expr import DType, Expr, const
from ..graph.linear import INT64, UNKNOWN, Bounds, Ranges
from .interval_values import Bools, Ints, T, Value, widened

INT32 = (-(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Cells:
    """First and last positions of cells, and which of them make up each tile, the last one repeated."""

    first: T
    last: T
    of_tile: T


@functools.lru_cache(64)
def _cells(first: int, stop: int, tile: int, cut: int, device: torch.device | str) -> Cells:
    """On the device: a copy from the host would wait for it. Where ends of both kinds meet, a cell is one position."""
    tiles = torch.arange(first, stop, tile, device=device)
    begins = torch.cat([tiles, torch.arange(-(-first // cut) * cut, stop, cut, device=device)]).sort().values
    lasts = torch.maximum(torch.nn.functional.pad(begins[1:], (0, 1), value=stop) - 1, begins)
    from_, upto = torch.searchsorted(begins, tiles), torch.searchsorted(begins, tiles + tile) - 1
    place = torch.arange(-(-tile // cut) + 2, device=device)
    return Cells(begins, lasts, torch.minimum(from_[:, None] + place, upto[:, None]))


@dataclass
class Grid:
    """Tiles over (B|1, H|1, Tq, Tkv) and the lengths behind it.

    `q_lens`, `kv_lens`: int tensors (B,) where sequences have lengths of their own, at most `q_len` and `kv_len`; of
    tiles that begin beyond a sequence's end nothing is said. `tensors`: what is read in place of a captured tensor, by
    its id; `scalars`: the value of a run-time number, by its id. `rows`: of which query tiles it speaks, None: all.
    `cuts`: numbers at whose multiples positions of queries and of keys are cut besides: bounds hold in cells between
    (`q // n` is one number there, and `q % n` moves one way).
    """

    q_len: int
    kv_len: int
    tile: tuple[int, int]
    batch: int = 1
    heads: int = 1
    device: torch.device | str = "cpu"
    q_lens: T | None = None
    kv_lens: T | None = None
    tensors: Mapping[int, T] = field(default_factory=dict)
    scalars: Mapping[int, float] = field(default_factory=dict)
    rows: tuple[int, int] | None = None
    cuts: tuple[int | None, int | None] = (None, None)

    @property
    def positions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last + 1 position of queries and of keys."""
        if self.rows is None:
            return (0, self.q_len), (0, self.kv_len)
        first, stop = self.rows
        return (first * self.tile[0], min(stop * self.tile[0], self.q_len)), (0, self.kv_len)

    def count(self, which: int) -> int:
        """How many tiles: of queries (0) or keys (1)."""
        first, stop = self.positions[which]
        return -(-(stop - first) // self.tile[which])

    def starts(self, which: int) -> T:
        """First position of every tile: of queries (0) or keys (1)."""
        shape = (-1, 1) if which == 0 else (1, -1)
        return torch.arange(*self.positions[which], self.tile[which], device=self.device).view(1, 1, *shape)

    def cells(self, which: int) -> Cells | None:
        """The cells of queries (0) or keys (1); None where they are the tiles."""
        cut = self.cuts[which]
        return None if cut is None else _cells(*self.positions[which], self.tile[which], cut, self.device)

    def leaf(self, name: str) -> Ints:
        if name in ("q", "kv"):
            which = int(name == "kv")
            cells, length = self.cells(which), (self.q_len, self.kv_len)[which]
            low = (
                self.starts(which)
                if cells is None
                else cells.first.view((1, 1, -1, 1) if which == 0 else (1, 1, 1, -1))
            )
            high = low + (self.tile[which] - 1 if cells is None else cells.last.view_as(low) - low)
            lens = (self.q_lens, self.kv_lens)[which]
            last = length - 1 if lens is None else (lens.view(-1, 1, 1, 1).to(torch.int64) - 1).clamp(min=0)
            width = min(self.tile[which], self.cuts[which] or self.tile[which]) - 1
            if isinstance(last, int):
                return Ints(low, high.clamp(max=last), width=width)
            return Ints(torch.minimum(low, last), torch.minimum(high, last), width=width)
        if name in ("b", "h"):
            n, shape = (self.batch, (-1, 1, 1, 1)) if name == "b" else (self.heads, (1, -1, 1, 1))
            value = torch.arange(n, device=self.device).view(shape)
            return Ints(value, value, width=0)
        lens = self.q_lens if name == "q_len" else self.kv_lens
        if lens is not None:
            value = lens.view(-1, 1, 1, 1).to(torch.int64)
            return Ints(value, value, width=0)
        return self.exactly(self.q_len if name == "q_len" else self.kv_len)

    def exactly(self, value: int) -> Ints:
        v = torch.full((1, 1, 1, 1), value, dtype=torch.int64, device=self.device)
        return Ints(v, v, 0, value, width=0)

    def constant(self, value: Any, dtype: DType) -> Value:
        if dtype is DType.BOOL:
            yes = torch.full((1, 1, 1, 1), bool(value), device=self.device)
            return Bools(yes, ~yes)
        if dtype.is_integer:
            return self.exactly(int(value))
        v = torch.full((1, 1, 1, 1), float(value), dtype=torch.float64, device=self.device)
        return widened(v.nan_to_num(0.0, math.inf, -math.inf), v.nan_to_num(0.0, math.inf, -math.inf), v.isnan())

    @cached_property
    def everywhere(self) -> _RangesOfCall:
        """What holds of integers in all tiles, known on the host."""
        last = {"b": self.batch - 1, "h": self.heads - 1, "q": self.q_len - 1, "kv": self.kv_len - 1}
        most = last | {"q_len": self.q_len, "kv_len": self.kv_len}  # a sequence's own may be any up to it
        return _RangesOfCall({name: (0, n) for name, n in most.items()}, self.scalars)


class _RangesOfCall(Ranges):
    """Ranges of one call, step by step as machines compute: what may overflow its type may be any number.

    Never less than the bounds that `intervals.Tiles` has, whose ends are those of int64 where nothing is known.
    """

    def __init__(self, leaves: Mapping[str, Bounds], scalars: Mapping[int, float]) -> None:
        super().__init__(leaves)
        self.scalars = scalars

    def find(self, expr: Expr) -> Bounds:
        if expr.op == "scalar" and expr.dtype.is_integer:
            value = self.scalars.get(id(expr.attr), expr.attr.value)
            return value, value
        low, high = super().find(expr)
        if expr.dtype is DType.INT32 and not (INT32[0] <= low and high <= INT32[1]):
            low, high = (
                min(low, INT32[0]),
                max(high, INT32[1]),
            )  # as in tiles: a kernel wraps, torch does not
        least, most = INT64 if expr.dtype.is_integer else UNKNOWN
        return (low, high) if least <= low and high <= most else (least, most)

    def rule(self, op: str) -> Callable[..., Bounds | None] | None:
        return _STEPS.get(op) or super().rule(op)


def _sum(r: Ranges, e: Expr, x: Expr, y: Expr) -> Bounds:
    (a, b), (c, d) = r.of(x), r.of(y)
    return (a + c, b + d) if e.op == "add" else (a - d, b - c)


def _product(r: Ranges, e: Expr, x: Expr, y: Expr) -> Bounds:
    corners = [a * b for a in r.of(x) for b in r.of(y)]
    return min(corners), max(corners)


# where `Ranges` sees sums whole, whose steps may wrap
_STEPS: dict[str, Callable[..., Bounds | None]] = {
    "add": _sum, "sub": _sum, "mul": _product, "neg": lambda r, e, x: (-r.of(x)[1], -r.of(x)[0]),
    "lshift": lambda r, e, x, y: _product(r, e, x, const(1 << int(y.attr))) if y.is_const else None,
}  # fmt: skip
