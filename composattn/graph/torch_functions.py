"""The torch functions and tensor methods that a mod may call, and the refusal of all others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import errors
from .borrowed import capture_of
from .expr import DType, const
from .operators import name_of
from .ops import OPS
from .proxies import (
    BINARY,
    IN_PLACE,
    TORCH_DTYPE,
    Proxy,
    Symbolic,
    apply_to,
    as_expr,
    as_vector,
    cast,
    detach,
    is_vector,
    number_of,
    read_at,
    refuse_cut,
)
from .refusals import pending, refuse
from .vectors import REDUCTIONS, Several, Vector, lift, reduce


def _pointwise(name: str) -> Callable[..., Proxy]:
    def call(*args: Any, **named: Any) -> Proxy:
        first = [named.pop("x")] if "x" in named else []
        last = [named.pop(k) for k in ("y", "exponent") if k in named]
        if named:
            raise TypeError(f"unexpected {', '.join(named)}")
        return apply_to(name, *first, *args, *last)

    return call


def _plus(name: str) -> Callable[..., Proxy]:
    return lambda x, y, *, alpha=1: apply_to(name, x, y if alpha == 1 else apply_to("mul", y, alpha))


def _div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Proxy:
    name = {None: "div", "floor": "floordiv", "trunc": "truncdiv"}.get(rounding_mode)
    if name is None:
        return refuse(errors.UnsupportedOperation, f"rounding_mode={rounding_mode!r}; write None, 'floor' or 'trunc'")
    return apply_to(name, x, y)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = apply_to("clamp_min", x, min)
    return x if max is None else apply_to("clamp_max", x, max)


def _where(condition: Any, *branches: Any, **named: Any) -> Proxy:
    branches = (*branches, *(named[k] for k in ("x", "y") if k in named))
    if len(branches) != 2:
        return refuse(errors.UnsupportedOperation, "torch.where(condition) alone; give torch.where(condition, yes, no)")
    return apply_to("where", condition, *branches)


def _extremum(name: str, reduction: str) -> Callable[..., Any]:
    def call(x: Any, y: Any = None, **kwargs: Any) -> Any:
        if not isinstance(y, (Symbolic, torch.Tensor)) or kwargs:  # a number would be the dimension to reduce
            return refuse(
                errors.ReductionInMod,
                f"torch.{reduction} over a dimension is a reduction; a mod sees one score. "
                f"For two values write torch.{name}",
            )
        return apply_to(name, x, y)

    return call


def _logical(name: str) -> Callable[..., Proxy]:
    return lambda *args: apply_to(name, *(apply_to("cast_bool", a) for a in args))


def _round(x: Any, *, decimals: int = 0) -> Any:
    if decimals:
        return refuse(errors.UnsupportedOperation, f"rounding to {decimals} decimals; scale, round and scale back")
    return apply_to("round", x)


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    like = (a if isinstance(a, torch.dtype) else a.dtype for a in (*args, *kwargs.values()) if isinstance(a, _TYPED))
    dtype = next(like, None)
    return x if dtype is None else cast(x, dtype)


_TYPED = (torch.dtype, Symbolic, torch.Tensor)


def _type(x: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if isinstance(dtype, torch.dtype):
        return cast(x, dtype)
    return refuse(errors.UnsupportedOperation, f"type({dtype!r}); cast by a dtype: .to(torch.float32)")


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _unsqueeze(x: Any, dim: int) -> Any:
    if dim not in (-1, 0):
        return refuse(errors.UnsupportedOperation, f"unsqueeze({dim}) of one number; it has room at -1 and 0")
    return Vector([number_of(x)])


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
    return cast(Proxy(as_expr(detach(value))), dtype or TORCH_DTYPE[as_expr(x).dtype])


def _relu(x: Any) -> Any:
    return apply_to("clamp_min", x, 0) if as_expr(x).dtype.is_integer else apply_to("relu", x)


def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate not in ("none", "tanh"):
        return refuse(errors.UnsupportedOperation, f"gelu by approximate={approximate!r}; there are 'none' and 'tanh'")
    if approximate == "tanh":
        return 0.5 * x * (1.0 + (math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)).tanh())
    return 0.5 * x * (1.0 + (x * math.sqrt(0.5)).erf())


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = x * beta
    # the exponent is held where the result is not taken, or its gradient would be 0 * inf
    return _where(scaled > threshold, x, scaled.clamp(max=threshold).exp().log1p() / beta)


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    # not a clamp: its gradient is 0 at both ends. (Of -0.0 torch's relu6 on a CPU is -0.0, and this the end, 0.0.)
    return _where(x <= min_val, min_val, _where(x >= max_val, max_val, x))


def _lerp(x: Any, y: Any, weight: Any) -> Any:
    # from the nearer end, so that a weight of 1 gives y whatever x is
    from_x, from_y = x + weight * (y - x), y - (y - x) * (1.0 - weight)
    if isinstance(weight, (int, float)):
        return from_x if abs(weight) < 0.5 else from_y
    return _where(abs(weight) < 0.5, from_x, from_y)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "rsub": lambda x, y, *, alpha=1: y - x * alpha, "float_power": lambda x, y: x.float() ** y,
    "reciprocal": lambda x: 1.0 / x, "square": lambda x: x * x, "frac": lambda x: x - x.trunc(),
    "lerp": _lerp, "masked_fill": lambda x, mask, value: _where(mask, value, x),
    # the other one where one is NaN; a tie's gradient goes to the first, as in torch
    "fmin": lambda x, y: _where(y.isnan() | (x <= y), x, y), "fmax": lambda x, y: _where(y.isnan() | (x >= y), x, y),
    "isfinite": lambda x: ~(x.isnan() | x.isinf()),
    "isposinf": lambda x: x == math.inf, "isneginf": lambda x: x == -math.inf,
    "tan": lambda x: x.sin() / x.cos(), "sinh": lambda x: 0.5 * (x.expm1() - (-x).expm1()),
    "cosh": lambda x: 0.5 * (x.exp() + (-x).exp()), "erfc": lambda x: 1.0 - x.erf(),
    "log10": lambda x: math.log10(2.0) * x.log2(),
    "deg2rad": lambda x: x * (math.pi / 180.0), "rad2deg": lambda x: x * (180.0 / math.pi),
    "logsigmoid": lambda x: x.minimum(0.0) - (-abs(x)).exp().log1p(),
    "gelu": _gelu, "softplus": _softplus,
}  # fmt: skip
_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    # torch's derivative at 0 is 0, and NaN stays
    "relu": _relu, "silu": lambda x: x * x.sigmoid(),
    "leaky_relu": lambda x, negative_slope=0.01: _where(x > 0, x, x * negative_slope),
    "elu": lambda x, alpha=1.0: _where(x > 0, x, alpha * x.clamp(max=0.0).expm1()),
    "hardtanh": _hardtanh, "relu6": lambda x: _hardtanh(x, 0, 6),
}  # fmt: skip


def _formula(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` of traced values, whatever numbers it is given."""

    def call(*args: Any, **named: Any) -> Any:
        values = [a if isinstance(a, str) else number_of(a) for a in args]
        return fn(*values, **{k: number_of(v) if k in ("x", "y") else v for k, v in named.items()})

    return call


def _activation(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with torch's last argument `inplace`, which would write into what others read."""
    own, formula = fn.__code__.co_argcount, _formula(fn)

    def call(*args: Any, inplace: Any = False, **named: Any) -> Any:
        if inplace or any(args[own:]):
            return refuse(errors.InPlaceWrite, f"{name}(inplace=True) writes into a value; leave inplace out")
        return formula(*args[:own], **named)

    return call


_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "bool": torch.bool,
}  # fmt: skip
_HANDLERS: dict[str, Callable[..., Any]] = {
    **{name: _pointwise(name) for name in OPS if not name.startswith("cast_")},
    **{name: _formula(fn) for name, fn in _FORMULAS.items()},
    **{name: _activation(name, fn) for name, fn in _ACTIVATIONS.items()},
    **{name: functools.partial(cast, dtype=dtype) for name, dtype in _CASTS.items()},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    **{f"bitwise_{name}": _pointwise(name) for name in ("and", "or", "xor", "not")},
    "add": _plus("add"), "sub": _plus("sub"), "div": _div, "clamp": _clamp, "where": _where, "round": _round,
    "min": _extremum("minimum", "min"), "max": _extremum("maximum", "max"),
    "to": _to, "type": _type, "type_as": lambda x, other: x.to(other),
    "clone": _same, "contiguous": _same, "alias": _same, "view_as": _same,
    "detach": detach, "unsqueeze": _unsqueeze,
    "isin": lambda x, y: refuse(errors.UnsupportedOperation, "isin of one number; use =="),
    "zeros_like": lambda x, **kw: _full_like(x, 0, **kw), "ones_like": lambda x, **kw: _full_like(x, 1, **kw),
    "full_like": _full_like, "new_full": lambda x, size, value=None, **kw: _full_like(x, value, size=size, **kw),
    "new_zeros": _constant_like(0), "new_ones": _constant_like(1),
    "new_tensor": lambda x, value, **kw: _full_like(x, value, **kw),
}  # fmt: skip
_OTHER_NAMES = {
    "subtract": "sub", "multiply": "mul", "negative": "neg", "absolute": "abs", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "divide": "div", "floor_divide": "floordiv",
    "remainder": "mod", "fix": "trunc", "sgn": "sign", "clip": "clamp", "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift", "expit": "sigmoid", "log_sigmoid": "logsigmoid", "true_divide": "div",
}  # fmt: skip
_HANDLERS |= {other: _HANDLERS[name] for other, name in _OTHER_NAMES.items()}

RANDOM = {
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

_TO_TEXT = {"__format__", "__repr__"}


def refuse_function(name: str) -> Any:
    if name in _TO_TEXT:
        return refuse(
            errors.ScalarExtraction,
            "text of a tensor (f-strings, str, repr, print) says what it holds when the mod is traced, which would be "
            "frozen into the kernel; use the tensor itself, or make the text outside of the mod",
        )
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
    if name in IN_PLACE:
        return refuse(errors.InPlaceWrite, "a mod can't write into a tensor; write `x = x + y` instead of `x += y`")
    if name in RANDOM or name.rstrip("_") in RANDOM:
        return refuse(
            errors.RandomNumber, f"{name} gives random numbers, or any; draw them outside and capture the tensor"
        )
    if name.endswith("_") and not name.endswith("__"):
        return refuse(errors.InPlaceWrite, f"{name} writes in place; use {name.rstrip('_')}")
    if name in _REDUCTIONS:
        return refuse(
            errors.ReductionInMod,
            f"{name} is not pointwise; a mod sees one score: compute it outside and capture the result, or write "
            "products of two short rows as (a[q_idx] * b[kv_idx]).sum(-1)",
        )
    return refuse(
        errors.UnsupportedOperation,
        f"{name} is not available in mods; compute it outside, as a table of positions or of distances, and read that "
        f"by index; available are: {', '.join(sorted(_HANDLERS.keys() - {'among', 'kept'}))}",
    )


_REFLECTED = {f"__r{name}__": f"__{name}__" for name in (*BINARY, "div")}
_PLAIN_NAME = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not"}
_ARGUMENT = {"input": "x", "self": "x", "other": "y"}


_REFUSED: dict[str, tuple[type[errors.TraceError], str]] = {
    "__setitem__": (errors.InPlaceWrite, "a mod can't write into a tensor"),
    # a property such as .dtype asked through the class
    "__get__": (errors.UnsupportedOperation, "this tensor property is not known of a traced value"),
}
_NEVER = {"__bool__", *_TO_PYTHON, *_TO_TEXT, *IN_PLACE}


def torch_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function or tensor method that met a proxy."""
    name = name_of(func).partition(".")[0].removeprefix("special_")  # aten overloads: "tanh.default"
    if name == "__getitem__":
        tensor, item = args
        return read_at(capture_of(tensor), (), item) if isinstance(tensor, torch.Tensor) else tensor[item]
    if name in _REFUSED:
        return refuse(*_REFUSED[name])
    if name in _NEVER:
        return refuse_function(name)
    if kwargs.get("out") is not None:
        return refuse(errors.InPlaceWrite, "out= writes into a tensor; use the returned value")
    if name in _REFLECTED:
        name, args = _REFLECTED[name], (args[1], args[0])
    plain = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    plain = _PLAIN_NAME.get(plain, plain)
    kwargs = {_ARGUMENT.get(k, k): v for k, v in kwargs.items() if k != "out"}
    if plain in _JOINS or (plain not in _LIKE_ANOTHER and any(map(is_vector, (*args, *kwargs.values())))):
        return _of_vectors(plain, args, kwargs)
    handler = _HANDLERS.get(plain)
    if handler is None:
        return refuse_function(plain)
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


def _of_vectors(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function `name`, where at least one argument is a vector: a reduction, a join, or element by element."""
    if name in _JOINS:
        return _joined(*args, **kwargs)
    args, kwargs = [as_vector(a) for a in args], {k: as_vector(a) for k, a in kwargs.items()}
    pairwise = name in ("max", "min") and any(isinstance(a, (Symbolic, Vector)) for a in (*args[1:], kwargs.get("y")))
    if name in REDUCTIONS and not pairwise:
        args = [kwargs.pop("x"), *args] if "x" in kwargs else args
        return _handled(name, lambda *a, **k: reduce(name, a, k), args, kwargs)
    handler = _HANDLERS.get(name)
    if handler is None or name == "unsqueeze":
        return refuse_function(name)
    return _handled(name, lambda *a, **k: lift(handler, *a, **k), args, kwargs)


def _joined(tensors: Any, dim: int = 0) -> Vector:
    """torch.stack of single numbers, torch.cat of vectors."""
    if dim not in (0, -1):
        refuse(
            errors.UnsupportedOperation, f"numbers joined along dimension {dim}; a vector has the dimension -1 alone"
        )
    values = [as_vector(part) for part in tensors]
    return Vector([e for v in values for e in (v.elements if isinstance(v, Vector) else [number_of(v)])])


# --- constants made in a mod ----------------------------------------------------------------------------------

_ALIASES = {"as_tensor", "asarray"}  # keep a tensor's gradient
CONSTANT_MAKERS = {"tensor", "scalar_tensor", "full", "zeros", "ones", *_ALIASES}


def tensors_in(args: Any, kwargs: Any) -> tuple[list[torch.Tensor], bool]:
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


def detach_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, whose writes torch counts, where there is no gradient to cut."""
    cuts = tensor.requires_grad and getattr(pending, "nodes", None) is not None
    return refuse_cut("detach, or .data,") if cuts else tensor  # type: ignore[no-any-return]


def constant(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """torch.tensor(...) and its like inside a mod: a constant, or the value or captured tensor that it wraps."""
    tensors, symbols = tensors_in(args, kwargs)
    if tensors or symbols:
        return _wrapped(func, args, kwargs)
    if kwargs.get("requires_grad"):
        return refuse(errors.UnsupportedOperation, "a tensor made inside a mod learns nothing; make it outside")
    how = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    made = func(*args, **how)
    if made.ndim == 0:
        with _disable_current_modes():  # torch.export(strict=False) does not know what its own tensors hold
            return Proxy(const(func(*args, **how).item(), DType.of(made.dtype)))
    return made if kwargs.get("device") is None else func(*args, **kwargs)


def _given(args: Any, kwargs: Any) -> list[Any]:
    """What a tensor is made of: a size, if there is one, and the value."""
    return [*args, *(v for k, v in kwargs.items() if k not in ("dtype", "device", "requires_grad", "pin_memory"))]


def _wrapped(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """torch.tensor(x) of a value that the mod computes or captures: that value, without a gradient unless it is x."""
    name = func.__name__
    given = _given(args, kwargs)
    value = given[-1]
    if isinstance(value, (list, tuple)) and name in ("tensor", "as_tensor", "asarray"):
        value = _joined(value)
        for element in value:
            detach(element)
    elif name == "full" and tuple(given[0] if isinstance(given[0], (list, tuple)) else [given[0]]) != ():
        return refuse(errors.UnsupportedOperation, f"a new tensor of size {given[0]}; values are single numbers")
    if isinstance(value, torch.Tensor) and value.ndim:
        return refuse(errors.UnindexedTensor, f"{name} of a whole captured tensor; read an element first")
    if name not in _ALIASES and not isinstance(value, Vector):
        detach(value)
    if isinstance(value, Several):
        return value.vector().to(kwargs["dtype"]) if kwargs.get("dtype") else value
    return cast(value, kwargs["dtype"]) if kwargs.get("dtype") else Proxy(as_expr(value))


# --- methods ----------------------------------------------------------------------------------------------------


def _method(self: Symbolic, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    handler = _HANDLERS.get(name)
    if handler is not None:
        return lambda *args, **kwargs: handler(self, *args, **kwargs)
    if not hasattr(torch.Tensor, name):
        raise AttributeError(f"a traced value has no attribute {name!r}")
    return refuse_function(name)


def _method_of_vectors(self: Several, name: str) -> Any:
    if name.startswith("__") or not hasattr(torch.Tensor, name):
        raise AttributeError(f"a vector has no attribute {name!r}")
    if not isinstance(self, Vector) and hasattr(Vector, name):
        return getattr(self.vector(), name)
    if name in REDUCTIONS or name in _HANDLERS:
        return lambda *args, **kwargs: _of_vectors(name, (self, *args), kwargs)
    return refuse_function(name)


def _install_methods() -> None:
    kinds: list[tuple[Any, Callable[..., Any]]] = [(Symbolic, _method), (Several, _method_of_vectors)]
    for kind, method in kinds:
        kind.__torch_function__ = classmethod(
            lambda cls, func, types, args=(), kwargs=None: torch_call(func, args, kwargs or {})
        )
        kind.__getattr__ = method
        kind.__array_ufunc__ = None  # numpy numbers on the left leave the operator to us
    Several.__matmul__ = lambda self, other: _of_vectors("matmul", (self, other), {})  # type: ignore[attr-defined, operator]
    Several.__rmatmul__ = lambda self, other: _of_vectors("matmul", (other, self), {})  # type: ignore[attr-defined]
    for name in (*IN_PLACE, *_TO_PYTHON, "__bool__", "__contains__", "__setitem__"):
        setattr(Several, name, lambda self, *_, _name=name: refuse_function(_name))


_install_methods()

POINTWISE = frozenset(_HANDLERS) | CONSTANT_MAKERS | REDUCTIONS | _JOINS
"""Names of torch functions that a mod may call, none of which looks at anything but its arguments."""
