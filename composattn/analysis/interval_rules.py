"""How bounds go through operations: one row of `RULES` for each operation and kind of number.

A rule gets the bounds of the arguments and gives those of the result, or None where it knows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..graph.expr import DType, Expr
from ..graph.linear import INT64
from .interval_values import Bools, Floats, Ints, T, Value, to_floats, to_ints, widened

_EDGE = 2.0**63 - 2.0**13  # of int64; what lies below it in fp64 is inside
_FAST = 2.0**-9  # of a transcendental in the fastest form that a kernel may use


def _ends(fn: Callable[..., T], *of: Ints | Floats) -> tuple[T, T]:
    """A rising function at the lower ends and at the upper ends; once where they are the same."""
    low = fn(*(x.low for x in of))
    return low, (low if all(x.low is x.high for x in of) else fn(*(x.high for x in of)))


# --- integers ---------------------------------------------------------------------------------------------------


def _i_add(x: Ints, y: Ints) -> Ints:
    width = None if x.width is None or y.width is None else x.width + y.width
    return Ints(*_ends(torch.add, x, y), math.gcd(x.step, y.step), x.residue + y.residue, width)


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


def _scaled(x: Ints, by: int) -> Ints:
    ends = _ends(lambda end: end * by, x)
    width = None if x.width is None else x.width * abs(by)
    return Ints(*(ends if by >= 0 else ends[::-1]), x.step * abs(by), x.residue * by, width)


MAY_WRAP = {"add", "sub", "neg", "mul", "abs", "lshift"}


def unless_wrapped(rule: Callable[..., Ints], of: list[Ints], found: Ints) -> Ints:
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
    return widened(x.low + y.low, x.high + y.high, nan)


def _f_neg(x: Floats) -> Floats:
    return Floats(-x.high, -x.low, x.nan)


def _f_mul(x: Floats, y: Floats) -> Floats:
    corners = [(a * b).nan_to_num(0.0, math.inf, -math.inf) for a in (x.low, x.high) for b in (y.low, y.high)]
    nan = x.nan | y.nan | (_holds_zero(x) & _infinite(y)) | (_holds_zero(y) & _infinite(x))
    return widened(*_span(corners), nan)


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
    return widened(low, high, nan)


def _rising(
    fn: Callable[[T], T],
    slack: float = _FAST,
    least: float = -math.inf,
    range_: tuple[float, float] = (-math.inf, math.inf),
) -> Callable[[Floats], Floats]:
    """A rising function, defined from `least` on, with values in `range_`."""

    def rule(x: Floats) -> Floats:
        nan = x.nan | (x.low < least)
        v = widened(fn(x.low.clamp(min=least)), fn(x.high.clamp(min=least)), torch.zeros_like(nan), slack)
        return Floats(v.low.clamp(min=range_[0]), v.high.clamp(max=range_[1]), nan)

    return rule


def _periodic(x: Floats) -> Floats:
    one = torch.ones_like(x.low)
    return Floats(-one - _FAST, one + _FAST, x.nan | _infinite(x))


def _f_floordiv(x: Floats, y: Floats) -> Floats:
    v = _f_div(x, y)
    return Floats(v.low.floor() - 1, v.high.floor() + 1, v.nan | _infinite(x))


def _f_mod(x: Floats, y: Floats) -> Floats:
    top, low = y.high.clamp(min=0), y.low.clamp(max=0)
    return widened(low, top, x.nan | y.nan | _holds_zero(y) | _infinite(x))


def _f_sign(x: Floats) -> Floats:
    low, high = torch.sign(x.low), torch.sign(x.high)
    zero = torch.zeros_like(low)  # that of NaN
    low, high = torch.where(x.nan, low.clamp(max=0), low), torch.where(x.nan, high.clamp(min=0), high)
    return Floats(low, high, zero.bool())


# --- what integers and floats share ----------------------------------------------------------------------------


def _like(x: Any, low: T, high: T) -> Any:
    """Bounds of the kind of `x`; NaN where it is."""
    return Ints(low, high) if isinstance(x, Ints) else Floats(low, high, x.nan)


def _exactly(fn: Callable[[T], T]) -> Callable[[Any], Any]:
    """A rising function with exact results."""
    return lambda x: _like(x, *_ends(fn, x))


def _abs(x: Any) -> Any:
    least = torch.maximum(torch.maximum(x.low, -x.high), torch.zeros_like(x.low))
    return _like(x, least, torch.maximum(-x.low, x.high))


def _squared(times: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def rule(x: Any, _: Any) -> Any:
        size = _abs(x)
        return times(size, size)

    return rule


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


def _xor(x: Bools, y: Bools) -> Bools:
    return Bools((x.yes & y.no) | (x.no & y.yes), (x.yes & y.yes) | (x.no & y.no))


def _both_kinds(name: str, rule: Callable[..., Any]) -> dict[tuple[str, type], Callable[..., Any]]:
    return {(name, Ints): rule, (name, Floats): rule}


RULES: dict[tuple[str, type], Callable[..., Any]] = {
    ("add", Ints): _i_add, ("sub", Ints): _i_sub, ("mul", Ints): _i_mul,
    ("neg", Ints): lambda x: Ints(*_ends(torch.neg, x)[::-1], x.step, -x.residue, x.width),
    ("floordiv", Ints): _i_divide("floor"), ("truncdiv", Ints): _i_divide("trunc"), ("mod", Ints): _i_mod,
    ("lshift", Ints): _i_shift(True), ("rshift", Ints): _i_shift(False),
    ("and", Ints): _i_and, ("square", Ints): _squared(_i_mul), ("square", Floats): _squared(_f_mul),
    **_both_kinds("relu", _exactly(torch.relu)),
    **_both_kinds("abs", _abs), ("sign", Ints): _exactly(torch.sign), ("sign", Floats): _f_sign,
    ("add", Floats): _f_add, ("sub", Floats): lambda x, y: _f_add(x, _f_neg(y)), ("neg", Floats): _f_neg,
    ("mul", Floats): _f_mul, ("div", Floats): _f_div, ("floordiv", Floats): _f_floordiv, ("mod", Floats): _f_mod,
    ("exp", Floats): _rising(torch.exp, range_=(0.0, math.inf)),
    ("exp2", Floats): _rising(torch.exp2, range_=(0.0, math.inf)),
    ("expm1", Floats): _rising(torch.expm1), ("log", Floats): _rising(torch.log, least=0.0),
    ("log2", Floats): _rising(torch.log2, least=0.0), ("log1p", Floats): _rising(torch.log1p, least=-1.0),
    ("sqrt", Floats): _rising(torch.sqrt, least=0.0, range_=(0.0, math.inf)), ("tanh", Floats): _rising(torch.tanh),
    ("sigmoid", Floats): _rising(torch.sigmoid), ("erf", Floats): _rising(torch.erf),
    ("sin", Floats): _periodic, ("cos", Floats): _periodic,
    ("floor", Floats): _exactly(torch.floor), ("ceil", Floats): _exactly(torch.ceil),
    ("round", Floats): _exactly(torch.round), ("trunc", Floats): _exactly(torch.trunc),
    ("isnan", Floats): lambda x: Bools(x.nan, torch.ones_like(x.nan)),
    ("isinf", Floats): lambda x: Bools(_infinite(x) | x.nan, torch.ones_like(x.nan)),
    **_both_kinds("maximum", _pick(torch.maximum)), **_both_kinds("clamp_min", _pick(torch.maximum)),
    **_both_kinds("minimum", _pick(torch.minimum)), **_both_kinds("clamp_max", _pick(torch.minimum)),
    **_both_kinds("where", _where), ("where", Bools): _where,
    **_both_kinds("lt", _lt), **_both_kinds("gt", lambda x, y: _lt(y, x)), **_both_kinds("le", _le),
    **_both_kinds("ge", lambda x, y: _le(y, x)), **_both_kinds("eq", _eq),
    **_both_kinds("ne", lambda x, y: _not(_eq(x, y))),
    ("and", Bools): lambda x, y: Bools(x.yes & y.yes, x.no | y.no),
    ("or", Bools): lambda x, y: Bools(x.yes | y.yes, x.no & y.no),
    ("not", Bools): _not, ("xor", Bools): _xor, ("ne", Bools): _xor, ("eq", Bools): lambda x, y: _not(_xor(x, y)),
}  # fmt: skip


# --- in which arithmetic ------------------------------------------------------------------------------------------


def kind_of(node: Expr, args: list[Value]) -> type:
    """In which arithmetic an operation is done: that of its widest argument."""
    values = args[1:] if node.op == "where" else args
    if node.dtype is DType.FLOAT or any(isinstance(a, Floats) for a in values):
        return Floats
    return Ints if any(isinstance(a, Ints) for a in values) else Bools


def as_kind(node: Expr, args: list[Value]) -> list[Any]:
    kind = kind_of(node, args)
    convert = {Floats: to_floats, Ints: to_ints, Bools: lambda v: v}[kind]
    if node.op == "where":
        return [args[0], *map(convert, args[1:])]
    return [convert(a) for a in args]
