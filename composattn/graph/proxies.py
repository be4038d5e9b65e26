"""Values that stand for numbers while a mod is traced: what operators, indices and casts make of them.

The methods and torch functions that they know are in `torch_functions`.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import errors
from .borrowed import capture_of
from .expr import Capture, Dep, DType, Expr, captures, const, has_no_shape, read
from .ops import MIRRORED, apply
from .refusals import pending, refuse, user_line
from .vectors import LONGEST, Several, Vector, lift, refuse_length

_CPU: torch.device = torch.device("cpu")
nodes_made = torch._C._autograd._get_sequence_nr  # by this thread: grows with each node of autograd's graph
TORCH_DTYPE = {DType.BOOL: torch.bool, DType.INT32: torch.int32, DType.INT64: torch.int64, DType.FLOAT: torch.float32}


class Symbolic:
    """Anything that has an expression: traced values and `ca.scalar`."""

    @property
    def expr(self) -> Expr:
        raise TypeError(f"{type(self).__name__} has no expression")

    def __bool__(self) -> bool:
        return refuse(
            errors.DataDependentBranch,
            "a traced value has no truth value: `if`, `and`, `or`, `not`, `in`, `min()`, `max()` would depend on data; "
            "use torch.where(condition, yes, no), & | ~, torch.minimum and torch.maximum, "
            "and two comparisons for `a < x < b`",
        )

    def _no_number(self, *_: Any) -> Any:
        return refuse(
            errors.ScalarExtraction,
            "a traced value is not a Python number: .item(), int(), float(), range(), functions of math and list "
            "indices are refused; write torch's functions (torch.exp), and put lists into a captured tensor",
        )

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

    # what FlexAttention users ask of a 0-d tensor
    dtype = property(lambda self: TORCH_DTYPE[self.expr.dtype])
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    requires_grad = is_cuda = is_sparse = property(lambda self: False)
    device = property(lambda self: _CPU)  # constants are made there; a kernel has them on no device at all
    data = property(lambda self: detach(self))

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

    if TYPE_CHECKING:  # all other methods of a tensor: `torch_functions`

        def __getattr__(self, name: str) -> Any: ...


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


class ReadRow(Several):
    """A captured tensor read at its first indices only, as in `table[h][q]`: waits for the rest, or for a reduction."""

    def __init__(self, capture: Capture, indices: tuple[Expr, ...]) -> None:
        self.capture, self.indices = capture, indices

    def __getitem__(self, item: Any) -> Any:
        return read_at(self.capture, self.indices, item)

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


def as_vector(value: Any) -> Any:
    """`value`, its elements if it has more than one."""
    if isinstance(value, torch.Tensor) and value.ndim:
        value = ReadRow(capture_of(value), ())
    return value.vector() if isinstance(value, Several) else value


def is_vector(value: Any) -> bool:
    return isinstance(value, Several) or (isinstance(value, torch.Tensor) and value.ndim > 0)


# --- operations ---------------------------------------------------------------------------------------------


def as_expr(value: Any) -> Expr:
    """The expression of a proxy, Python number, `ca.scalar` or 0-d tensor."""
    if isinstance(value, Symbolic):
        return value.expr
    if hasattr(value, "__array__") and getattr(value, "ndim", None) == 0 and not isinstance(value, torch.Tensor):
        value = value.item()  # numpy's numbers
    if isinstance(value, (bool, int, float)):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            refuse(errors.TypeMismatch, f"an integer of {value.bit_length()} bits does not fit into 64; write a float")
        return const(value)
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return read(capture_of(value), ())
        return refuse(
            errors.UnindexedTensor,
            f"a captured tensor of shape {tuple(value.shape)} is used whole; a mod computes one score at a time: "
            "read an element, e.g. tensor[h] or tensor[q_idx, kv_idx]",
        ).expr
    if isinstance(value, _KEPT_SYMBOLIC):
        return refuse(
            errors.UnsupportedOperation,
            "a length that torch keeps symbolic, as torch.export(strict=False) and make_fx do, can't be part of a mod; "
            "export with strict=True, or capture torch.scalar_tensor(n, device=q.device), made outside of the mod",
        ).expr
    if isinstance(value, Several):
        return refuse(errors.UnindexedTensor, "a vector where one number is needed; reduce it: .sum(-1), .any(-1)").expr
    way_out = "; capture a tensor of it, and read an element" if hasattr(value, "__array__") else ""
    return refuse(errors.UnsupportedOperation, f"a {type(value).__name__} can't be part of a mod{way_out}").expr


def apply_to(name: str, *args: Any) -> Any:
    return _of(name, *map(as_expr, args))


def number_of(x: Any) -> Any:
    return Proxy(as_expr(x))


def _of(name: str, *args: Expr) -> Proxy:
    try:
        found = apply(name, *args)
        if found.op == "index" and found.attr in ("b", "h") and name in ("add", "sub"):
            # `table[h + first]` on the first rank, `mask(b + 0, ...)` of the first microbatch: see `graph.among`
            found = apply("among", found, attr=None)
        return traced(found)
    except errors.TypeMismatch as error:
        if error.line is not None:
            raise
        raise errors.TypeMismatch(str(error), user_line()) from None


def traced(expr: Expr) -> Proxy:
    """`expr` as a traced value. Refused where torch would not record how it was computed, and so cut its gradient."""
    if not torch.is_grad_enabled() and _has_gradient(expr) and nodes_made() == pending.nodes:
        refuse(
            errors.UnsupportedOperation,
            "a value with a gradient is computed where torch records none, under torch.no_grad(); a mod's gradient is "
            "that of its formula. For a value without one capture tensor.detach(), made outside",
        )
    return Proxy(expr)


def _has_gradient(expr: Expr) -> bool:
    """Whether a score mod at hand would pass a gradient on to `expr`; masks pass none."""
    if getattr(pending, "nodes", None) is None:
        return False
    learned = any(c.tensor.requires_grad for c in captures(expr))
    return expr.dtype is DType.FLOAT and (learned or bool(expr.deps & Dep.SCORE))


def detach(x: Any) -> Any:
    if _has_gradient(as_expr(x)):
        return refuse_cut("detach")
    return x


def refuse_cut(how: str) -> Any:
    return refuse(
        errors.UnsupportedOperation,
        f"{how} cuts a gradient inside a mod; capture tensor.detach() instead, made outside",
    )


_CAST_OF = {
    torch.bool: "bool", torch.int64: "int64", torch.int32: "int32", torch.float32: "float", torch.float64: "float",
    torch.float16: "float16", torch.bfloat16: "bfloat16",
}  # fmt: skip
_NARROW = {torch.int8: (255, 128), torch.uint8: (255, 0), torch.int16: (65535, 32768)}  # bits kept, and the offset


def cast(x: Any, dtype: torch.dtype) -> Proxy:
    if dtype in _NARROW:  # wraps around, as torch does
        bits, offset = _NARROW[dtype]
        return (apply_to("cast_int32", x) + offset & bits) - offset
    if dtype not in _CAST_OF:
        return refuse(errors.UnsupportedOperation, f"a cast to {dtype}; cast to bool, an integer or a float type")
    return apply_to(f"cast_{_CAST_OF[dtype]}", x)


# --- Python's operators --------------------------------------------------------------------------------------

BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floordiv", "mod": "mod",
    "pow": "pow", "and": "and", "or": "or", "xor": "xor", "lshift": "lshift", "rshift": "rshift",
}  # fmt: skip
_KEPT_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_OPERANDS = (Symbolic, Several, numbers.Number, torch.Tensor, *_KEPT_SYMBOLIC)
IN_PLACE = {f"__i{name}__" for name in BINARY}


def _is_operand(value: Any) -> bool:
    """Whether torch computes with it, as with numpy's arrays."""
    return isinstance(value, _OPERANDS) or hasattr(value, "__array__")


def _operator(name: str, x: Any, y: Any) -> Any:
    if x.__class__ is Proxy and y.__class__ is Proxy:
        return _of(name, x._expr, y._expr)
    if not _is_operand(x) or not _is_operand(y):
        return NotImplemented  # of == and != Python makes a False and a True, as it does for torch's tensors
    if is_vector(x) or is_vector(y):
        return _elementwise(name, x, y)
    return apply_to(name, x, y)


def _elementwise(name: str, *args: Any) -> Vector:
    """The operation `name`, where at least one argument is a vector."""
    return lift(functools.partial(apply_to, name), *map(as_vector, args))


def _install_operators() -> None:
    kinds: list[tuple[Any, Callable[..., Any]]] = [(Symbolic, apply_to), (Several, _elementwise)]
    for kind, unary in kinds:
        for python, name in (*BINARY.items(), *zip(MIRRORED, MIRRORED, strict=True)):
            setattr(kind, f"__{python}__", lambda self, other, _name=name: _operator(_name, self, other))
        for python, name in BINARY.items():
            setattr(kind, f"__r{python}__", lambda self, other, _name=name: _operator(_name, other, self))
        for python, name in {"neg": "neg", "abs": "abs", "invert": "not"}.items():
            setattr(kind, f"__{python}__", lambda self, _name=name, _unary=unary: _unary(_name, self))
        kind.__pos__ = lambda self: self
        kind.__hash__ = object.__hash__  # == compares values, not objects
    for python in ("floor", "ceil", "trunc"):
        setattr(Symbolic, f"__{python}__", lambda self, _name=python: apply_to(_name, self))
    Symbolic.__divmod__ = lambda self, other: (self // other, self % other)  # type: ignore[attr-defined, operator]
    Symbolic.__round__ = lambda self, n=None: self.round(decimals=n or 0)  # type: ignore[attr-defined]


_install_operators()


# --- reads ---------------------------------------------------------------------------------------------------


def _position(tensor: torch.Tensor, dimension: int, i: Any, given: int) -> Expr:
    """One index of a read of so many `given`. Raises, as `refuse` does: `InvalidRead`, `ConstantIndexOutOfRange`."""
    shape = tuple(tensor.shape)
    if i is None or i is Ellipsis or isinstance(i, (slice, list)):
        refuse(errors.InvalidRead, f"captured tensor of shape {shape} read with {i!r}; give one integer per dimension")
    if dimension >= len(shape):
        has = f"it has {len(shape)} dimensions"
        refuse(errors.InvalidRead, f"captured tensor of shape {shape} read with {given} indices; {has}")
    expr = as_expr(i)
    if not expr.dtype.is_integer:
        refuse(errors.InvalidRead, f"index {dimension} of a captured tensor is {expr.dtype.value}; cast it with .int()")
    size = shape[dimension]
    if expr.is_const and not -size <= expr.attr < size:
        where = f"at dimension {dimension} of a captured tensor of shape {shape}"
        refuse(errors.ConstantIndexOutOfRange, f"index {expr.attr} {where}")
    return expr


def read_at(capture: Capture, before: tuple[Expr, ...], item: Any) -> Any:
    """`tensor[item]` with the indices `before` already given."""
    tensor = capture.tensor
    if has_no_shape(tensor):
        raise errors.UnsupportedCapture(
            "a captured parameter has no shape yet; run its lazy module once before a mod reads it"
        )
    items: Sequence[Any] = item if isinstance(item, tuple) else (item,)
    indices = list(before)
    if len(before) + len(items) == tensor.ndim and isinstance(items[-1], slice):
        row = read_at(capture, before, tuple(items[:-1])) if len(items) > 1 else ReadRow(capture, before)
        return row.vector(items[-1])
    given = len(before) + len(items)
    for i in items:
        if i is not Ellipsis or given <= tensor.ndim:  # else it stands for no dimension
            indices.append(_position(tensor, len(indices), i, given))
    if len(indices) < tensor.ndim:
        return ReadRow(capture, tuple(indices))
    return traced(read(capture, indices))
