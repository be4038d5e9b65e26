"""A user's callable, run once on proxies, becomes an expression; what can't is refused with the user's line.

Works because an object with `__torch_function__` receives Python operators, `torch.*` calls and reads
`real_tensor[proxy]` alike; a mod traces in tens of microseconds and torch's own tracer is not involved.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import math
import numbers
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import errors
from .expr import Capture, DType, Expr, captures, const, has_no_shape, index, make, read, score
from .expr import Dep as _Dep
from .lent import capture_of
from .ops import CASTS, OPS, apply
from .own_gradient import is_that_of
from .refusals import pending, quote, refuse, user_line
from .vectors import LONGEST, REDUCTIONS, Several, Vector, lift, reduce, refuse_length

_CPU: torch.device = torch.device("cpu")
TORCH_DTYPE = {DType.BOOL: torch.bool, DType.INT32: torch.int32, DType.INT64: torch.int64, DType.FLOAT: torch.float32}


# --- values that stand for numbers while a mod is traced ---------------------------------------------------


class Symbolic:
    """Operators of anything that has an expression: traced values and `ca.scalar`."""

    @property
    def expr(self) -> Expr:
        raise TypeError(f"{type(self).__name__} has no expression")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _torch_call(func, args, kwargs or {})

    # comparison of values, not of objects: hence no hash-based equality either
    def __eq__(self, other: object) -> Any:
        return _binary("eq", self, other)

    def __ne__(self, other: object) -> Any:
        return _binary("ne", self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return refuse(
            errors.DataDependentBranch,
            "a traced value has no truth value: `if`, `and`, `or`, `not`, `min()`, `max()` would depend on data; "
            "use torch.where(condition, yes, no), & | ~, torch.minimum and torch.maximum, "
            "and two comparisons for `a < x < b`",
        )

    def _no_number(self, *_: Any) -> Any:
        return refuse(
            errors.ScalarExtraction,
            "a traced value is not a Python number: .item(), int(), float(), range() and list indices are refused; "
            "keep it a tensor expression, and put lists into a captured tensor",
        )

    __array_ufunc__ = None  # numpy numbers on the left leave the operator to us
    __array__ = __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = item = tolist = numpy = _no_number

    def _no_write(self, *_: Any) -> Any:
        return refuse(
            errors.InPlaceWrite, "values in a mod can't be written in place; write `x = x + y` instead of `x += y`"
        )

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = _no_write
    __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = __setitem__ = __delitem__ = _no_write

    def __getitem__(self, item: Any) -> Any:
        if item is Ellipsis or (isinstance(item, tuple) and not item):
            return self
        if item is None or item == (Ellipsis, None):
            return Vector([self])
        return refuse(errors.InvalidRead, "score and indices are single numbers and can't be indexed")

    def __invert__(self) -> Any:
        return _unary("not", self)

    def __pos__(self) -> Any:
        return self

    # what FlexAttention users ask of a 0-d tensor
    dtype = property(lambda self: TORCH_DTYPE[self.expr.dtype])
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    requires_grad = is_cuda = is_sparse = property(lambda self: False)
    device = property(lambda self: _CPU)  # constants are made there; a kernel has them on no device at all
    data = property(lambda self: _detach(self))

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return torch.Size(())

    def numel(self) -> int:
        return 1

    def is_floating_point(self) -> bool:
        return self.expr.dtype is DType.FLOAT

    def is_complex(self) -> bool:
        return False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        for a in (*args, *kwargs.values()):
            if isinstance(a, torch.dtype):
                return _cast(self, a)
            if isinstance(a, (Symbolic, torch.Tensor)):
                return _cast(self, a.dtype)
        return self

    def type(self, dtype: Any = None, **kwargs: Any) -> Any:
        if isinstance(dtype, torch.dtype):
            return _cast(self, dtype)
        return refuse(errors.UnsupportedOperation, f"type({dtype!r}); cast by a dtype: .to(torch.float32)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        handler = _HANDLERS.get(name)
        if handler is not None:
            return lambda *args, **kwargs: handler(self, *args, **kwargs)
        if not hasattr(torch.Tensor, name):
            raise AttributeError(f"a traced value has no attribute {name!r}")
        return _refuse_function(name)


class Proxy(Symbolic):
    """A traced value."""

    __slots__ = ("_expr",)

    def __init__(self, expr: Expr) -> None:
        self._expr = expr

    def __hash__(self) -> int:
        return refuse(
            errors.ScalarExtraction,
            "a traced value can't be looked up in a dict or set; compare it, or put the dict into a captured tensor",
        )

    @property
    def expr(self) -> Expr:
        return self._expr

    def __repr__(self) -> str:
        return f"Proxy({self._expr!r})"


def _is_number(value: Any) -> bool:
    """A Python int or float, or a number of numpy's; other kinds (Fraction) are no numbers of a kernel."""
    return isinstance(value, (int, float)) or (isinstance(value, numbers.Real) and hasattr(value, "item"))


class Scalar(Symbolic):
    """A run-time number: a new value never recompiles. Made by `ca.scalar(x)`; set `.value` to change it.

    An int has 32 bits, 64 where it begins beyond 32. Raises: `UnsupportedCapture` for what its type can't hold.
    """

    __slots__ = ("_expr", "_number", "number")

    _expr: Expr
    _number: float | int
    number: int  # by which compiled code knows it, in this process

    def __init__(self, value: float | int) -> None:
        if isinstance(value, bool) or not _is_number(value):
            raise errors.UnsupportedCapture(
                f"ca.scalar takes a Python int or float, got {type(value).__name__}; "
                "a 0-d tensor can be captured as it is"
            )
        kind = DType.FLOAT
        if isinstance(value, numbers.Integral):
            kind = DType.INT32 if -(2**31) <= value < 2**31 else DType.INT64
        self._expr = make("scalar", (), kind, self, _Dep.RUNTIME)
        self.number = next(_scalar_numbers)
        _scalars[self.number] = self
        self.value = value

    @property
    def value(self) -> float | int:
        return self._number

    @value.setter
    def value(self, value: float | int) -> None:
        whole = isinstance(value, numbers.Integral)
        if isinstance(value, bool) or not _is_number(value) or (self._expr.dtype.is_integer and not whole):
            raise errors.UnsupportedCapture(
                f"a scalar of type {self._expr.dtype.value} got {value!r}; its kernels are made for that type: "
                "make a new ca.scalar, or begin with a float"
            )
        bits = {DType.INT32: 32, DType.INT64: 64}.get(self._expr.dtype)
        if bits is not None and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise errors.UnsupportedCapture(
                f"{value} does not fit into the {bits} bits that this scalar's kernels are made for; "
                + ("begin with a number beyond 32 bits for one of 64" if bits == 32 else "make it a float")
            )
        self._number = _finite(value) if bits is None else int(value)

    @property
    def expr(self) -> Expr:
        return self._expr

    def composattn_fingerprint(self) -> tuple[str, tuple[Any, ...]]:
        """What a mod that reads it depends on besides its value; see `graph.fingerprint`."""
        return self._expr.dtype.value, (self,)

    def __reduce__(self) -> tuple[Any, ...]:
        return Scalar, (self._number,)

    def __repr__(self) -> str:
        return f"ca.scalar({self.value!r})"


_scalar_numbers = itertools.count()
_scalars: weakref.WeakValueDictionary[int, Scalar] = weakref.WeakValueDictionary()


def scalar_of(number: int) -> Scalar:
    """The run-time number of this number in this process. Raises: `ScalarGone`."""
    found = _scalars.get(number)
    if found is None:
        raise errors.ScalarGone(
            "compiled code reads a ca.scalar that is gone; keep a reference to it, or capture a 0-d tensor"
        )
    return found


def _finite(value: float | int) -> float:
    try:
        return float(value)
    except OverflowError:
        raise errors.UnsupportedCapture(
            f"a scalar of {value.__class__.__name__} beyond every float; give a float"
        ) from None


class _Row(Several):
    """A captured tensor read at its first indices only, as in `table[h][q]`: waits for the rest, or for a reduction."""

    def __init__(self, capture: Capture, indices: tuple[Expr, ...]) -> None:
        self.capture, self.indices = capture, indices

    def __getitem__(self, item: Any) -> Any:
        return _read(self.capture, self.indices, item)

    @property
    def shape(self) -> torch.Size:
        return self.capture.tensor.shape[len(self.indices) :]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def vector(self, part: slice = slice(None)) -> Vector:
        if len(self.shape) != 1:
            refuse(
                errors.UnindexedTensor,
                f"a captured tensor is used whole in its last dimensions, {tuple(self.shape)}; a mod computes one "
                "score at a time: read an element, e.g. tensor[h] or tensor[q_idx, kv_idx]",
            )
        positions = range(len(self))[part]
        if len(positions) > LONGEST:
            refuse_length(len(positions))
        return Vector([self[i] for i in positions])


def _as_vector(value: Any) -> Any:
    """`value`, its elements if it has more than one."""
    if isinstance(value, torch.Tensor) and value.ndim:
        value = _Row(capture_of(value), ())
    return value.vector() if isinstance(value, Several) else value


# --- operations ---------------------------------------------------------------------------------------------


def as_expr(value: Any) -> Expr:
    """The expression of a proxy, Python number, `ca.scalar` or 0-d tensor."""
    if isinstance(value, Symbolic):
        return value.expr
    if isinstance(value, (bool, int, float)):
        return _python_number(value)
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # numpy scalars
        return _python_number(value.item())
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return read(capture_of(value), ())
        return refuse(
            errors.UnindexedTensor,
            f"a captured tensor of shape {tuple(value.shape)} is used whole; a mod computes one score at a time: "
            "read an element, e.g. tensor[h] or tensor[q_idx, kv_idx]",
        ).expr
    if isinstance(value, Several):
        return refuse(errors.UnindexedTensor, "a vector where one number is needed; reduce it: .sum(-1), .any(-1)").expr
    return refuse(errors.UnsupportedOperation, f"a {type(value).__name__} can't be part of a mod").expr


def _python_number(value: float | int) -> Expr:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        refuse(errors.TypeMismatch, f"an integer of {value.bit_length()} bits does not fit into 64; write a float")
    return const(value)


def _apply(name: str, *args: Any) -> Any:
    return _of(name, *map(as_expr, args))


def _value(x: Any) -> Any:
    return Proxy(as_expr(x))


def _of(name: str, *args: Expr) -> Proxy:
    try:
        return traced(apply(name, *args))
    except errors.TypeMismatch as error:
        if error.line is not None:
            raise
        raise errors.TypeMismatch(str(error), user_line()) from None


def traced(expr: Expr) -> Proxy:
    """`expr` as a traced value. Refused where torch would not record how it was computed, and so cut its gradient."""
    if not torch.is_grad_enabled() and _has_gradient(expr) and _nodes_made() == pending.nodes:
        refuse(
            errors.UnsupportedOperation,
            "a value with a gradient is computed where torch records none, under torch.no_grad(); a mod's gradient is "
            "that of its formula. For a value without one capture tensor.detach(), made outside",
        )
    return Proxy(expr)


@contextmanager
def passing_gradients() -> Iterator[None]:
    """Inside, values have gradients, and what cuts one is refused, as where a score mod is traced."""
    outer = getattr(pending, "nodes", None)
    pending.nodes = _nodes_made()
    try:
        with torch.enable_grad():  # it may run inside of an operator, where torch records nothing
            yield
    finally:
        pending.nodes = outer


def _has_gradient(expr: Expr) -> bool:
    """Whether a score mod at hand would pass a gradient on to `expr`; masks pass none."""
    if getattr(pending, "nodes", None) is None:
        return False
    learned = any(c.tensor.requires_grad for c in captures(expr))
    return expr.dtype is DType.FLOAT and (learned or bool(expr.deps & _Dep.SCORE))


def _unary(name: str, x: Symbolic) -> Any:
    return _of(name, x.expr)


def _binary(name: str, x: Symbolic, y: Any) -> Any:
    kind = y.__class__
    if kind is Proxy:
        return _of(name, x.expr, y._expr)
    if kind is int or kind is float:
        return _of(name, x.expr, _python_number(y))
    if not isinstance(y, _OPERANDS):
        return NotImplemented
    if isinstance(y, Several) or (isinstance(y, torch.Tensor) and y.ndim):
        return _elementwise(name, x, y)
    return _apply(name, x, y)


def _elementwise(name: str, *args: Any) -> Vector:
    """The operation `name`, where at least one argument is a vector."""
    return lift(functools.partial(_apply, name), *map(_as_vector, args))


_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod",
    "pow": "pow", "and": "and", "or": "or", "xor": "xor", "lshift": "lshift", "rshift": "rshift",
}  # fmt: skip
_OPERANDS = (Symbolic, Several, numbers.Number, torch.Tensor)
_IN_PLACE = {f"__i{name}__" for name in _BINARY}


def _install_operators() -> None:
    def forward(name: str) -> Callable[[Any, Any], Any]:
        return lambda self, other: _binary(name, self, other)

    def backward(name: str) -> Callable[[Any, Any], Any]:
        def operator(self: Any, other: Any) -> Any:
            if not isinstance(other, _OPERANDS):
                return NotImplemented
            if isinstance(other, torch.Tensor) and other.ndim:
                return _elementwise(name, other, self)
            return _apply(name, other, self)

        return operator

    for python, name in _BINARY.items():
        setattr(Symbolic, f"__{python}__", forward(name))
        setattr(Symbolic, f"__r{python}__", backward(name))
    for python in ("lt", "le", "gt", "ge"):
        setattr(Symbolic, f"__{python}__", forward(python))
    _install_operators_of_vectors()
    Symbolic.__neg__ = lambda self: _unary("neg", self)  # type: ignore[attr-defined, operator]
    Symbolic.__abs__ = lambda self: _unary("abs", self)  # type: ignore[attr-defined]
    Symbolic.__floor__ = lambda self: _unary("floor", self)  # type: ignore[attr-defined]
    Symbolic.__ceil__ = lambda self: _unary("ceil", self)  # type: ignore[attr-defined]
    Symbolic.__trunc__ = lambda self: _unary("trunc", self)  # type: ignore[attr-defined]
    Symbolic.__round__ = lambda self, n=None: _round(self, decimals=n or 0)  # type: ignore[attr-defined]


def _install_operators_of_vectors() -> None:
    def forward(name: str) -> Callable[[Any, Any], Any]:
        return lambda self, other: _elementwise(name, self, other) if isinstance(other, _OPERANDS) else NotImplemented

    def backward(name: str) -> Callable[[Any, Any], Any]:
        return lambda self, other: _elementwise(name, other, self) if isinstance(other, _OPERANDS) else NotImplemented

    for python, name in _BINARY.items():
        setattr(Several, f"__{python}__", forward(name))
        setattr(Several, f"__r{python}__", backward(name))
    for python in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Several, f"__{python}__", forward(python))
    for python, name in {"neg": "neg", "abs": "abs", "invert": "not"}.items():
        setattr(Several, f"__{python}__", lambda self, _name=name: _elementwise(_name, self))
    Several.__pos__ = lambda self: self  # type: ignore[attr-defined, operator]
    Several.__matmul__ = lambda self, other: _of_vectors("matmul", (self, other), {})  # type: ignore[attr-defined, operator]
    Several.__rmatmul__ = lambda self, other: _of_vectors("matmul", (other, self), {})  # type: ignore[attr-defined]
    Several.__hash__ = object.__hash__  # type: ignore[method-assign]
    for python in ("__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__", "__setitem__"):
        setattr(Several, python, lambda self, *_, _name=python: _refuse_function(_name))
    for python in _IN_PLACE:
        setattr(Several, python, lambda self, *_, _name=python: _refuse_function(_name))
    Several.__torch_function__ = classmethod(  # type: ignore[attr-defined]
        lambda cls, func, kinds, args=(), kwargs=None: _torch_call(func, args, kwargs or {})
    )
    Several.__getattr__ = _method_of_vectors  # type: ignore[attr-defined]
    Several.__array_ufunc__ = None  # type: ignore[attr-defined]  # numpy numbers on the left leave the operator to us


def _method_of_vectors(self: Several, name: str) -> Any:
    if name.startswith("__") or not hasattr(torch.Tensor, name):
        raise AttributeError(f"a vector has no attribute {name!r}")
    if not isinstance(self, Vector) and hasattr(Vector, name):
        return getattr(self.vector(), name)
    if name in REDUCTIONS or name in _HANDLERS:
        return lambda *args, **kwargs: _of_vectors(name, (self, *args), kwargs)
    return _refuse_function(name)


_install_operators()

_CAST_OF = {
    torch.bool: "bool", torch.int64: "int64", torch.int32: "int32", torch.float32: "float", torch.float64: "float",
    torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip
_NARROW = {torch.int8: (255, 128), torch.uint8: (255, 0), torch.int16: (65535, 32768)}  # bits kept, and the offset


def _cast(x: Any, dtype: torch.dtype) -> Proxy:
    if dtype in _NARROW:  # wraps around, as torch does
        bits, offset = _NARROW[dtype]
        return (_apply("cast_int32", x) + offset & bits) - offset
    if dtype not in _CAST_OF:
        return refuse(errors.UnsupportedOperation, f"a cast to {dtype}; cast to bool, an integer or a float type")
    return _apply(f"cast_{_CAST_OF[dtype]}", x)


def _pointwise(name: str) -> Callable[..., Proxy]:
    def call(*args: Any, **named: Any) -> Proxy:
        first = [named.pop("x")] if "x" in named else []
        last = [named.pop(k) for k in ("y", "exponent") if k in named]
        if named:
            raise TypeError(f"unexpected {', '.join(named)}")
        return _apply(name, *first, *args, *last)

    return call


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Proxy:
    return _apply("add", x, y if alpha == 1 else _apply("mul", y, alpha))


def _sub(x: Any, y: Any, *, alpha: Any = 1) -> Proxy:
    return _apply("sub", x, y if alpha == 1 else _apply("mul", y, alpha))


def _rsub(x: Any, y: Any, *, alpha: Any = 1) -> Proxy:
    return _sub(y, x, alpha=alpha)


def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Proxy:
    name = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}.get(rounding_mode)
    if name is None:
        return refuse(errors.UnsupportedOperation, f"rounding_mode={rounding_mode!r}; it is None, 'floor' or 'trunc'")
    return _apply(name, x, y)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = _apply("clamp_min", x, min)
    return x if max is None else _apply("clamp_max", x, max)


def _where(condition: Any, *branches: Any, **named: Any) -> Proxy:
    branches = (*branches, *(named[k] for k in ("x", "y") if k in named))
    if len(branches) != 2:
        return refuse(errors.UnsupportedOperation, "torch.where(condition) alone; give torch.where(condition, yes, no)")
    return _apply("where", condition, *branches)


def _extremum(name: str, reduction: str) -> Callable[..., Any]:
    def call(x: Any, y: Any = None, **kwargs: Any) -> Any:
        if not isinstance(y, (Symbolic, torch.Tensor)) or kwargs:  # a number would be the dimension to reduce
            return refuse(
                errors.ReductionInMod,
                f"torch.{reduction} over a dimension is a reduction; a mod sees one score. "
                f"For two values write torch.{name}",
            )
        return _apply(name, x, y)

    return call


def _logical(name: str) -> Callable[..., Proxy]:
    return lambda *args: _apply(name, *(_apply("cast_bool", a) for a in args))


def _relu(x: Any, inplace: bool = False) -> Proxy:
    return _where(_apply("le", x, 0), 0, x)  # torch's derivative at 0 is 0, and NaN stays


def _masked_fill(x: Any, mask: Any, value: Any) -> Proxy:
    return _where(mask, value, x)


def _fmin(compare: str) -> Callable[..., Any]:
    # the other one where one is NaN; a tie's gradient goes to the first, as in torch
    return lambda x, y: _where(_apply("isnan", y) | _apply(compare, x, y), x, y)


def _round(x: Any, *, decimals: int = 0) -> Any:
    if decimals:
        return refuse(errors.UnsupportedOperation, f"rounding to {decimals} decimals; scale, round and scale back")
    return _apply("round", x)


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _detach(x: Any) -> Any:
    if _has_gradient(as_expr(x)):
        return _refuse_cut("detach")
    return x


def _refuse_cut(how: str) -> Any:
    return refuse(
        errors.UnsupportedOperation,
        f"{how} cuts a gradient inside a mod; capture tensor.detach() instead, made outside",
    )


def _unsqueeze(x: Any, dim: int) -> Any:
    if dim not in (-1, 0):
        return refuse(errors.UnsupportedOperation, f"unsqueeze({dim}) of one number; it has room at -1 and 0")
    return Vector([_value(x)])


def _constant_like(value: float) -> Callable[..., Any]:
    def call(x: Any, size: Any = (), *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        return _full_like(x, value, size=size, dtype=dtype)

    return call


def _full_like(x: Any, value: Any = None, *, size: Any = (), dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if value is None and "fill_value" in kwargs:
        value = kwargs["fill_value"]
    if size != () and list(size if isinstance(size, (tuple, list)) else [size]):
        return refuse(
            errors.UnsupportedOperation, f"a new tensor of size {size} in a mod; values are single numbers, size ()"
        )
    return _cast(Proxy(as_expr(_detach(value))), dtype or TORCH_DTYPE[as_expr(x).dtype])


def _gelu(x: Any, approximate: str = "none") -> Any:
    x = _value(x)
    if approximate == "tanh":
        return 0.5 * x * (1.0 + _apply("tanh", math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + _apply("erf", x * math.sqrt(0.5)))


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = _apply("mul", x, beta)
    # the exponent is held where the result is not taken, or its gradient would be 0 * inf
    grown = _apply("log1p", _apply("exp", _apply("clamp_max", scaled, threshold)))
    return _where(scaled > threshold, x, grown / beta)


def _log_sigmoid(x: Any) -> Any:
    x = _value(x)
    return _apply("minimum", x, 0.0) - _apply("log1p", _apply("exp", -abs(x)))


def _leaky_relu(x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return _where(_apply("gt", x, 0), x, _apply("mul", x, negative_slope))


def _elu(x: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    return _where(_apply("gt", x, 0), x, alpha * _apply("expm1", _apply("clamp_max", x, 0.0)))


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    # not a clamp: its gradient is 0 at both ends
    return _where(_apply("le", x, min_val), min_val, _where(_apply("ge", x, max_val), max_val, x))


def _hyperbolic(sign: str) -> Callable[..., Any]:
    return lambda x: _apply("mul", 0.5, _apply(sign, _apply("exp", x), _apply("exp", _apply("neg", x))))


def _lerp(x: Any, y: Any, weight: Any) -> Any:
    x = _value(x)
    return x + weight * (y - x)


_HANDLERS: dict[str, Callable[..., Any]] = {
    **{name: _pointwise(name) for name in OPS if not name.startswith("cast_")},
    "subtract": _sub, "multiply": _pointwise("mul"), "negative": _pointwise("neg"), "absolute": _pointwise("abs"),
    "less": _pointwise("lt"), "less_equal": _pointwise("le"), "greater": _pointwise("gt"),
    "greater_equal": _pointwise("ge"), "not_equal": _pointwise("ne"),
    "add": _add, "sub": _sub, "rsub": _rsub, "div": _div, "divide": _div, "true_divide": _pointwise("div"),
    "floor_divide": _pointwise("floordiv"), "remainder": _pointwise("mod"),
    "float_power": lambda x, y: _apply("pow", _apply("cast_float", x), y),
    "fix": _pointwise("trunc"), "sgn": _pointwise("sign"),
    "clamp": _clamp, "clip": _clamp, "clamp_min": _pointwise("clamp_min"), "clamp_max": _pointwise("clamp_max"),
    "where": _where, "min": _extremum("minimum", "min"), "max": _extremum("maximum", "max"),
    "fmin": _fmin("le"), "fmax": _fmin("ge"), "round": _round,
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    "bitwise_and": _pointwise("and"), "bitwise_or": _pointwise("or"), "bitwise_xor": _pointwise("xor"),
    "bitwise_not": _pointwise("not"), "bitwise_left_shift": _pointwise("lshift"),
    "bitwise_right_shift": _pointwise("rshift"), "expit": _pointwise("sigmoid"),
    "reciprocal": lambda x: _apply("div", 1.0, x), "square": lambda x: _apply("mul", x, x), "relu": _relu,
    "masked_fill": _masked_fill,
    "isfinite": lambda x: _apply("not", _apply("or", _apply("isnan", x), _apply("isinf", x))),
    "tan": lambda x: _apply("div", _apply("sin", x), _apply("cos", x)),
    "silu": lambda x, inplace=False: _apply("mul", x, _apply("sigmoid", x)),
    "gelu": _gelu, "softplus": _softplus, "logsigmoid": _log_sigmoid, "log_sigmoid": _log_sigmoid, "elu": _elu,
    "leaky_relu": _leaky_relu, "hardtanh": _hardtanh, "relu6": lambda x, inplace=False: _hardtanh(x, 0, 6),
    "sinh": _hyperbolic("sub"), "cosh": _hyperbolic("add"), "lerp": _lerp,
    "erfc": lambda x: _apply("sub", 1.0, _apply("erf", x)),
    "log10": lambda x: _apply("mul", math.log10(2.0), _apply("log2", x)),
    "deg2rad": lambda x: _apply("mul", x, math.pi / 180.0), "rad2deg": lambda x: _apply("mul", x, 180.0 / math.pi),
    "frac": lambda x: _apply("sub", x, _apply("trunc", x)),
    "isposinf": lambda x: _apply("eq", x, math.inf), "isneginf": lambda x: _apply("eq", x, -math.inf),
    "float": lambda x: _cast(x, torch.float32), "double": lambda x: _cast(x, torch.float64),
    "half": lambda x: _cast(x, torch.float16), "bfloat16": lambda x: _cast(x, torch.bfloat16),
    "int": lambda x: _cast(x, torch.int32), "long": lambda x: _cast(x, torch.int64),
    "bool": lambda x: _cast(x, torch.bool), "type_as": lambda x, other: x.to(other),
    "clone": _same, "contiguous": _same, "detach": _detach, "alias": _same, "view_as": _same,
    "zeros_like": lambda x, **kw: _full_like(x, 0, **kw), "ones_like": lambda x, **kw: _full_like(x, 1, **kw),
    "full_like": _full_like, "new_full": lambda x, size, value=None, **kw: _full_like(x, value, size=size, **kw),
    "unsqueeze": _unsqueeze, "isin": lambda x, y: refuse(errors.UnsupportedOperation, "isin of one number; use =="),
    "new_zeros": _constant_like(0), "new_ones": _constant_like(1),
    "new_tensor": lambda x, value, **kw: _full_like(x, value, **kw),
}  # fmt: skip

_RANDOM = {
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "normal",
    "multinomial", "poisson", "uniform", "exponential", "cauchy", "log_normal", "geometric", "random",
    "dropout", "alpha_dropout", "feature_dropout", "native_dropout", "rrelu", "empty", "empty_like",
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "cumsum", "cumprod", "softmax",
    "log_softmax", "logsumexp", "norm", "std", "var", "median", "sort", "topk", "matmul", "mm", "bmm", "einsum",
    "dot", "linear", "cat", "stack", "gather", "scatter", "nonzero", "unique", "count_nonzero",
}  # fmt: skip


_TO_PYTHON = {"item", "tolist", "numpy", "__int__", "__float__", "__index__", "__complex__", "__array__"}
_OPERATORS = (*_BINARY, "div")


def _refuse_function(name: str) -> Any:
    if name in _TO_PYTHON:
        return refuse(
            errors.ScalarExtraction,
            f"{name} makes a tensor's value a Python number, which would be frozen into the kernel; "
            "use the tensor itself, or take the number outside of the mod",
        )
    if name == "__bool__":
        return refuse(
            errors.DataDependentBranch,
            "a branch on a captured tensor would be frozen into the kernel; use torch.where, "
            "or branch outside of the mod",
        )
    if name in _IN_PLACE:
        return refuse(errors.InPlaceWrite, "a mod can't write into a tensor; write `x = x + y` instead of `x += y`")
    if name in _RANDOM or name.rstrip("_") in _RANDOM:
        return refuse(
            errors.RandomNumber, f"{name} gives random numbers, or any; draw them outside and capture the tensor"
        )
    if name.endswith("_") and not name.endswith("__"):
        return refuse(errors.InPlaceWrite, f"{name} writes in place; use {name.rstrip('_')}")
    if name in _REDUCTIONS:
        return refuse(
            errors.ReductionInMod,
            f"{name} is not pointwise; a mod sees one score: compute it outside and capture the result",
        )
    return refuse(
        errors.UnsupportedOperation, f"{name} is not available in mods; available are: {', '.join(sorted(_HANDLERS))}"
    )


_REFLECTED = {f"__r{n}__": f"__{n}__" for n in _OPERATORS}
_PLAIN_NAME = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
_ARGUMENT = {"input": "x", "self": "x", "other": "y"}


def _torch_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function or tensor method that met a proxy."""
    name = func.__name__.partition(".")[0].removeprefix("special_")  # aten overloads: "tanh.default"
    if name == "__getitem__":
        tensor, item = args
        return _read(capture_of(tensor), (), item) if isinstance(tensor, torch.Tensor) else tensor[item]
    if name == "__setitem__":
        return refuse(errors.InPlaceWrite, "a mod can't write into a tensor")
    if name == "__get__":  # a property such as .dtype asked through the class
        return refuse(errors.UnsupportedOperation, "this tensor property is not known of a traced value")
    if name in _TO_PYTHON or name == "__bool__" or name in _IN_PLACE:
        return _refuse_function(name)
    if kwargs.get("out") is not None:
        return refuse(errors.InPlaceWrite, "out= writes into a tensor; use the returned value")
    if name in _REFLECTED:
        name, args = _REFLECTED[name], (args[1], args[0])
    plain = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    plain = _PLAIN_NAME.get(plain, plain)
    kwargs = {_ARGUMENT.get(k, k): v for k, v in kwargs.items() if k != "out"}
    if plain in _JOINS or (plain not in _LIKE_ANOTHER and any(map(_is_vector, (*args, *kwargs.values())))):
        return _of_vectors(plain, args, kwargs)
    handler = _HANDLERS.get(plain)
    if handler is None:
        return _refuse_function(plain)
    return _handled(plain, handler, args, kwargs)


def _handled(name: str, handler: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return handler(*args, **kwargs)
    except (TypeError, KeyError) as error:
        if isinstance(error, errors.ComposattnError):
            raise
        return refuse(errors.UnsupportedOperation, f"torch.{name} with these arguments: {error}")


_LIKE_ANOTHER = {"type_as", "view_as", "new_tensor", "new_full", "new_zeros", "new_ones"}  # look at a form alone
_JOINS = {"stack", "cat", "concat", "concatenate", "hstack"}


def _is_vector(value: Any) -> bool:
    return isinstance(value, Several) or (isinstance(value, torch.Tensor) and value.ndim > 0)


def _of_vectors(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function `name`, where at least one argument is a vector: a reduction, a join, or element by element."""
    if name in _JOINS:
        return _joined(*args, **kwargs)
    args, kwargs = [_as_vector(a) for a in args], {k: _as_vector(a) for k, a in kwargs.items()}
    pairwise = name in ("max", "min") and any(isinstance(a, (Symbolic, Vector)) for a in (*args[1:], kwargs.get("y")))
    if name in REDUCTIONS and not pairwise:
        args = [kwargs.pop("x"), *args] if "x" in kwargs else args
        return _handled(name, lambda *a, **k: reduce(name, a, k), args, kwargs)
    handler = _HANDLERS.get(name)
    if handler is None or name == "unsqueeze":
        return _refuse_function(name)
    return _handled(name, lambda *a, **k: lift(handler, *a, **k), args, kwargs)


def _joined(tensors: Any, dim: int = 0) -> Vector:
    """torch.stack of single numbers, torch.cat of vectors."""
    if dim not in (0, -1):
        refuse(
            errors.UnsupportedOperation, f"numbers joined along dimension {dim}; a vector has the dimension -1 alone"
        )
    values = [_as_vector(part) for part in tensors]
    return Vector([e for v in values for e in (v.elements if isinstance(v, Vector) else [_value(v)])])


_OPERATOR_NAMES = {"getitem": "__getitem__", "and_": "and", "or_": "or"}  # as Python's module operator calls them


def call_by_name(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a torch function or operator of this name makes of traced values, tensors and numbers."""
    name = _OPERATOR_NAMES.get(name, name)
    func = types.SimpleNamespace(__name__=name)
    if name in _CONSTANT_MAKERS:  # recorded where a compiled region runs the mod
        return _constant(getattr(torch, name), args, kwargs)
    if name == "detach" and args and isinstance(args[0], torch.Tensor):
        return _detached(args[0])
    return _torch_call(func, tuple(args), kwargs)  # type: ignore[arg-type]


def _read(capture: Capture, before: tuple[Expr, ...], item: Any) -> Any:
    """`tensor[item]` with the indices `before` already given."""
    tensor = capture.tensor
    if has_no_shape(tensor):
        raise errors.UnsupportedCapture(
            "a captured parameter has no shape yet; run its lazy module once before a mod reads it"
        )
    items: Sequence[Any] = item if isinstance(item, tuple) else (item,)
    indices = list(before)
    if len(before) + len(items) == tensor.ndim and isinstance(items[-1], slice):
        row = _read(capture, before, tuple(items[:-1])) if len(items) > 1 else _Row(capture, before)
        return row.vector(items[-1])
    for i in items:
        position = len(indices)
        if i is Ellipsis and len(items) - 1 + len(before) >= tensor.ndim:
            continue
        if isinstance(i, slice) or i is None or i is Ellipsis or isinstance(i, list):
            refuse(
                errors.InvalidRead,
                f"captured tensor of shape {tuple(tensor.shape)} read with {i!r}; give one integer a dimension",
            )
        if position >= tensor.ndim:
            refuse(
                errors.InvalidRead,
                f"captured tensor of shape {tuple(tensor.shape)} read with "
                f"{len(before) + len(items)} indices; it has {tensor.ndim} dimensions",
            )
        expr = as_expr(i)
        if not expr.dtype.is_integer:
            refuse(
                errors.InvalidRead, f"index {position} of a captured tensor is {expr.dtype.value}; cast it with .int()"
            )
        size = tensor.shape[position]
        if expr.is_const and not -size <= expr.attr < size:
            refuse(
                errors.ConstantIndexOutOfRange,
                f"index {expr.attr} at dimension {position} of a captured tensor of shape {tuple(tensor.shape)}",
            )
        indices.append(expr)
    if len(indices) < tensor.ndim:
        return _Row(capture, tuple(indices))
    return traced(read(capture, indices))


# --- tracing ------------------------------------------------------------------------------------------------


_SHAPE_QUESTIONS = {
    "size", "dim", "numel", "nelement", "ndimension", "stride", "__len__", "is_floating_point", "is_complex",
    "element_size", "is_contiguous", "__repr__", "__format__", "__hash__", "data_ptr", "get_device",
}  # fmt: skip
_FORM = {
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "itemsize", "nbytes", "is_leaf", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "names", "_version",
}  # fmt: skip
_ALIASES = {"as_tensor", "asarray"}  # keep a tensor's gradient
_COPIES = {"tensor", "scalar_tensor", "full", "zeros", "ones"}
_CONSTANT_MAKERS = _ALIASES | _COPIES


POINTWISE = frozenset(_HANDLERS) | _CONSTANT_MAKERS | REDUCTIONS | _JOINS
"""Names of torch functions that a mod may call, none of which looks at anything but its arguments."""


class _Guard(TorchFunctionMode):
    """While a mod runs, no torch function may do at tracing time what the mod should do at every score.

    0-d tensors made on the spot become constants, elements of captured tensors become reads even at constant
    positions, random numbers, writes and work on whole tensors (beyond short vectors) are refused, wherever among the
    arguments the tensors stand.
    """

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _RANDOM or (name.endswith("_") and name.rstrip("_") in _RANDOM):
            return _refuse_function(name)
        if name in _CONSTANT_MAKERS:
            return _constant(func, args, kwargs)
        tensors, symbols = _tensors_in(args, kwargs)
        if name == "__get__" and tensors:
            return _property(func, tensors[0])
        if name in ("__set__", "__delete__") and tensors:
            return refuse(errors.InPlaceWrite, "a mod can't write to a tensor")
        writes = tensors and name.endswith("_") and not name.endswith("__")
        if name in ("__getitem__", "__setitem__") or symbols or writes:
            return _torch_call(func, args, kwargs)
        if name == "unbind" and args[1:] in ((), (0,)) and tensors and tensors[0].ndim:  # `low, high = bounds`
            return tuple(_read(capture_of(tensors[0]), (), i) for i in range(len(tensors[0])))
        if not tensors or name in _SHAPE_QUESTIONS:
            return func(*args, **kwargs)
        if name == "detach":
            return _detached(tensors[0])
        return _torch_call(func, args, kwargs)


_GUARD = _Guard()


def _tensors_in(args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors among the arguments, in lists and dicts too, and whether there is a traced value."""
    tensors: list[torch.Tensor] = []
    symbols = False
    left = [*reversed(kwargs.values()), *reversed(args)]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (Symbolic, Several)):
            symbols = True
        elif isinstance(value, (list, tuple)):
            left += reversed(value)
        elif isinstance(value, dict):
            left += value.values()
    return tensors, symbols


def _property(func: Any, tensor: torch.Tensor) -> Any:
    """A property of a tensor: what it is may be asked, what it holds may not be taken from it."""
    name = getattr(func.__self__, "__name__", "a property")
    if name in _FORM:
        return func(tensor)
    if name == "data":
        return _detached(tensor)
    return refuse(
        errors.UnindexedTensor,
        f".{name} of a captured tensor would be taken once, when the mod is traced; take it outside and capture it",
    )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, of which torch counts the writes, where there is no gradient to cut."""
    cuts = tensor.requires_grad and getattr(pending, "nodes", None) is not None
    return _refuse_cut("detach, or .data,") if cuts else tensor  # type: ignore[no-any-return]


def _constant(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """torch.tensor(...) and its like inside a mod: a constant, or the value or captured tensor that it wraps."""
    tensors, symbols = _tensors_in(args, kwargs)
    if tensors or symbols:
        return _wrapped(func, args, kwargs)
    if kwargs.get("requires_grad"):
        return refuse(errors.UnsupportedOperation, "a tensor made inside a mod learns nothing; make it outside")
    made = func(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")})
    if made.ndim == 0:
        return Proxy(const(made.item(), DType.of(made.dtype)))
    return made if kwargs.get("device") is None else func(*args, **kwargs)


def _wrapped(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """torch.tensor(x) of a value that the mod computes or captures: that value, without a gradient unless it is x."""
    name = func.__name__
    given = [*args, *(v for k, v in kwargs.items() if k not in ("dtype", "device", "requires_grad", "pin_memory"))]
    value = given[-1]
    if isinstance(value, (list, tuple)) and name in ("tensor", "as_tensor", "asarray"):
        value = _joined(value)
        for element in value:
            _detach(element)
    elif name == "full" and tuple(given[0] if isinstance(given[0], (list, tuple)) else [given[0]]) != ():
        return refuse(errors.UnsupportedOperation, f"a new tensor of size {given[0]}; values are single numbers")
    if isinstance(value, torch.Tensor) and value.ndim:
        return refuse(errors.UnindexedTensor, f"{name} of a whole captured tensor; read an element first")
    if name not in _ALIASES and not isinstance(value, Vector):
        _detach(value)
    if isinstance(value, Several):
        return value.vector().to(kwargs["dtype"]) if kwargs.get("dtype") else value
    return _cast(value, kwargs["dtype"]) if kwargs.get("dtype") else Proxy(as_expr(value))


MASK_SIGNATURE = "mask_mod(b, h, q_idx, kv_idx)"
SCORE_SIGNATURE = "score_mod(score, b, h, q_idx, kv_idx)"
_INDEX_PROXIES = tuple(Proxy(index(name)) for name in ("b", "h", "q", "kv"))
_SCORE_PROXY = Proxy(score())


def arity(fn: Callable[..., Any]) -> int | None:
    """Positional arguments that `fn` must be given, or None where Python can't tell."""
    if type(fn) is types.FunctionType and not fn.__dict__:  # __wrapped__ and __signature__ would be there
        code = fn.__code__
        if not code.co_flags & inspect.CO_VARARGS and not code.co_kwonlyargcount:
            return code.co_argcount - len(fn.__defaults__ or ())
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    required = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if required:
        raise errors.WrongSignature(
            f"{_name(fn)} needs the keyword argument {required[0].name}; "
            f"bind it: functools.partial(fn, {required[0].name}=...)"
        )
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


_nodes_made = torch._C._autograd._get_sequence_nr  # by this thread: grows with each node of autograd's graph
_CUSTOM_FUNCTION = (
    "a torch.autograd.Function is applied in a mod, and its backward is not the gradient of what its forward computes; "
    "a mod's gradient is that of its formula. Write the formula itself, or apply the function outside and capture what "
    "it gives"
)


def _check_own_gradient(fn: Callable[..., Any], result: Any) -> None:
    if isinstance(result, Symbolic) and not is_that_of(result.expr, fn):
        raise errors.UnsupportedOperation(_CUSTOM_FUNCTION, _definition(fn))


def _run(fn: Callable[..., Any], arguments: Sequence[Any], signature: str) -> Any:
    if not callable(fn):
        raise errors.WrongSignature(f"expected a callable {signature}, got {type(fn).__name__}")
    wanted = len(arguments)
    n = arity(fn)
    if getattr(fn, "__annotations__", {}).get("return") in ("Mask", "Score") and n != wanted:
        raise errors.WrongComposition(f"{_name(fn)} makes a mod when it is called: write {_name(fn)}(...)")
    if n is not None and n != wanted:
        kinds = {4: "a mask_mod takes 4", 5: "a score_mod takes 5"}
        hint = f" ({kinds[n]}: was it meant as the other argument?)" if n in kinds else ""
        raise errors.WrongSignature(f"{_name(fn)} takes {n} positional arguments, {signature} takes {wanted}{hint}")
    outer = getattr(pending, "last", None), getattr(pending, "nodes", None)
    recording, nodes = torch.is_grad_enabled(), _nodes_made()
    pending.last, pending.nodes = None, nodes if signature is SCORE_SIGNATURE else None
    try:
        if not recording:
            torch._C._set_grad_enabled(True)
        with _GUARD:
            result = fn(*arguments)
        if _nodes_made() != nodes and signature is SCORE_SIGNATURE and pending.last is None:
            _check_own_gradient(fn, result)
    except Exception as error:
        if _nodes_made() != nodes and pending.last is None and not isinstance(error, errors.ComposattnError):
            raise errors.UnsupportedOperation(_CUSTOM_FUNCTION, _line_of(error)) from error
        _explain(error)
        raise
    else:
        if pending.last is not None:
            raise pending.last  # torch swallowed it: `captured += 1` fell back to `captured + 1`
        return result
    finally:
        pending.last, pending.nodes = outer
        if not recording:
            torch._C._set_grad_enabled(False)


def _explain(error: Exception) -> None:
    """Raise what stands behind an error that left a mod, if it does not say so itself.

    Tensor operators and numpy turn a refusal into an error of their own, and torch's parsers know nothing of the user.
    """
    if isinstance(error, errors.TraceError):
        if error.line is None:
            raise type(error)(str(error), _line_of(error)) from None
    elif pending.last is not None:
        raise pending.last from None
    elif isinstance(error, errors.ComposattnError):
        return
    elif isinstance(error, TypeError) or (isinstance(error, (RuntimeError, ValueError)) and _is_torchs(error)):
        raise errors.UnsupportedOperation(str(error).partition("\n")[0], _line_of(error)) from error


def _is_torchs(error: BaseException) -> bool:
    """Whether the error was raised in torch: in its Python, or by C++ that says what it was given."""
    if "Proxy" in str(error):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and quote(trace.tb_frame.f_code.co_filename, trace.tb_lineno) is None


def _line_of(error: BaseException) -> str | None:
    """The user's line that an error came through last."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        found = quote(trace.tb_frame.f_code.co_filename, trace.tb_lineno) or found
        trace = trace.tb_next
    return found


def trace_mask(fn: Callable[..., Any]) -> Expr:
    """The bool expression of `mask_mod(b, h, q_idx, kv_idx)`; True means that q may attend to kv.

    Raises: `WrongSignature`, `WrongReturn` and the `TraceError`s, each quoting the user's line.
    """
    result = _run(fn, _INDEX_PROXIES, MASK_SIGNATURE)
    expr = _returned(fn, result, "mask_mod must return a bool (a comparison, or comparisons joined with & | ~)")
    if expr.dtype is not DType.BOOL:
        raise errors.WrongReturn(
            f"mask_mod returned {expr.dtype.value}; it must return a bool: compare, e.g. `x > 0`"
            + (", or pass a function that changes scores as score_mod" if expr.dtype is DType.FLOAT else ""),
            _definition(fn),
        )
    return expr


def trace_score(fn: Callable[..., Any]) -> Expr:
    """The float expression of `score_mod(score, b, h, q_idx, kv_idx)`.

    Raises: `WrongSignature`, `WrongReturn` and the `TraceError`s, each quoting the user's line.
    """
    result = _run(fn, (_SCORE_PROXY, *_INDEX_PROXIES), SCORE_SIGNATURE)
    expr = _returned(fn, result, "score_mod must return the new score")
    if expr.dtype is DType.BOOL:
        raise errors.WrongReturn(
            "score_mod returned a bool; pass it as mask_mod, without the score argument", _definition(fn)
        )
    return expr if expr.dtype is DType.FLOAT else apply("cast_float", expr)


def _returned(fn: Callable[..., Any], result: Any, wanted: str) -> Expr:
    if isinstance(result, Several) or (isinstance(result, torch.Tensor) and result.ndim):
        raise errors.UnindexedTensor(
            f"{wanted}; this is a tensor not read at all its dimensions, or a vector not reduced: .sum(-1), .any(-1)",
            _definition(fn),
        )
    if not isinstance(result, (Symbolic, torch.Tensor, bool, int, float)):
        raise errors.WrongReturn(f"{wanted}, got {type(result).__name__}", _definition(fn))
    return as_expr(result)


def _definition(fn: Callable[..., Any]) -> str | None:
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return None
    return (
        f"{code.co_filename}:{code.co_firstlineno}: {linecache.getline(code.co_filename, code.co_firstlineno).strip()}"
    )


__all__ = ["CASTS", "Proxy", "Scalar", "Symbolic", "arity", "as_expr", "trace_mask", "trace_score", "user_line"]
