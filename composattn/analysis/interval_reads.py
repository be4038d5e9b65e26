"""Bounds of a captured tensor over what each tile reads of it: by blocks, by range minima, or of a whole dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..graph.expr import DType, Expr
from ..graph.linear import bounds
from .derived import countable
from .interval_values import Bools, Ints, T, Value, unbounded, widened
from .tile_grid import Grid


def read_in_tiles(node: Expr, at: list[Any], tiles: Grid) -> Value:
    """A captured tensor between its smallest and largest element among those that a tile reads."""
    held = node.attr.tensor
    x = tiles.tensors.get(id(held), held).detach().to(tiles.device)
    if x.numel() == 0:
        return unbounded(node.dtype, tiles.device)
    if node.dtype is not DType.FLOAT:
        x = x if node.dtype is DType.BOOL else countable(x)
        low, high = _extremes([(x, False), (x, True)], node, at, tiles)
        if node.dtype is DType.BOOL:
            return Bools(high, ~low)
        return Ints(low.to(torch.int64), high.to(torch.int64))
    floor, ceiling = x.nan_to_num(math.inf, math.inf, -math.inf), x.nan_to_num(-math.inf, math.inf, -math.inf)
    low, high, nan = _extremes([(floor, False), (ceiling, True), (x.isnan(), True)], node, at, tiles)
    return widened(low.to(torch.float64), high.to(torch.float64), nan)


def _extremes(sources: list[tuple[T, bool]], node: Expr, at: list[Ints], tiles: Grid) -> list[T]:
    """For each (tensor, largest?), all read at the same places: the extreme over what each tile reads, in its dtype."""
    reading = _Reading(sources)
    for index, v in zip(node.args, at, strict=True):
        reading.dimension(index, v, tiles)
    return reading.extremes()


class _Reading:
    """Tensors that are read at the same places: dimension by dimension reduced to the extremes of each tile."""

    def __init__(self, sources: list[tuple[T, bool]]) -> None:
        self.xs, self.most = [x for x, _ in sources], [largest for _, largest in sources]
        # the position in each dimension, or the axis of the grid along which it goes 0, 1, ...; None for a range
        self.indices: list[T | int | None] = []
        self.ranged: _Range | None = None

    def dimension(self, index: Expr, v: Ints, tiles: Grid) -> None:
        """The next one, which is read at `index`, whose bounds are `v`."""
        d = len(self.indices)
        size, which = self.xs[0].shape[d], int(index.attr == "kv")
        if size == 1:
            self.indices.append(0)
        elif index.op == "index" and index.attr in ("q", "kv") and tiles.cuts[which] is None:
            self._reduce(lambda x, largest: _by_tiles(x, d, tiles.tile[which], tiles.positions[which], largest))
            self.indices.append(2 + which)
        else:  # negative positions count from the end
            signed = bounds(index)[0] < 0 and tiles.everywhere.of(index)[0] < 0
            if v.low is v.high:
                position = torch.where(v.low < 0, v.low + size, v.low) if signed else v.low
                self.indices.append(position.clamp(0, size - 1))
            else:
                self._range(d, size, v, signed)

    def _range(self, d: int, size: int, v: Ints, signed: bool) -> None:
        low, high = v.low.clamp(0, size - 1), v.high.clamp(0, size - 1)
        if signed:
            low, high = torch.where(v.low < 0, 0, low), torch.where(v.low < 0, size - 1, high)
        width = size - 1 if v.width is None or signed else min(v.width, size - 1)
        axis = 3 - (low.shape[3] == 1)
        if low.shape[axis] == low.numel():  # the same for all heads, and moves along one axis of the grid only
            self.xs = _over_ranges(self.xs, self.most, d, low.flatten(), high.flatten(), width)
            self.indices.append(axis)
        elif self.ranged is None:
            self.ranged = _Range(d, low, high, width)
            self.indices.append(None)
        else:  # a second range that moves along both: the whole of that dimension
            self._reduce(lambda x, largest: (torch.amax if largest else torch.amin)(x, d, keepdim=True))
            self.indices.append(torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=low.device))

    def _reduce(self, reduced: Callable[[T, bool], T]) -> None:
        self.xs = [reduced(x, largest) for x, largest in zip(self.xs, self.most, strict=True)]

    def extremes(self) -> list[T]:
        """What each tensor gives, once all dimensions are known."""
        xs = self.xs
        axes = [i for d, i in enumerate(self.indices) if xs[0].shape[d] > 1]
        if all(isinstance(i, int) for i in axes) and axes == sorted(set(axes)):  # type: ignore[type-var]
            lying = [1, 1, 1, 1]
            for place, count in zip(axes, [n for n in xs[0].shape if n > 1], strict=True):
                lying[place] = count  # type: ignore[index]
            return [x.reshape(lying) for x in xs]
        full = [_numbers(xs[0], d, i) if isinstance(i, int) else i for d, i in enumerate(self.indices)]
        if self.ranged is not None:
            return [_over_range(x, self.ranged, full, largest) for x, largest in zip(xs, self.most, strict=True)]
        places = tuple(torch.broadcast_tensors(*full))  # type: ignore[arg-type]
        return [x[places] for x in xs]


def _numbers(x: T, d: int, axis: int) -> T:
    """0, 1, ... along dimension `d` of `x`, lying along `axis` of the grid."""
    return torch.arange(x.shape[d], device=x.device).view([-1 if a == axis else 1 for a in range(4)])


def _by_tiles(x: T, d: int, tile: int, positions: tuple[int, int], largest: bool) -> T:
    """`x` with dimension `d` reduced tile by tile over positions; beyond its end they read the last element."""
    size = x.shape[d]
    first, stop = positions
    count = -(-(stop - first) // tile)
    there = x.narrow(d, min(first, size - 1), max(1, min(size - first, count * tile)))
    missing = count * tile - there.shape[d]
    if missing:
        shape = list(x.shape)
        shape[d] = missing
        there = torch.cat([there, x.narrow(d, size - 1, 1).expand(shape)], d)
    return (torch.amax if largest else torch.amin)(there.unflatten(d, (count, tile)), d + 1)


_AT_ONCE = 2**16  # elements that are gathered for ranges where windows would be fewer elements in more operations


def _over_ranges(xs: list[T], most: list[bool], d: int, low: T, high: T, width: int) -> list[T]:
    """The extremes over positions low[i]..high[i] of dimension `d`, which becomes i; high - low is at most `width`."""
    if len(low) * (width + 1) > max(_AT_ONCE, 4 * xs[0].shape[d]):
        span = _Range(d, low, high, width)
        return [_over_range(x, span, None, largest) for x, largest in zip(xs, most, strict=True)]
    # beyond a range's end its last position stands again
    at = torch.minimum(low[:, None] + torch.arange(width + 1, device=low.device), high[:, None])
    parts = {id(x): x.index_select(d, at.flatten()).unflatten(d, at.shape) for x in xs}
    return [(torch.amax if largest else torch.amin)(parts[id(x)], d + 1) for x, largest in zip(xs, most, strict=True)]


class _Range:
    """Positions low..high of dimension `d`; high - low is at most `width`."""

    def __init__(self, d: int, low: T, high: T, width: int) -> None:
        self.d, self.low, self.width = d, low, width
        # two windows of a power of two cover the range
        self.level = (high - low + 1).to(torch.float64).log2().floor().to(torch.int64)
        self.second = high + 1 - (1 << self.level)


def _over_range(x: T, ranged: _Range, indices: list[T | None] | None, largest: bool) -> T:
    """Smallest or largest over a range of one dimension.

    With `indices`, the other dimensions are read there; without, they stay, and the range's ends are one-dimensional.
    """
    d, pick = ranged.d, torch.maximum if largest else torch.minimum
    levels, n = [x], x.shape[d]
    for k in range((ranged.width + 1).bit_length() - 1):
        last, window = levels[-1], 1 << k
        kept = n - window
        merged = pick(last.narrow(d, 0, kept), last.narrow(d, window, kept))
        levels.append(torch.cat([merged, last.narrow(d, kept, window)], d))
    table = torch.stack(levels)

    def at(position: T) -> T:
        if indices is None:
            return table.movedim(d + 1, 1)[ranged.level, position].movedim(0, d)
        full = [position if i is None else i for i in indices]
        return table[tuple(torch.broadcast_tensors(ranged.level, *full))]

    return pick(at(ranged.low), at(ranged.second))
