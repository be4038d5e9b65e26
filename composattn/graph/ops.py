"""One row per operation: its torch function, its result type, its derivative, its algebra.

A new operation is one row here and one in `primitives/emit_ops.py` (its CuTe form). Its bounds over tiles are a row of
`analysis/interval_rules.py`; without one it may be anything there.
"""

# ruff: noqa: E501  (a row of the table is a line)
from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import TypeMismatch
from .expr import DType, Expr, const, make, promote
from .philox import kept

TypeRule = Callable[..., DType]
Partials = tuple[Expr | None, ...]  # d out / d argument, None where it is zero or the argument is not a float


@dataclass(frozen=True)
class Op:
    """What the rest of the package needs to know of an operation, arguments in the order of `Expr.args`."""

    name: str
    torch: Callable[..., Any]
    result: TypeRule
    partials: Callable[..., Partials] | None = None  # (out, *args) → derivative by each argument
    sympy: Callable[..., Any] | None = None
    commutes: bool = False


# --- result types ------------------------------------------------------------------------------------------


def _same(*types: DType) -> DType:
    return promote(*types)


def _number(name: str) -> TypeRule:
    def rule(*types: DType) -> DType:
        if all(t is DType.BOOL for t in types):
            raise TypeMismatch(f"{name} of bool values; use & | ~ for logic, or cast with .int() for arithmetic")
        return promote(*types)

    return rule


def _float(*types: DType) -> DType:
    return DType.FLOAT


def _bool(*types: DType) -> DType:
    return DType.BOOL


def _bits(name: str) -> TypeRule:
    def rule(*types: DType) -> DType:
        if DType.FLOAT in types:
            raise TypeMismatch(f"{name} of float values; compare first, e.g. (x > 0) {name} (y > 0)")
        return promote(*types)

    return rule


def _shift(*types: DType) -> DType:
    if DType.FLOAT in types or types[0] is DType.BOOL:
        raise TypeMismatch("shifts take integers; cast with .int()")
    return promote(*types)


def _where(condition: DType, yes: DType, no: DType) -> DType:
    if condition is not DType.BOOL:
        raise TypeMismatch(f"torch.where needs a bool condition, got {condition.value}; write e.g. x != 0")
    return promote(yes, no)


# --- derivatives -------------------------------------------------------------------------------------------


def f(name: str, *args: Expr | float) -> Expr:
    """`apply` that also takes Python numbers; short because the table below is read as formulas."""
    return apply(name, *(a if isinstance(a, Expr) else const(a) for a in args))


def _where_one(condition: Expr) -> Expr:
    return f("where", condition, 1.0, 0.0)


def _tie(wins: Expr, ties: Expr) -> Expr:
    return f("where", wins, 1.0, f("where", ties, 0.5, 0.0))  # torch splits a tie of max/min evenly


def _pow_partials(out: Expr, x: Expr, y: Expr) -> Partials:
    by_x = f("where", f("eq", y, 0.0), 0.0, f("mul", y, f("pow", x, f("sub", y, 1.0))))
    if y.is_const:
        return (const(0.0) if y.attr == 0 else f("mul", y, f("pow", x, float(y.attr) - 1.0)), None)
    by_y = f("where", f("and", f("eq", x, 0.0), f("ge", y, 0.0)), 0.0, f("mul", out, f("log", x)))
    return by_x, by_y


_LN2 = math.log(2.0)
_TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)


def _zero(out: Expr, *args: Expr) -> Partials:
    return (None,) * len(args)


CASTS: dict[str, tuple[torch.dtype, DType]] = {
    "bool": (torch.bool, DType.BOOL),
    "int32": (torch.int32, DType.INT32),
    "int64": (torch.int64, DType.INT64),
    "float": (torch.float32, DType.FLOAT),
    "float16": (torch.float16, DType.FLOAT),  # rounds to the type, then goes on in fp32
    "bfloat16": (torch.bfloat16, DType.FLOAT),
}


class _Sympy:
    """sympy's functions by name, imported when one is first called: it takes as long as the whole of this package."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: getattr(importlib.import_module("sympy"), name)(*args)


S = _Sympy()

# by how many values they take
_BY_ARITY: dict[int, list[Op]] = {
    1: [
        Op("neg", torch.neg, _number("-"), lambda o, x: (const(-1.0),), lambda x: -x),
        Op("abs", torch.abs, _number("abs"), lambda o, x: (f("sign", x),), S.Abs),
        Op("sign", torch.sign, _number("sign"), _zero, S.sign),
        Op("not", torch.bitwise_not, _bits("~"), _zero, lambda x: S.Not(x)),
        Op("relu", torch.relu, _number("relu"), lambda o, x: (f("where", f("le", x, 0.0), 0.0, 1.0),), lambda x: S.Max(x, 0)),
        Op("isnan", torch.isnan, _bool, _zero),
        Op("isinf", torch.isinf, _bool, _zero),
        Op("among", lambda x: x, _same, _zero, lambda x: x),  # see `graph.among`; no kernel meets it
        Op("whole", lambda x: x, _float, lambda o, x: (const(1.0),), lambda x: x),  # as it stands: nothing taken apart
        Op("scale", lambda x: x, _float, lambda o, x: (const(1.0),), lambda x: x),  # of 8 bits, not negative
        # functions of floats
        Op("exp", torch.exp, _float, lambda o, x: (o,), S.exp),
        Op("exp2", torch.exp2, _float, lambda o, x: (f("mul", o, _LN2),), lambda x: S.Integer(2) ** x),
        Op("expm1", torch.expm1, _float, lambda o, x: (f("add", o, 1.0),), lambda x: S.exp(x) - 1),
        Op("log", torch.log, _float, lambda o, x: (f("div", 1.0, x),), S.log),
        Op("log2", torch.log2, _float, lambda o, x: (f("div", 1.0 / _LN2, x),), lambda x: S.log(x, 2)),
        Op("log1p", torch.log1p, _float, lambda o, x: (f("div", 1.0, f("add", x, 1.0)),), lambda x: S.log(1 + x)),
        Op("sqrt", torch.sqrt, _float, lambda o, x: (f("div", 0.5, o),), S.sqrt),
        Op("rsqrt", torch.rsqrt, _float, lambda o, x: (f("mul", -0.5, f("mul", o, f("mul", o, o))),), lambda x: 1 / S.sqrt(x)),
        Op("tanh", torch.tanh, _float, lambda o, x: (f("sub", 1.0, f("mul", o, o)),), S.tanh),
        Op("sigmoid", torch.sigmoid, _float, lambda o, x: (f("mul", o, f("sub", 1.0, o)),), lambda x: 1 / (1 + S.exp(-x))),
        Op("sin", torch.sin, _float, lambda o, x: (f("cos", x),), S.sin),
        Op("cos", torch.cos, _float, lambda o, x: (f("neg", f("sin", x)),), S.cos),
        Op("erf", torch.erf, _float, lambda o, x: (f("mul", _TWO_OVER_SQRT_PI, f("exp", f("neg", f("mul", x, x)))),), S.erf),
        # to integers
        Op("floor", torch.floor, _number("floor"), _zero, S.floor),
        Op("ceil", torch.ceil, _number("ceil"), _zero, S.ceiling),
        Op("round", torch.round, _number("round"), _zero),  # half to even, as torch
        Op("trunc", torch.trunc, _number("trunc"), _zero),
        *(Op(f"cast_{name}", lambda x, _dtype=dtype: x.to(_dtype), lambda *_, _t=type_: _t,
             (lambda o, x: (const(1.0),)) if type_ is DType.FLOAT else _zero, lambda x: x)
          for name, (dtype, type_) in CASTS.items()),
    ],
    2: [
        Op("add", torch.add, _same, lambda o, x, y: (const(1.0), const(1.0)), lambda x, y: x + y, True),
        Op("sub", torch.sub, _number("-"), lambda o, x, y: (const(1.0), const(-1.0)), lambda x, y: x - y),
        Op("mul", torch.mul, _same, lambda o, x, y: (y, x), lambda x, y: x * y, True),
        Op("div", torch.true_divide, _float, lambda o, x, y: (f("div", 1.0, y), f("neg", f("div", o, y))), lambda x, y: x / y),
        Op("floordiv", functools.partial(torch.div, rounding_mode="floor"), _number("//"), _zero, lambda x, y: S.floor(x / y)),
        Op("truncdiv", functools.partial(torch.div, rounding_mode="trunc"), _number("div"), _zero),
        Op("mod", torch.remainder, _number("%"), lambda o, x, y: (const(1.0), f("neg", f("floordiv", x, y))), lambda x, y: S.Mod(x, y)),
        Op("fmod", torch.fmod, _number("fmod"), lambda o, x, y: (const(1.0), f("neg", f("truncdiv", x, y)))),
        Op("pow", torch.pow, _number("**"), _pow_partials, lambda x, y: x**y),
        Op("maximum", torch.maximum, _same, lambda o, x, y: (_tie(f("gt", x, y), f("eq", x, y)), _tie(f("lt", x, y), f("eq", x, y))), S.Max, True),
        Op("minimum", torch.minimum, _same, lambda o, x, y: (_tie(f("lt", x, y), f("eq", x, y)), _tie(f("gt", x, y), f("eq", x, y))), S.Min, True),
        # clamp keeps the gradient at its ends, maximum and minimum split it: hence rows of their own
        Op("clamp_min", lambda x, y: torch.clamp(x, min=y), _same, lambda o, x, y: (_where_one(f("ge", x, y)), _where_one(f("lt", x, y))), S.Max),
        Op("clamp_max", lambda x, y: torch.clamp(x, max=y), _same, lambda o, x, y: (_where_one(f("le", x, y)), _where_one(f("gt", x, y))), S.Min),
        # comparisons and logic
        Op("lt", torch.lt, _bool, _zero, lambda x, y: S.Lt(x, y)),
        Op("le", torch.le, _bool, _zero, lambda x, y: S.Le(x, y)),
        Op("gt", torch.gt, _bool, _zero, lambda x, y: S.Gt(x, y)),
        Op("ge", torch.ge, _bool, _zero, lambda x, y: S.Ge(x, y)),
        Op("eq", torch.eq, _bool, _zero, lambda x, y: S.Eq(x, y), True),
        Op("ne", torch.ne, _bool, _zero, lambda x, y: S.Ne(x, y), True),
        Op("and", torch.bitwise_and, _bits("&"), _zero, lambda x, y: S.And(x, y), True),
        Op("or", torch.bitwise_or, _bits("|"), _zero, lambda x, y: S.Or(x, y), True),
        Op("xor", torch.bitwise_xor, _bits("^"), _zero, lambda x, y: S.Xor(x, y), True),
        Op("lshift", torch.bitwise_left_shift, _shift, _zero),
        Op("rshift", torch.bitwise_right_shift, _shift, _zero),
    ],
    3: [
        Op("where", torch.where, _where, lambda o, c, x, y: (None, _where_one(c), f("where", c, 0.0, 1.0)), lambda c, x, y: S.Piecewise((x, c), (y, True))),
    ],
    6: [
        Op("kept", kept, _bool, _zero),  # seed, b, h, q, kv, least; its CuTe form is `primitives/emit_dropout.py`
    ],
}  # fmt: skip
OPS: dict[str, Op] = {row.name: row for rows in _BY_ARITY.values() for row in rows}
ARITY: dict[str, int] = {row.name: arity for arity, rows in _BY_ARITY.items() for row in rows}

_OF_ITSELF = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False, "sub": 0, "xor": 0}
_INTEGER_IDENTITY = {"floor", "ceil", "round", "trunc"}  # of an integer: itself
_LOGIC_OF_BOOLS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and"}  # as torch does with bools
MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
"""x op y is y MIRRORED[op] x."""
NEGATED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
"""~(x op y) is x NEGATED[op] y, of integers."""


_FURTHEST = 31  # bits of one shift by a constant: those of 32-bit numbers


def apply(name: str, *args: Expr, attr: Hashable = None) -> Expr:
    """The expression `name(*args)`: typed, constants folded, exact identities taken, nothing reassociated."""
    constants = 0
    for a in args:
        constants += a.op == "const"
    name, dtype, is_identity = _typed(name, *[a.dtype for a in args])
    if is_identity:
        return args[0]
    if name == "rshift" and args[1].is_const and args[1].attr > _FURTHEST:
        # no more than the sign is left of 64 bits
        nearer = apply(name, args[0], const(_FURTHEST))
        return apply(name, nearer, const(min(args[1].attr, 63) - _FURTHEST))
    if constants == len(args):
        with torch._C.DisableTorchFunction():  # a mod may be running, whose torch calls are all intercepted
            return _folded(OPS[name], dtype, args)
    if constants or len(args) != 2 or args[0] is args[1]:
        short = _identity(name, dtype, args)
        if short is not None:
            return short
        if constants:
            _check_constant(name, dtype, args[-1])
    return make(name, args, dtype, attr)


def all_of(conditions: Iterable[Expr]) -> Expr:
    """Bools joined by &; of none, True."""
    return functools.reduce(functools.partial(apply, "and"), conditions, const(True))


@functools.cache
def _typed(name: str, *types: DType) -> tuple[str, DType, bool]:
    """Operation to use for these types, its result type, and whether it only returns its argument.

    Raises: `TypeMismatch`; `TypeError` for a wrong number of arguments.
    """
    if len(types) != ARITY[name]:
        raise TypeError(f"{name} takes {ARITY[name]} values, got {len(types)}")
    dtype = OPS[name].result(*types)
    if dtype is DType.BOOL and name in _LOGIC_OF_BOOLS:
        name = _LOGIC_OF_BOOLS[name]
    return name, dtype, name in _INTEGER_IDENTITY and types[0].is_integer


def _check_constant(name: str, dtype: DType, y: Expr) -> None:
    """What torch refuses whatever the other argument is."""
    if not (y.is_const and dtype.is_integer):
        return
    if name in ("floordiv", "truncdiv", "mod", "fmod") and y.attr == 0:
        raise TypeMismatch(f"{name} of integers by the constant 0")
    if name == "pow" and y.attr < 0:
        raise TypeMismatch(f"an integer to the power {y.attr} is no integer; make it a float first, e.g. 2.0 ** x")
    if name in ("lshift", "rshift") and y.attr < 0:
        raise TypeMismatch(f"a shift by {y.attr} bits; shift the other way, by {-y.attr}")
    if name == "lshift" and y.attr > _FURTHEST:
        raise TypeMismatch(
            f"a shift by {y.attr} bits to the left; go from 0 to {_FURTHEST}, or multiply by 2**{y.attr}"
        )


_TORCH_TYPE = {DType.BOOL: torch.bool, DType.INT32: torch.int64, DType.INT64: torch.int64, DType.FLOAT: torch.float64}


def _as_tensors(row: Op, dtype: DType, args: tuple[Expr, ...]) -> list[torch.Tensor]:
    values = [torch.tensor(a.attr, dtype=_TORCH_TYPE[a.dtype], device="cpu") for a in args]
    if dtype is DType.FLOAT and not row.name.startswith("cast_"):  # torch would go through fp32 for integers
        return [v if v.dtype is torch.bool and row.name == "where" else v.to(torch.float64) for v in values]
    return values


def _folded(row: Op, dtype: DType, args: tuple[Expr, ...]) -> Expr:
    if dtype is not DType.FLOAT and any(a.dtype is DType.INT64 and not -(2**63) <= a.attr < 2**63 for a in args):
        return const(_EXACTLY[row.name](*(a.attr for a in args)))
    if args[-1].dtype.is_integer:
        _check_constant(row.name, dtype, args[-1])
    try:
        value = row.torch(*_as_tensors(row, dtype, args)).item()
    except RuntimeError as error:  # integer division by zero and their like
        raise TypeMismatch(f"{row.name} of constants {[a.attr for a in args]}: {error}") from error
    if dtype is DType.INT32 and not -(2**31) <= value < 2**31:
        dtype = DType.INT64
    return const(value, dtype)


# of constants beyond 64 bits, which only the analysis of a mask makes: it has no other operations
_EXACTLY: dict[str, Callable[..., Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "neg": operator.neg, "abs": abs, "maximum": max, "clamp_min": max, "minimum": min, "clamp_max": min,
    "cast_int64": int, "cast_bool": bool, "where": lambda condition, yes, no: yes if condition else no,
}  # fmt: skip


_ROOTS = {0.5: "sqrt", -0.5: "rsqrt"}  # as torch has these powers: of -0.0 and -inf they are others than pow's
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "floordiv": 1, "and": True, "or": False}
_ABSORBING = {"mul": 0, "and": False, "or": True}  # not of floats: 0 * inf


def _identity(name: str, dtype: DType, args: tuple[Expr, ...]) -> Expr | None:
    """Rewrites that are exact for every value, NaN and infinities included."""
    if name.startswith("cast_"):
        return args[0] if name == f"cast_{args[0].dtype.value}" else None
    if len(args) == 1:
        inner = args[0]
        return inner.args[0] if name in ("neg", "not") and inner.op == name and dtype is inner.args[0].dtype else None
    if name == "where" and args[0].is_const:
        return _retype(args[1] if args[0].attr else args[2], dtype)
    x, y = args[-2], args[-1]
    if x is y:
        return _identity_of_equals(name, dtype, x) or _identity_beside_constant(name, dtype, x, y)
    return None if name == "where" else _identity_beside_constant(name, dtype, x, y)


def _identity_of_equals(name: str, dtype: DType, x: Expr) -> Expr | None:
    """What an operation on equal arguments is, as `x - x`; None where nothing is known."""
    if x.dtype is not DType.FLOAT and name in _OF_ITSELF:  # a float may be NaN
        return const(_OF_ITSELF[name], dtype)
    return x if name == "where" or (name in ("and", "or") and dtype is DType.BOOL) else None


def _identity_beside_constant(name: str, dtype: DType, x: Expr, y: Expr) -> Expr | None:
    if name in ("and", "or") and dtype is not DType.BOOL:
        return None
    if name == "pow" and dtype is DType.FLOAT and y.is_const and y.attr in _ROOTS:
        return apply(_ROOTS[y.attr], x)
    for a, other in ((y, x), (x, y)):
        if a.is_const and dtype is not DType.FLOAT and a.attr == _ABSORBING.get(name):
            return _retype(a, dtype)
        if a.is_const and (a is y or OPS[name].commutes) and _is_neutral(name, dtype, a.attr):
            return _retype(other, dtype)
    return None


def _is_neutral(name: str, dtype: DType, constant: float) -> bool:
    """Whether what stands beside the constant is the result."""
    if name == "floordiv" and not dtype.is_integer:
        return False
    if dtype is DType.FLOAT and name in ("add", "sub"):  # -0.0 + 0.0 is 0.0, as torch has it, -0.0 - 0.0 is -0.0
        return constant == 0 and (math.copysign(1.0, constant) < 0) is (name == "add")
    return constant == _NEUTRAL.get(name)


def _retype(x: Expr, dtype: DType) -> Expr:
    """`x` as `dtype`; a promotion must not be lost with the operation that made it."""
    return x if x.dtype is dtype else apply(f"cast_{dtype.value}", x)
