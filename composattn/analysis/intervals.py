"""Interval arithmetic of a graph over tiles: what a value can be anywhere in a tile, for all tiles at once.

Every node gets bounds (integers and floats) or the two answers it may give (bools), as tensors that broadcast over
(B, H, query tile, kv tile); a row-only value has one kv tile. Bounds are never too tight:

- int32 arithmetic that leaves 32 bits somewhere in a tile may be anything there (a kernel wraps, the reference does
  not; both are inside), and so may arithmetic that leaves 64 bits. Values that are only read and compared are exact, to
  the ends of int64;
- floats are bounded in fp64 and widened outward after each operation by more than fp32 rounding, and by more than the
  error of fast instructions after a transcendental one; a value that may be NaN says so, and fails every comparison
  but `!=`;
- besides, every integer carries a congruence (value ≡ residue mod step) that holds in all tiles.

Captured tensors are bounded by their minima and maxima over the positions that a tile reads: block reductions where the
index is q or kv itself, range minima where it changes with the query tile or the kv tile alone and over one more
dimension, the whole of a dimension otherwise.

Nothing here looks at a value on the host: on a GPU the analysis is a queue of launches, with no synchronisation.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..graph.expr import DType, Expr, walk
from ..graph.linear import INT64, bounds, forget
from ..graph.ops import CASTS
from .derived import countable

T = torch.Tensor


@dataclass
class Bools:
    """May it be true, may it be false."""

    yes: T
    no: T


@dataclass
class Ints:
    """low <= value <= high and value ≡ residue (mod step); step 0: the value is residue everywhere.

    `width`: high - low in any tile is at most this; None where only the tensors know.
    """

    low: T
    high: T
    step: int = 1
    residue: int = 0
    width: int | None = None


@dataclass
class Floats:
    """low <= value <= high, or NaN where `nan`."""

    low: T
    high: T
    nan: T


Value = Bools | Ints | Floats

_INT32 = (-(2**31), 2**31 - 1)
_EDGE = 2.0**63 - 2.0**13  # of int64; what lies below it in fp64 is inside
_ROUNDING = 2.0**-21  # of one operation in fp32, with room
_MOST = 3e38  # beyond it fp32 is infinite
_FAST = 2.0**-9  # of a transcendental in the fastest form that a kernel may use


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
class Tiles:
    """A grid of tiles over (B|1, H|1, Tq, Tkv) and the lengths behind it.

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
        """Those of queries (0) or keys (1); None where they are the tiles."""
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
            if isinstance(last, int):
                return Ints(low, high.clamp(max=last), width=self.tile[which] - 1)
            return Ints(torch.minimum(low, last), torch.minimum(high, last), width=self.tile[which] - 1)
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
        return _widened(v.nan_to_num(0.0, math.inf, -math.inf), v.nan_to_num(0.0, math.inf, -math.inf), v.isnan())

    def value(self, root: Expr) -> Value:
        """Bounds of `root` in every tile."""
        nodes = list(walk(root))
        users = Counter(a for node in nodes for a in node.args)
        values: dict[Expr, Value] = {}
        try:
            for node in nodes:
                values[node] = self._node(node, [values[a] for a in node.args])
                for a in node.args:  # what nobody asks for any more frees its memory
                    users[a] -= 1
                    if not users[a]:
                        values.pop(a, None)
        finally:
            forget()
        return values[root]

    def range(self, node: Expr) -> tuple[int, int]:
        """Bounds of the integer `node` that hold in all tiles, known on the host."""
        v = self._everywhere.known(node)
        assert isinstance(v, Ints)
        return int(v.low.min()), int(v.high.max())

    @cached_property
    def _everywhere(self) -> _OneTile:
        return _OneTile(
            self.q_len, self.kv_len, (self.q_len, self.kv_len), self.batch, self.heads, scalars=self.scalars
        )

    def read(self, node: Expr, at: list[Any]) -> Value:
        return _read(node, at, self)

    def _node(self, node: Expr, args: list[Value]) -> Value:
        if node.op == "const":
            return self.constant(node.attr, node.dtype)
        if node.op == "index":
            return self.leaf(node.attr)
        if node.op == "scalar":
            return self.constant(self.scalars.get(id(node.attr), node.attr.value), node.dtype)
        if node.op == "size":
            held = node.attr.tensor
            return self.exactly(self.tensors.get(id(held), held).shape[node.args[0].attr])
        if node.op == "read":
            return self.read(node, args)
        if node.op.startswith("cast_"):
            return self._fitted(node, _cast(node.op.removeprefix("cast_"), args[0]))
        kind, values = _kind(node, args), _as_kind(node, args)
        is_square = node.op == "mul" and node.args[0] is node.args[1]
        rule = _RULES.get(("square" if is_square else node.op, kind))
        result = None if rule is None else rule(*values)
        if rule is None or result is None:
            return _anything(node.dtype, self)
        if kind is Ints and node.op in _MAY_WRAP and self._leaves(node, INT64):
            result = _unless_wrapped(rule, values, result)
        return self._fitted(node, result)

    def _leaves(self, node: Expr, ends: tuple[int, int]) -> bool:
        """Whether the integer `node` may lie at an end of its type or beyond it: to be looked for in each tile."""
        low, high = ends
        least, most = bounds(node)
        if low <= least and most <= high:  # for every position: no need to look at the tiles
            return False
        least, most = self.range(node)
        return least <= low or high <= most  # what is clamped below has its end there

    def _fitted(self, node: Expr, v: Value) -> Value:
        """An int32 that may have wrapped may be anything."""
        if not isinstance(v, Ints) or node.dtype is not DType.INT32 or not self._leaves(node, _INT32):
            return v
        low, high = _INT32
        lost = (v.low < low) | (v.high > high)
        return Ints(torch.where(lost, v.low.clamp(max=low), v.low), torch.where(lost, v.high.clamp(min=high), v.high))


class _OneTile(Tiles):
    """All positions, batches and heads as one tile, on the host, of tensors whose contents are not looked at."""

    def known(self, root: Expr) -> Value:
        """Bounds of `root`; those of its parts are kept, as whoever asks goes on to what they are parts of."""
        waiting = [root]
        while waiting:
            node = waiting.pop()
            if node in self._known:
                continue
            missing = [a for a in node.args if a not in self._known]
            if missing:
                waiting += [node, *missing]
            else:
                self._known[node] = self._node(node, [self._known[a] for a in node.args])
        return self._known[root]

    @cached_property
    def _known(self) -> dict[Expr, Value]:
        return {}

    def leaf(self, name: str) -> Ints:
        most = {"q": self.q_len - 1, "kv": self.kv_len - 1, "b": self.batch - 1, "h": self.heads - 1}
        # lengths too: a sequence's own may be any up to it
        low, high = self.exactly(0), self.exactly(most.get(name, self.q_len if name == "q_len" else self.kv_len))
        return Ints(low.low, high.high)

    def read(self, node: Expr, at: list[Any]) -> Value:
        dtype = node.attr.tensor.dtype
        if not node.dtype.is_integer or dtype is torch.int64:
            return _anything(node.dtype, self)
        info = torch.iinfo(dtype)
        return Ints(self.exactly(info.min).low, self.exactly(info.max).high)

    def _leaves(self, node: Expr, ends: tuple[int, int]) -> bool:
        return True

    def _fitted(self, node: Expr, v: Value) -> Value:
        if not isinstance(v, Ints) or node.dtype is not DType.INT32:
            return v
        low, high = _INT32
        lost = (v.low < low) | (v.high > high)
        return Ints(torch.where(lost, low, v.low), torch.where(lost, high, v.high))


def _kind(node: Expr, args: list[Value]) -> type:
    """In which arithmetic an operation is done: that of its widest argument."""
    values = args[1:] if node.op == "where" else args
    if node.dtype is DType.FLOAT or any(isinstance(a, Floats) for a in values):
        return Floats
    return Ints if any(isinstance(a, Ints) for a in values) else Bools


def _as_kind(node: Expr, args: list[Value]) -> list[Any]:
    kind = _kind(node, args)
    convert = {Floats: _to_floats, Ints: _to_ints, Bools: lambda v: v}[kind]
    if node.op == "where":
        return [args[0], *map(convert, args[1:])]
    return [convert(a) for a in args]


def _anything(dtype: DType, tiles: Tiles) -> Value:
    shape = (1, 1, 1, 1)
    true = torch.ones(shape, dtype=torch.bool, device=tiles.device)
    if dtype is DType.BOOL:
        return Bools(true, true)
    if dtype is DType.FLOAT:
        v = torch.full(shape, math.inf, dtype=torch.float64, device=tiles.device)
        return Floats(-v, v, true)
    least, most = (torch.full(shape, end, dtype=torch.int64, device=tiles.device) for end in INT64)
    return Ints(least, most)


# --- conversions -----------------------------------------------------------------------------------------------


def _to_ints(v: Value) -> Ints:
    if isinstance(v, Bools):
        return Ints((~v.no).to(torch.int64), v.yes.to(torch.int64))
    assert isinstance(v, Ints)
    return v


def _to_floats(v: Value) -> Floats:
    if isinstance(v, Floats):
        return v
    i = _to_ints(v)
    low, high = i.low.to(torch.float64), i.high.to(torch.float64)
    nan = torch.zeros_like(low, dtype=torch.bool)
    wide = _widened(low, high, nan)
    return Floats(
        torch.where(low.abs() <= 2**24, low, wide.low), torch.where(high.abs() <= 2**24, high, wide.high), nan
    )


def _cast(name: str, v: Value) -> Value:
    dtype, type_ = CASTS[name]
    if type_ is DType.BOOL:
        if isinstance(v, Bools):
            return v
        hits_zero = (v.low <= 0) & (v.high >= 0)
        never = (v.low == 0) & (v.high == 0)
        return Bools(~never | v.nan, hits_zero) if isinstance(v, Floats) else Bools(~never, hits_zero)
    if type_.is_integer:
        if not isinstance(v, Floats):
            return _to_ints(v)
        limit = 2.0**31 if type_ is DType.INT32 else 2.0**61
        lost = v.nan | (v.low <= -limit) | (v.high >= limit)
        low = torch.where(lost, -limit, v.low).trunc().to(torch.int64)
        high = torch.where(lost, limit, v.high).trunc().to(torch.int64)
        # what a float out of range becomes differs between machines
        return Ints(torch.where(lost, INT64[0], low), torch.where(lost, INT64[1], high))
    f = _to_floats(v)
    if dtype is torch.float32:
        return f
    return Floats(f.low.to(dtype).to(torch.float64), f.high.to(dtype).to(torch.float64), f.nan)


def _widened(low: T, high: T, nan: T, by: float = _ROUNDING) -> Floats:
    """Outward by a relative error, and by an absolute one for what rounds to a denormal or to zero."""
    nan = nan | low.isnan() | high.isnan()
    low, high = torch.where(nan, -math.inf, low), torch.where(nan, math.inf, high)
    tiny = 1e-30 if by == _ROUNDING else by * 1e-3
    low, high = torch.where(low < -_MOST, -math.inf, low), torch.where(high > _MOST, math.inf, high)
    return Floats(
        low - low.abs().nan_to_num(posinf=0.0) * by - tiny, high + high.abs().nan_to_num(posinf=0.0) * by + tiny, nan
    )


# --- integers ---------------------------------------------------------------------------------------------------


def _ends(fn: Callable[..., T], *of: Ints | Floats) -> tuple[T, T]:
    """A rising function at the lower ends and at the upper ends; once where they are the same."""
    low = fn(*(x.low for x in of))
    return low, (low if all(x.low is x.high for x in of) else fn(*(x.high for x in of)))


def _i_add(x: Ints, y: Ints) -> Ints:
    width = None if x.width is None or y.width is None else x.width + y.width
    return Ints(*_ends(torch.add, x, y), math.gcd(x.step, y.step), x.residue + y.residue, width)


def _i_neg(x: Ints) -> Ints:
    return Ints(*_ends(torch.neg, x)[::-1], x.step, -x.residue, x.width)


def _i_sub(x: Ints, y: Ints) -> Ints:
    width = None if x.width is None or y.width is None else x.width + y.width
    low = x.low - y.high
    high = low if x.low is x.high and y.low is y.high else x.high - y.low
    return Ints(low, high, math.gcd(x.step, y.step), x.residue - y.residue, width)


def _i_mul(x: Ints, y: Ints) -> Ints:
    for a, b in ((x, y), (y, x)):
        if a.step == 0:
            return _scaled(b, a.residue)
    return Ints(*_span([a * b for a in (x.low, x.high) for b in (y.low, y.high)]))


def _i_square(x: Ints, _: Ints) -> Ints:
    size = _i_abs(x)
    return _i_mul(size, size)


def _scaled(x: Ints, by: int) -> Ints:
    ends = _ends(lambda end: end * by, x)
    width = None if x.width is None else x.width * abs(by)
    return Ints(*(ends if by >= 0 else ends[::-1]), x.step * abs(by), x.residue * by, width)


_MAY_WRAP = {"add", "sub", "neg", "mul", "abs", "lshift"}


def _unless_wrapped(rule: Callable[..., Ints], of: list[Ints], found: Ints) -> Ints:
    """What `rule` found of integers, or anything where it left 64 bits.

    The same in floating point, which can't wrap, says where. Of a congruence that stays which wrapping keeps.
    """
    nearly = rule(*(Ints(x.low.double(), x.high.double(), x.step, x.residue) for x in of))
    lost = (nearly.low < -_EDGE) | (nearly.high > _EDGE)
    step = math.gcd(found.step or 2**64, 2**64)
    low, high = torch.where(lost, INT64[0], found.low), torch.where(lost, INT64[1], found.high)
    return Ints(low, high, step, found.residue)


def _span(corners: list[T]) -> tuple[T, T]:
    low = high = corners[0]
    for c in corners[1:]:
        low, high = torch.minimum(low, c), torch.maximum(high, c)
    return low, high


def _i_divide(mode: str) -> Callable[[Ints, Ints], Ints | None]:
    def rule(x: Ints, y: Ints) -> Ints:
        if y.step == 0 and y.residue > 0:  # rising
            n = y.residue
            width = None if x.width is None else -(-x.width // n)
            if n == 1:
                return Ints(x.low, x.high, width=width)
            return Ints(*_ends(lambda end: torch.div(end, n, rounding_mode=mode), x), width=width)
        unknown = (y.low <= 0) & (y.high >= 0) | (x.low == INT64[0])  # which has no opposite
        ends = [torch.where(unknown, 1, end) for end in (y.low, y.high)]
        low, high = _span([torch.div(a, b, rounding_mode=mode) for a in (x.low, x.high) for b in ends])
        return Ints(torch.where(unknown, INT64[0], low), torch.where(unknown, INT64[1], high))

    return rule


def _i_mod(x: Ints, y: Ints) -> Ints | None:
    if y.step != 0 or y.residue <= 0:
        return None
    n = y.residue
    if x.step % n == 0:
        v = torch.full_like(x.low, x.residue % n)
        return Ints(v, v, 0, x.residue % n)
    step = math.gcd(x.step, n)
    low = x.low.remainder(n)
    if x.low is x.high:
        return Ints(low, low, step, x.residue, 0)
    one_lap = torch.div(x.low, n, rounding_mode="floor") == torch.div(x.high, n, rounding_mode="floor")
    return Ints(torch.where(one_lap, low, 0), torch.where(one_lap, x.high.remainder(n), n - 1), step, x.residue)


def _i_fmod(x: Ints, y: Ints) -> Ints | None:
    if y.step != 0 or y.residue <= 0:
        return None
    n = y.residue
    positive = _i_mod(x, y)
    assert positive is not None
    below = x.low < 0
    low = torch.where(below, torch.maximum(x.low, torch.full_like(x.low, 1 - n)), positive.low)
    return Ints(low, torch.where(below, x.high.clamp(0, n - 1), positive.high))


def _i_abs(x: Ints) -> Ints:
    return Ints(torch.maximum(torch.maximum(x.low, -x.high), torch.zeros_like(x.low)), torch.maximum(-x.low, x.high))


def _i_shift(left: bool) -> Callable[[Ints, Ints], Ints | None]:
    def rule(x: Ints, y: Ints) -> Ints | None:
        if y.step != 0 or not 0 <= y.residue < 31:
            return None
        n = torch.full_like(x.low, 1 << y.residue)
        power = Ints(n, n, 0, 1 << y.residue)
        return _i_mul(x, power) if left else _i_divide("floor")(x, power)

    return rule


def _i_and(x: Ints, y: Ints) -> Ints | None:
    """With a mask of low bits it is a remainder."""
    for a, bits in ((x, y), (y, x)):
        if bits.step == 0 and 0 <= bits.residue < INT64[1] and (bits.residue & (bits.residue + 1)) == 0:
            n = torch.full_like(a.low, bits.residue + 1)
            return _i_mod(a, Ints(n, n, 0, bits.residue + 1))
    return None


# --- floats -----------------------------------------------------------------------------------------------------


def _f_add(x: Floats, y: Floats) -> Floats:
    nan = x.nan | y.nan | ((x.high == math.inf) & (y.low == -math.inf)) | ((x.low == -math.inf) & (y.high == math.inf))
    return _widened(x.low + y.low, x.high + y.high, nan)


def _f_neg(x: Floats) -> Floats:
    return Floats(-x.high, -x.low, x.nan)


def _f_mul(x: Floats, y: Floats) -> Floats:
    corners = [(a * b).nan_to_num(0.0, math.inf, -math.inf) for a in (x.low, x.high) for b in (y.low, y.high)]
    nan = x.nan | y.nan | (_holds_zero(x) & _infinite(y)) | (_holds_zero(y) & _infinite(x))
    return _widened(*_span(corners), nan)


def _f_square(x: Floats, _: Floats) -> Floats:
    size = _f_abs(x)
    return _f_mul(size, size)


def _holds_zero(x: Floats) -> T:
    return (x.low <= 0) & (x.high >= 0)


def _infinite(x: Floats) -> T:
    return x.low.isinf() | x.high.isinf()


def _f_div(x: Floats, y: Floats) -> Floats:
    by_zero = _holds_zero(y)
    corners = [(a / b).nan_to_num(0.0, math.inf, -math.inf) for a in (x.low, x.high) for b in (y.low, y.high)]
    low, high = _span(corners)
    nan = x.nan | y.nan | (by_zero & _holds_zero(x)) | (_infinite(x) & _infinite(y))
    low, high = torch.where(by_zero, -math.inf, low), torch.where(by_zero, math.inf, high)
    return _widened(low, high, nan)


def _f_abs(x: Floats) -> Floats:
    return Floats(
        torch.maximum(torch.maximum(x.low, -x.high), torch.zeros_like(x.low)), torch.maximum(-x.low, x.high), x.nan
    )


def _rising(
    fn: Callable[[T], T],
    slack: float = _FAST,
    least: float = -math.inf,
    range_: tuple[float, float] = (-math.inf, math.inf),
) -> Callable[[Floats], Floats]:
    """A rising function, defined from `least` on, with values in `range_`."""

    def rule(x: Floats) -> Floats:
        nan = x.nan | (x.low < least)
        v = _widened(fn(x.low.clamp(min=least)), fn(x.high.clamp(min=least)), torch.zeros_like(nan), slack)
        return Floats(v.low.clamp(min=range_[0]), v.high.clamp(max=range_[1]), nan)

    return rule


def _stepped(fn: Callable[[T], T]) -> Callable[[Floats], Floats]:
    """A rising function with exact results."""
    return lambda x: Floats(fn(x.low), fn(x.high), x.nan)


def _periodic(x: Floats) -> Floats:
    one = torch.ones_like(x.low)
    return Floats(-one - _FAST, one + _FAST, x.nan | _infinite(x))


def _f_rsqrt(x: Floats) -> Floats:
    root = _rising(torch.sqrt, _FAST, 0.0, (0.0, math.inf))(x)
    one = torch.ones_like(x.low)
    low, high = one / root.high, torch.where(root.low <= 0, math.inf, one / root.low)
    return _widened(low, high, root.nan, _FAST)


def _f_floordiv(x: Floats, y: Floats) -> Floats:
    v = _f_div(x, y)
    return Floats(v.low.floor() - 1, v.high.floor() + 1, v.nan | _infinite(x))


def _f_mod(x: Floats, y: Floats) -> Floats:
    top, low = y.high.clamp(min=0), y.low.clamp(max=0)
    return _widened(low, top, x.nan | y.nan | _holds_zero(y) | _infinite(x))


def _f_fmod(x: Floats, y: Floats) -> Floats:
    size = torch.maximum(y.low.abs(), y.high.abs())
    return _widened(-size, size, x.nan | y.nan | _holds_zero(y) | _infinite(x))


def _f_sign(x: Floats) -> Floats:
    return Floats(x.low.sign(), x.high.sign(), x.nan)


# --- what integers and floats share ----------------------------------------------------------------------------


def _pick(fn: Callable[[T, T], T]) -> Callable[[Any, Any], Any]:
    def rule(x: Any, y: Any) -> Any:
        low, high = _ends(fn, x, y)
        return Ints(low, high) if isinstance(x, Ints) else Floats(low, high, x.nan | y.nan)

    return rule


def _where(c: Bools, x: Any, y: Any) -> Any:
    if isinstance(x, Bools):
        return Bools((c.yes & x.yes) | (c.no & y.yes), (c.yes & x.no) | (c.no & y.no))

    def choose(a: T, b: T, both: T) -> T:
        return torch.where(c.no, torch.where(c.yes, both, b), a)

    low = choose(x.low, y.low, torch.minimum(x.low, y.low))
    high = choose(x.high, y.high, torch.maximum(x.high, y.high))
    if isinstance(x, Floats):
        return Floats(low, high, (c.yes & x.nan) | (c.no & y.nan))
    same = x.step == y.step and (x.residue - y.residue) % max(x.step, 1) == 0 and x.step != 0
    return Ints(low, high, x.step, x.residue) if same else Ints(low, high)


def _unless_nan(x: Any, y: Any, yes: T, no: T) -> Bools:
    """A comparison, which is false of NaN."""
    return Bools(yes, no | x.nan | y.nan if isinstance(x, Floats) else no)


def _lt(x: Any, y: Any) -> Bools:
    return _unless_nan(x, y, x.low < y.high, x.high >= y.low)


def _le(x: Any, y: Any) -> Bools:
    return _unless_nan(x, y, x.low <= y.high, x.high > y.low)


def _eq(x: Any, y: Any) -> Bools:
    differ = x.low != y.low
    for v in (x, y):
        differ = differ if v.low is v.high else differ | (v.low != v.high)
    if isinstance(x, Ints):
        step = math.gcd(x.step, y.step)
        if x.residue != y.residue if step == 0 else (x.residue - y.residue) % step != 0:
            return Bools(torch.zeros_like(differ), differ)
    if x.low is x.high and y.low is y.high and isinstance(x, Ints):
        return Bools(~differ, differ)
    return _unless_nan(x, y, (x.low <= y.high) & (y.low <= x.high), differ)


def _not(x: Bools) -> Bools:
    return Bools(x.no, x.yes)


def _and(x: Bools, y: Bools) -> Bools:
    return Bools(x.yes & y.yes, x.no | y.no)


def _or(x: Bools, y: Bools) -> Bools:
    return Bools(x.yes | y.yes, x.no & y.no)


def _xor(x: Bools, y: Bools) -> Bools:
    return Bools((x.yes & y.no) | (x.no & y.yes), (x.yes & y.yes) | (x.no & y.no))


def _both_kinds(name: str, rule: Callable[..., Any]) -> dict[tuple[str, type], Callable[..., Any]]:
    return {(name, Ints): rule, (name, Floats): rule}


_RULES: dict[tuple[str, type], Callable[..., Any]] = {
    ("add", Ints): _i_add, ("sub", Ints): _i_sub, ("neg", Ints): _i_neg, ("mul", Ints): _i_mul,
    ("floordiv", Ints): _i_divide("floor"), ("truncdiv", Ints): _i_divide("trunc"), ("mod", Ints): _i_mod,
    ("fmod", Ints): _i_fmod, ("abs", Ints): _i_abs, ("lshift", Ints): _i_shift(True), ("rshift", Ints): _i_shift(False),
    ("and", Ints): _i_and, ("sign", Ints): lambda x: Ints(x.low.sign(), x.high.sign()),
    ("square", Ints): _i_square, ("square", Floats): _f_square,
    ("add", Floats): _f_add, ("sub", Floats): lambda x, y: _f_add(x, _f_neg(y)), ("neg", Floats): _f_neg,
    ("mul", Floats): _f_mul, ("div", Floats): _f_div, ("floordiv", Floats): _f_floordiv, ("mod", Floats): _f_mod,
    ("fmod", Floats): _f_fmod, ("abs", Floats): _f_abs, ("sign", Floats): _f_sign, ("rsqrt", Floats): _f_rsqrt,
    ("exp", Floats): _rising(torch.exp, range_=(0.0, math.inf)),
    ("exp2", Floats): _rising(torch.exp2, range_=(0.0, math.inf)),
    ("expm1", Floats): _rising(torch.expm1), ("log", Floats): _rising(torch.log, least=0.0),
    ("log2", Floats): _rising(torch.log2, least=0.0), ("log1p", Floats): _rising(torch.log1p, least=-1.0),
    ("sqrt", Floats): _rising(torch.sqrt, least=0.0, range_=(0.0, math.inf)), ("tanh", Floats): _rising(torch.tanh),
    ("sigmoid", Floats): _rising(torch.sigmoid), ("erf", Floats): _rising(torch.erf),
    ("sin", Floats): _periodic, ("cos", Floats): _periodic,
    ("floor", Floats): _stepped(torch.floor), ("ceil", Floats): _stepped(torch.ceil),
    ("round", Floats): _stepped(torch.round), ("trunc", Floats): _stepped(torch.trunc),
    ("isnan", Floats): lambda x: Bools(x.nan, torch.ones_like(x.nan)),
    ("isinf", Floats): lambda x: Bools(_infinite(x) | x.nan, torch.ones_like(x.nan)),
    **_both_kinds("maximum", _pick(torch.maximum)), **_both_kinds("clamp_min", _pick(torch.maximum)),
    **_both_kinds("minimum", _pick(torch.minimum)), **_both_kinds("clamp_max", _pick(torch.minimum)),
    **_both_kinds("where", _where), ("where", Bools): _where,
    **_both_kinds("lt", _lt), **_both_kinds("gt", lambda x, y: _lt(y, x)), **_both_kinds("le", _le),
    **_both_kinds("ge", lambda x, y: _le(y, x)), **_both_kinds("eq", _eq),
    **_both_kinds("ne", lambda x, y: _not(_eq(x, y))),
    ("not", Bools): _not, ("and", Bools): _and, ("or", Bools): _or, ("xor", Bools): _xor,
    ("ne", Bools): _xor, ("eq", Bools): lambda x, y: _not(_xor(x, y)),
}  # fmt: skip


# --- captured tensors -----------------------------------------------------------------------------------------


def _read(node: Expr, at: list[Ints], tiles: Tiles) -> Value:
    """A captured tensor between its smallest and largest element among those that a tile reads."""
    held = node.attr.tensor
    x = tiles.tensors.get(id(held), held).detach().to(tiles.device)
    if x.numel() == 0:
        return _anything(node.dtype, tiles)
    if node.dtype is not DType.FLOAT:
        x = x if node.dtype is DType.BOOL else countable(x)
        low, high = _extremes([(x, False), (x, True)], node, at, tiles)
        if node.dtype is DType.BOOL:
            return Bools(high, ~low)
        return Ints(low.to(torch.int64), high.to(torch.int64))
    floor, ceiling = x.nan_to_num(math.inf, math.inf, -math.inf), x.nan_to_num(-math.inf, math.inf, -math.inf)
    low, high, nan = _extremes([(floor, False), (ceiling, True), (x.isnan(), True)], node, at, tiles)
    return _widened(low.to(torch.float64), high.to(torch.float64), nan)


def _extremes(sources: list[tuple[T, bool]], node: Expr, at: list[Ints], tiles: Tiles) -> list[T]:
    """Of each (tensor, largest?), all read at the same places: its extreme over what each tile reads, in its dtype."""
    xs, most = [x for x, _ in sources], [largest for _, largest in sources]
    indices: list[T | None] = []  # position in each dimension left, None for the one that is a range
    ranged: _Range | None = None
    for d, (index, v) in enumerate(zip(node.args, at, strict=True)):
        size = xs[0].shape[d]
        which = int(index.attr == "kv")
        if index.op == "index" and index.attr in ("q", "kv") and tiles.cuts[which] is None:
            part = tiles.positions[which]
            xs = [_by_tiles(x, d, tiles.tile[which], part, largest) for x, largest in zip(xs, most, strict=True)]
            indices.append(_numbers(xs[0], d, 2 + which))
            continue
        # negative positions count from the end
        signed = bounds(index)[0] < 0 and tiles.range(index)[0] < 0
        if v.low is v.high:
            indices.append((torch.where(v.low < 0, v.low + size, v.low) if signed else v.low).clamp(0, size - 1))
            continue
        low, high = v.low.clamp(0, size - 1), v.high.clamp(0, size - 1)
        if signed:
            low, high = torch.where(v.low < 0, 0, low), torch.where(v.low < 0, size - 1, high)
        span = _Range(d, low, high, size - 1 if v.width is None or signed else min(v.width, size - 1))
        axis = 3 - (low.shape[3] == 1)
        if low.shape[axis] == low.numel():  # the same for all heads, and moves along one axis of the grid only
            span = _Range(d, low.flatten(), high.flatten(), span.width)
            xs = [_over_range(x, span, None, largest) for x, largest in zip(xs, most, strict=True)]
            indices.append(_numbers(xs[0], d, axis))
        elif ranged is None:
            ranged = span
            indices.append(None)
        else:  # a second range that moves along both: the whole of that dimension
            xs = [
                (torch.amax if largest else torch.amin)(x, d, keepdim=True) for x, largest in zip(xs, most, strict=True)
            ]
            indices.append(torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=xs[0].device))
    if ranged is not None:
        return [_over_range(x, ranged, indices, largest) for x, largest in zip(xs, most, strict=True)]
    if not indices:
        return [x.view(1, 1, 1, 1) for x in xs]
    places = tuple(torch.broadcast_tensors(*indices))  # type: ignore[arg-type]
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
