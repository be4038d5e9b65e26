"""A user's callable, run once on proxies, becomes an expression; what can't is refused with the user's line.

Works because an object with `__torch_function__` receives Python operators, `torch.*` calls and reads
`real_tensor[proxy]` alike; a mod traces in tens of microseconds and torch's own tracer is not involved.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import errors
from .among import among
from .borrowed import capture_of
from .expr import Capture, DType, Expr, index, score, walk
from .ops import apply
from .own_gradient import is_that_of
from .proxies import Proxy, Symbolic, as_expr, nodes_made, read_at
from .rebuilt import substitute
from .refusals import OWN_BACKWARD, pending, quote, refuse
from .torch_functions import CONSTANT_MAKERS, RANDOM, constant, detach_tensor, refuse_function, tensors_in, torch_call
from .vectors import Several

SHAPE_QUESTIONS = {
    "size", "dim", "numel", "nelement", "ndimension", "stride", "__len__", "is_floating_point", "is_complex",
    "element_size", "is_contiguous", "__hash__", "get_device",
}  # fmt: skip
FORM = {
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "itemsize", "nbytes", "is_leaf", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "names",
}  # fmt: skip


class Guard(TorchFunctionMode):
    """While a mod runs, no torch function may do at tracing time what the mod should do at every score.

    0-d tensors made on the spot become constants, elements of captured tensors become reads even at constant
    positions, random numbers, writes and work on whole tensors (beyond short vectors) are refused, wherever among the
    arguments the tensors stand.
    """

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in RANDOM or (name.endswith("_") and name.rstrip("_") in RANDOM):
            return refuse_function(name)
        if name in CONSTANT_MAKERS:
            return _own(constant(func, args, kwargs))
        tensors, symbols = tensors_in(args, kwargs)
        if name == "__get__" and tensors:
            return _property(func, tensors[0])
        if name in ("__set__", "__delete__") and tensors:
            return refuse(errors.InPlaceWrite, "a mod can't write to a tensor")
        if name in ("__getitem__", "__setitem__") or symbols:
            return torch_call(func, args, kwargs)
        if not tensors:
            return _own(func(*args, **kwargs))
        return _of_tensors(func, name, tensors[0], args, kwargs)


GUARD = Guard()


def _of_tensors(func: Any, name: str, first: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """A function of captured tensors, `first` among them, and of no traced value."""
    if name == "unbind" and args[1:] in ((), (0,)) and first.ndim:  # `low, high = bounds`
        return tuple(read_at(capture_of(first), (), i) for i in range(len(first)))
    if name in SHAPE_QUESTIONS:
        return func(*args, **kwargs)
    if name == "detach":
        return detach_tensor(first)
    return torch_call(func, args, kwargs)


def _property(func: Any, tensor: torch.Tensor) -> Any:
    """A property of a tensor: what it is may be asked, what it holds may not be taken from it."""
    name = getattr(func.__self__, "__name__", "a property")
    if name in FORM:
        return func(tensor)
    if name == "data":
        return detach_tensor(tensor)
    return refuse(
        errors.UnindexedTensor,
        f".{name} of a captured tensor would be taken once, when the mod is traced; take it outside and capture it",
    )


MASK_SIGNATURE = "mask_mod(b, h, q_idx, kv_idx)"
SCORE_SIGNATURE = "score_mod(score, b, h, q_idx, kv_idx)"
_INDEX_PROXIES = tuple(Proxy(index(name)) for name in ("b", "h", "q", "kv"))
_SCORE_PROXY = Proxy(score())


def _says_all(fn: types.FunctionType) -> bool:
    """Whether a function's code says how many arguments it must be given: `inspect` takes longer."""
    stands_for_another = hasattr(fn, "__wrapped__") or hasattr(fn, "__signature__")
    return not (stands_for_another or fn.__code__.co_flags & inspect.CO_VARARGS or fn.__code__.co_kwonlyargcount)


def arity(fn: Callable[..., Any]) -> int | None:
    """Positional arguments that `fn` must be given, or None where Python can't tell."""
    if type(fn) is types.FunctionType and _says_all(fn):
        return fn.__code__.co_argcount - len(fn.__defaults__ or ())
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


Runner = Callable[[Callable[..., Any], Sequence[Any], bool], Any]
"""Gives what a mod makes of traced values: the mod, the values, whether the mod is one of scores."""


def in_python(fn: Callable[..., Any], arguments: Sequence[Any], of_score: bool) -> Any:
    """What `fn` returns, run as any function. Raises: `UnsupportedOperation` for a backward that is not its own."""
    before = nodes_made()
    try:
        with GUARD:
            result = fn(*arguments)
        has_nodes = nodes_made() != before and of_score and pending.last is None
        if has_nodes and isinstance(result, Symbolic) and not is_that_of(result.expr, fn):
            raise errors.UnsupportedOperation(OWN_BACKWARD, _definition(fn))
        return result
    except Exception as error:
        if nodes_made() != before and pending.last is None and not isinstance(error, errors.ComposattnError):
            raise errors.UnsupportedOperation(OWN_BACKWARD, _line_of(error)) from error
        raise


def _run(fn: Callable[..., Any], arguments: Sequence[Any], signature: str, runner: Runner) -> Any:
    if not callable(fn):
        join = "; join masks with & | ~, score mods with >> and +" if isinstance(fn, (list, tuple)) else ""
        raise errors.WrongSignature(f"expected a callable {signature}, got {type(fn).__name__}{join}")
    wanted = len(arguments)
    n = arity(fn)
    if getattr(fn, "__annotations__", {}).get("return") in ("Mask", "Score") and n != wanted:
        raise errors.WrongComposition(f"{_name(fn)} makes a mod when it is called: write {_name(fn)}(...)")
    if n is not None and n != wanted:
        kinds = {4: "a mask_mod takes 4", 5: "a score_mod takes 5"}
        hint = f" ({kinds[n]}: was it meant as the other argument?)" if n in kinds else ""
        raise errors.WrongSignature(f"{_name(fn)} takes {n} positional arguments, {signature} takes {wanted}{hint}")
    outer = getattr(pending, "last", None), getattr(pending, "nodes", None), getattr(pending, "own", None)
    recording, nodes = torch.is_grad_enabled(), nodes_made()
    pending.last, pending.nodes, pending.own = None, nodes if signature is SCORE_SIGNATURE else None, []
    try:
        if not recording:
            torch._C._set_grad_enabled(True)
        result = runner(fn, arguments, signature is SCORE_SIGNATURE)
    except Exception as error:
        _explain(error)
        raise
    else:
        if pending.last is not None:
            raise pending.last  # torch swallowed it: `captured += 1` fell back to `captured + 1`
        if isinstance(result, Symbolic):
            _refuse_made_inside(result.expr, fn)
        return result
    finally:
        pending.last, pending.nodes, pending.own = outer
        if not recording:
            torch._C._set_grad_enabled(False)


def _own(made: Any) -> Any:
    """What the mod makes of numbers, and nothing else: the same in every call."""
    pending.own.append(made)
    return made


_only_capture = Capture(torch.empty(0, device="cpu"))
_ALONE = sys.getrefcount(_only_capture.tensor)  # as counted of a tensor that one capture holds, and nobody else


def _refuse_made_inside(expr: Expr, fn: Callable[..., Any]) -> None:
    """Refused where a tensor that the mod read ended with it, as nobody but the graph has it any more.

    The mod made it of what it captures, where no guard saw: by a class (`Parameter(t)`, `torch.Tensor(t)`), through
    dlpack, in a scripted function. It would stay what it was.
    """
    by_tensor: dict[int, dict[int, Capture]] = {}
    for node in walk(expr):
        if type(node.attr) is Capture:
            by_tensor.setdefault(id(node.attr.tensor), {})[id(node.attr)] = node.attr
    for same in by_tensor.values():
        capture = next(iter(same.values()))
        if sys.getrefcount(capture.tensor) < _ALONE + len(same):
            raise errors.UnindexedTensor(
                f"a tensor of shape {tuple(capture.tensor.shape)} is made inside of the mod, where it would be made "
                "once, when the mod is traced; make it outside and capture it; numbers go in torch.tensor([...])",
                _definition(fn),
            )


NUMPYS = "numpy's functions take numbers, and a mod is a formula; write torch's, as torch.exp"


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
        words = NUMPYS if "__array_ufunc__" in str(error) else str(error).partition("\n")[0]
        raise errors.UnsupportedOperation(words, _line_of(error)) from error


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
    found: str | None = getattr(error, "line_in_mod", None)  # Dynamo followed it
    trace = error.__traceback__
    while trace is not None:
        found = quote(trace.tb_frame.f_code.co_filename, trace.tb_lineno) or found
        trace = trace.tb_next
    return found


def trace_mask(fn: Callable[..., Any], runner: Runner = in_python) -> Expr:
    """The bool expression of `mask_mod(b, h, q_idx, kv_idx)`; True means that q may attend to kv.

    Raises: `WrongSignature`, `WrongReturn` and the `TraceError`s, each quoting the user's line.
    """
    result = _run(fn, _INDEX_PROXIES, MASK_SIGNATURE, runner)
    expr = _returned(fn, result, "mask_mod must return a bool (a comparison, or comparisons joined with & | ~)")
    if expr.dtype is not DType.BOOL:
        raise errors.WrongReturn(
            f"mask_mod returned {expr.dtype.value}; it must return a bool: compare, e.g. `x > 0`"
            + (", or pass a function that changes scores as score_mod" if expr.dtype is DType.FLOAT else ""),
            _definition(fn),
        )
    return _by_slots(fn, expr)


def trace_score(fn: Callable[..., Any], runner: Runner = in_python) -> Expr:
    """The float expression of `score_mod(score, b, h, q_idx, kv_idx)`.

    Raises: `WrongSignature`, `WrongReturn` and the `TraceError`s, each quoting the user's line.
    """
    result = _run(fn, (_SCORE_PROXY, *_INDEX_PROXIES), SCORE_SIGNATURE, runner)
    expr = _returned(fn, result, "score_mod must return the new score")
    if expr.dtype is DType.BOOL:
        raise errors.WrongReturn(
            "score_mod returned a bool; pass it as mask_mod, without the score argument", _definition(fn)
        )
    return _by_slots(fn, expr if expr.dtype is DType.FLOAT else apply("cast_float", expr))


def _by_slots(fn: Callable[..., Any], expr: Expr) -> Expr:
    """A mod of torch's `PagedAttention`: its tables have a row for each sequence that the cache takes, and a call's
    sequences are the first of them. So `b` counts among more than the call has, see `graph.among`."""
    code = getattr(fn, "__code__", None)
    if code is None or not code.co_filename.endswith(_PAGED_ATTENTION):
        return expr
    return substitute(expr, {index("b"): among(index("b"), None)})


_PAGED_ATTENTION = "torch/nn/attention/experimental/_paged_attention.py"


def _returned(fn: Callable[..., Any], result: Any, wanted: str) -> Expr:
    if isinstance(result, Several) or (isinstance(result, torch.Tensor) and result.ndim):
        raise errors.UnindexedTensor(
            f"{wanted}; this is a tensor that is not read at all its dimensions, or a vector that is not reduced: "
            "write .sum(-1) or .any(-1)",
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
