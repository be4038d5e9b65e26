"""A mod in a compiled region: Dynamo follows its Python, and the tracer of eager code reads what it does to values.

There is one reading of mods. Score and indices are the traced values of `proxies` here too. Dynamo finds out what the
mod's names stand for, which lines run, and what of it has to be guarded; whatever is done to a traced value, and all
that is done to tensors, is handed to the eager classes, which do it or refuse it. A captured tensor is for them its
fake one: type, shape and whether it learns. What comes out is a graph, of which the region has the form, a constant.

Dynamo hands over in four places: operators and functions written in C, torch's functions (by a mode that only Dynamo
knows of), functions of our own that are on values, and objects that stand for values.
"""

from __future__ import annotations

import dis
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo import config, exc, symbolic_convert, variables
from torch._dynamo.source import SkipGuardSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.lists import SizeVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .. import errors
from . import dynamo, expr, proxies, scalar, torch_functions, vectors
from .expr import Capture, Expr
from .form import Numbers, form_of, refused
from .proxies import Symbolic, nodes_made
from .rebuilt import transform
from .refusals import OWN_BACKWARD, pending, refuse, user_line
from .scalar import Scalar
from .trace import FORM, GUARD, SHAPE_QUESTIONS
from .vectors import Several

_HOLDERS: tuple[tuple[Any, Callable[[list[Any]], Any]], ...] = (
    (variables.ListVariable, list),
    ((variables.TupleVariable, SizeVariable), tuple),
    (variables.SliceVariable, lambda items: slice(*items)),
)
"""Dynamo's lists and their like, and what is made of the real things that they hold."""
GETATTR = "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"
"""What reads an attribute: the first since torch 2.14, whose variables have the slots of Python's types."""
_PACKAGE = __name__.partition(".")[0] + "."
_OF_VALUES = {module.__file__ for module in (proxies, scalar, torch_functions, vectors)}


class Traced(UserDefinedObjectVariable):
    """An object of the eager tracer, as Dynamo has it: a traced value, a row, a method of one."""

    def python_type(self) -> type:
        return type(self.value)

    def is_python_constant(self) -> bool:
        return False

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        if name == "__bool__":  # torch 2.11 asks for it before a branch, and takes what is no Python function for true
            _reading().run(tx, bool, (self.value,))
        return _reading().run(tx, getattr, (self.value, name))

    var_getattr = tp_getattro_impl  # before torch 2.14

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return _reading().run(tx, hasattr, (self.value, name))

    def call_method(self, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return _reading().call(tx, functools.partial(_method, name), [self, *args], kwargs)

    def mp_ass_subscript_impl(self, tx: Any, key: Any, value: Any) -> Any:
        return _reading().call(tx, operator.setitem, [self, key, value], {})

    def call_function(self, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return _reading().call(tx, self.value, args, kwargs)  # type: ignore[arg-type]

    def unpack_var_sequence(self, tx: Any) -> list[Any]:
        return list(_reading().run(tx, tuple, (self.value,)).items)

    force_unpack_var_sequence = unpack_var_sequence

    def has_unpack_var_sequence(self, tx: Any) -> bool:
        return True

    has_force_unpack_var_sequence = has_unpack_var_sequence

    def is_hashable(self) -> bool:
        return True

    is_python_hashable = is_hashable

    def hash_impl(self, tx: Any) -> tuple[int, bool]:
        return hash(self.value), False

    def get_python_hash(self) -> int:
        return hash(self.value)


def _method(name: str, value: Any, *args: Any, **named: Any) -> Any:
    return getattr(value, name)(*args, **named)


class _Mode(VariableTracker):
    """On Dynamo's stack of function modes: is told of each torch function that the mod calls."""

    value = object()  # of a mode that no Python has

    def call_torch_function(self, tx: Any, fn: Any, kinds: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        reading, args = _reading(), list(args)
        func = fn.as_python_constant()
        if any(map(_is_traced, args)):
            return reading.call(tx, func, args, kwargs)
        of_arrays = any(map(_is_array, args))
        if _asks_for_form(func) or (of_arrays and func in _OF_ARRAYS):
            return fn.call_function(tx, args, kwargs)  # lengths may be symbolic
        if of_arrays:
            raise errors.UnsupportedCapture(ARRAYS)
        return reading.call(tx, func, args, kwargs)


def _asks_for_form(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in FORM
    return name in SHAPE_QUESTIONS


class _Iterated(tuple[Any, ...]):
    """What an iterator gives, all of it."""


class _Unknown(Exception):
    """A value that only Dynamo can have."""


class _Through(BaseException):
    """What Dynamo raises for itself, on its way through the tracer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Reading:
    """One mod that Dynamo follows.

    `exact`: whether numbers that Dynamo keeps symbolic are seen as they are now, and guarded. A number that changed
    from one step to the next is symbolic from then on, and a few functions take no such number.
    """

    def __init__(self, of_score: bool, exact: bool = False) -> None:
        self.of_score, self.exact = of_score, exact
        self.met_symbols = self.met_arrays = False
        self.leaves: dict[int, tuple[Any, Any]] = {}  # by identity: a fake tensor or scalar, and what Dynamo has
        self.numbers: dict[Any, Any] = {}  # what stands for those that Dynamo keeps symbolic, by their nodes
        self.tx: Any = None
        self.raised: tuple[Exception, str | None] | None = None

    def frames(self) -> Iterator[tuple[str, int]]:
        """Where the mod is."""
        tx = self.tx
        while tx is not None:
            yield tx.f_code.co_filename, tx.lineno
            tx = tx.parent

    # --- real things for Dynamo's, and back -----------------------------------------------------------------------

    def real(self, value: Any) -> Any:
        """What stands for a value of Dynamo's. Raises: `_Unknown`."""
        value = value.realize()
        if isinstance(value, Traced):
            return value.value
        if isinstance(value, variables.TensorVariable):
            return self._tensor(value)
        if isinstance(value, variables.SymNodeVariable):
            return self._number(value)
        for kinds, made_of in _HOLDERS:
            if isinstance(value, kinds):
                return made_of([self.real(item) for item in value.items])
        if isinstance(value, variables.ConstDictVariable):
            return {key.vt.as_python_constant(): self.real(item) for key, item in value.items.items()}
        if isinstance(value, UserDefinedObjectVariable):
            if isinstance(value.value, Scalar):
                return self._leaf(value, value.value)
            kind: Any = value.python_type()
            if _is_mod(kind):
                return kind.formed(
                    *[self.real(getattr(value, GETATTR)(self.tx, n)) for n in ("form", "leaves", "name")]
                )
        if not isinstance(value, variables.UserFunctionVariable) and value.is_python_constant():
            return value.as_python_constant()
        raise _Unknown(value)

    def _tensor(self, value: Any) -> Any:
        proxy = value.as_proxy()
        fake = proxy.node.meta["example_value"]
        if isinstance(value, variables.NumpyNdarrayVariable) and fake.ndim:
            import numpy as np

            return np.empty(fake.shape, dtype=object)  # beside a traced value; refused, whatever it holds
        if not isinstance(value, (variables.NumpyNdarrayVariable, variables.UnspecializedPythonVariable)):
            return self._leaf(value, fake)
        if proxy.node not in self.numbers:  # a tensor to the graph of the region, and not to Dynamo
            tensor = wrap_fx_proxy(self.tx, self.tx.output.create_proxy("call_function", torch.clone, (proxy,), {}))
            self.numbers[proxy.node] = self._leaf(tensor, tensor.as_proxy().node.meta["example_value"])
        return self.numbers[proxy.node]

    def _leaf(self, value: Any, real: Any) -> Any:
        self.leaves[id(real)] = real, value
        return real

    def _number(self, value: Any) -> Any:
        is_whole = issubclass(value.python_type(), int) and value.python_type() is not bool
        if not is_whole or self.is_seen_exactly(value):
            return value.evaluate_expr(self.tx.output)
        node = value.sym_num.node.expr
        if node not in self.numbers:
            self.numbers[node] = Scalar(0)
        return self._leaf(value, self.numbers[node])

    def is_seen_exactly(self, value: Any) -> bool:
        """Whether this symbolic number is to be known; that it was met is noted."""
        has_example = not free_unbacked_symbols(value.sym_num)
        self.met_symbols |= has_example
        return self.exact and has_example

    def known(self, tx: Any, value: Any) -> Any:
        """What Dynamo has, or the number that it is now."""
        if isinstance(value, variables.SymNodeVariable) and self.is_seen_exactly(value):
            return VariableTracker.build(tx, value.evaluate_expr(tx.output))
        return value

    def given(self, value: Any) -> Any:
        """`real`, or an object of the class that there is."""
        try:
            return self.real(value)
        except _Unknown:
            return type(value.python_type().__name__, (), {})()

    def value(self, tx: Any, real: Any) -> Any:
        """What Dynamo has for something that the tracer gave."""
        if isinstance(real, Symbolic | Several):
            return Traced(real)
        if id(real) in self.leaves:
            return self.leaves[id(real)][1]
        if isinstance(real, torch.SymInt):
            return VariableTracker.build(tx, int(real))
        if real is NotImplemented or isinstance(
            real, bool | int | float | complex | str | type(None) | type(Ellipsis) | torch.dtype | torch.device | type
        ):
            return VariableTracker.build(tx, real)
        if isinstance(real, torch.Size):
            return SizeVariable([self.value(tx, item) for item in real])
        if isinstance(real, _Iterated):
            return variables.ListIteratorVariable(
                [self.value(tx, item) for item in real], mutation_type=ValueMutationNew()
            )
        if isinstance(real, tuple):
            return variables.TupleVariable([self.value(tx, item) for item in real])
        if isinstance(real, list):
            return variables.ListVariable([self.value(tx, item) for item in real], mutation_type=ValueMutationNew())
        return Traced(real)

    # --- what is done to values -------------------------------------------------------------------------------------

    def call(self, tx: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`func` of what stands for these, as eager code does it."""
        self.tx = tx
        return self.run(tx, func, [self.given(a) for a in args], {k: self.given(v) for k, v in kwargs.items()})

    def run(self, tx: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        """`func` of real things."""
        self.tx = tx
        try:
            with GUARD:
                found = func(*args, **(kwargs or {}))
                if hasattr(found, "__next__"):
                    found = _Iterated(found)
        except (errors.ComposattnError, exc.TorchDynamoException) as error:
            if isinstance(error, errors.TraceError) and error.line is None:
                raise type(error)(str(error), user_line()) from None
            raise
        except Exception as error:
            self.raised = error, user_line()
            kind = type(error) if type(error).__module__ == "builtins" else RuntimeError
            exc.raise_observed_exception(kind, tx, args=[str(error)])
        return self.value(tx, found)

    def follow(self, tx: Any, fn: Any, arguments: Sequence[Any]) -> Any:
        """What the mod makes of these traced values."""
        modes = tx.symbolic_torch_function_state
        modes.push_torch_function_mode(_Mode())
        pending.frames = self.frames
        try:
            with config.patch(rewrite_assert_with_torch_assert=False):
                result = fn.call_function(tx, [Traced(a) for a in arguments], {})
            self.tx = tx
            return self.given(result)
        except exc.ObservedException as error:
            if self.raised is None:
                raise _Through(error) from None
            exc.handle_observed_exception(tx)
            raised, raised.line_in_mod = self.raised[0], self.raised[1]  # type: ignore[attr-defined]
            raise raised from None
        except exc.Unsupported as error:
            if "ata-dependent branching" in str(error):
                stack = error.real_stack or ()
                pending.frames = lambda: ((frame.filename, frame.lineno) for frame in reversed(stack))
                return torch_functions.refuse_function("__bool__")
            raise _Through(error) from None
        except errors.ComposattnError:
            raise
        except Exception as error:  # of Dynamo itself
            raise _Through(error) from None
        finally:
            modes.pop_torch_function_mode()
            pending.frames = None


def _is_mod(kind: type) -> bool:
    return hasattr(kind, "formed") and hasattr(kind, "composattn_fingerprint")


def _reading() -> Reading:
    return pending.reading  # type: ignore[no-any-return]


def _is_traced(value: Any) -> bool:
    """Whether a traced value is among what Dynamo has here."""
    if isinstance(value, Traced):
        return True
    if isinstance(value, UserDefinedObjectVariable):
        return isinstance(value.value, Symbolic)
    if isinstance(value, variables.TupleVariable | variables.ListVariable | variables.SliceVariable):
        return any(map(_is_traced, value.items))
    return False


# --- the region's side ----------------------------------------------------------------------------------------------


def read(tx: Any, fn: Any, trace: Callable[..., Expr]) -> Any:
    """(form, leaves) of a mod, as Dynamo has them."""
    for exact in (False, True):
        reading = Reading(trace.__name__ == "trace_score", exact)
        try:
            form, given = _form(reading, tx, fn, trace)
        except (errors.ComposattnError, _Through) as error:
            if exact or not reading.met_symbols:
                form, given = _refusal(error, reading.met_arrays), []
                break
            if isinstance(error, _Through) and isinstance(error.error, exc.ObservedException):
                exc.handle_observed_exception(tx)
        else:
            break
    return variables.TupleVariable([VariableTracker.build(tx, form), variables.TupleVariable(given)])


def _form(reading: Reading, tx: Any, fn: Any, trace: Callable[..., Expr]) -> tuple[str, list[Any]]:
    """The form of a mod, and what Dynamo has for each leaf. Raises: what tracing raises, and `_Through`."""
    outer = getattr(pending, "reading", None), getattr(pending, "frames", None)
    pending.reading = reading
    reading.tx = tx
    try:
        graph = trace(_function(fn), lambda _, arguments, of_score: reading.follow(tx, fn, arguments))
        form, leaves = form_of(_with_numbers(graph, reading))
        return form, [reading.leaves[id(leaf)][1] for leaf in leaves]
    finally:
        pending.reading, pending.frames = outer


def _refusal(error: errors.ComposattnError | _Through, of_arrays: bool) -> str:
    """The form of a refusal. Raises: what Dynamo raised for itself, and where a program is exported."""
    if isinstance(error, _Through):
        if not of_arrays:
            raise error.error from None
        error = errors.UnsupportedCapture(ARRAYS)
    if torch.compiler._is_exporting_flag:  # what is exported need not run here
        raise exc.UserError(exc.UserErrorType.INVALID_INPUT, f"{type(error).__name__}: {error}") from error
    return refused(error)


def _with_numbers(graph: Expr, reading: Reading) -> Expr:
    """`graph`, where tensors that the mod made of numbers are written as these numbers."""

    def written(node: Expr) -> Expr | None:
        if type(node.attr) is not Capture or id(node.attr.tensor) in reading.leaves:
            return None
        held = Numbers.of(node.attr.tensor)
        return expr.read(held, node.args) if node.op == "read" else expr.size(held, node.args[0].attr)

    return transform(graph, written)


def _function(fn: Any) -> Any:
    """A function of the signature and the name that one of Dynamo's has; it is looked at and not called."""
    fn = fn.realize()
    if isinstance(fn, variables.NestedUserFunctionVariable):
        code = fn.get_code()
        defaults = () if fn.defaults is None else tuple(fn.defaults.items)  # type: ignore[attr-defined]
        cells = tuple([types.CellType() for _ in code.co_freevars])
        made = types.FunctionType(code, {}, code.co_name, defaults, cells)
        if fn.kwdefaults is not None:
            made.__kwdefaults__ = dict.fromkeys(code.co_varnames)
        return made
    if isinstance(fn, variables.FunctoolsPartialVariable):
        return functools.partial(_function(fn.func), *fn.args, **fn.keywords)
    if isinstance(fn, variables.UserMethodVariable):
        return types.MethodType(fn.fn, fn)
    for name in ("fn", "value"):
        if hasattr(fn, name):
            return getattr(fn, name)
    return fn.as_python_constant() if fn.is_python_constant() else lambda *_: None


# --- what Dynamo hands over -------------------------------------------------------------------------------------------


def install() -> None:
    """Has Dynamo hand over."""
    from torch._dynamo.variables import builtin, functions, misc
    from torch._dynamo.variables import torch as torchs
    from torch.utils._device import _device_constructors

    # torch 2.11 does not tell a function mode of what makes tensors of nothing, as torch 2.13 does
    torchs.get_overridable_functions().update(_device_constructors())
    of_c = {"TorchInGraphFunctionVariable", "SkipFunctionVariable", "NumpyVariable"}
    of_c |= {name for name in vars(builtin) if name.endswith("Variable")}
    for module in (builtin, torchs, functions, misc):
        for name, kind in vars(module).items():
            is_own = isinstance(kind, type) and kind.__module__ == module.__name__ and "call_function" in vars(kind)
            if is_own and name in of_c:
                kind.call_function = _handing_over(kind.call_function)  # type: ignore[attr-defined]
    _hand_over_comparisons()
    _hand_over_membership()
    setattr(variables.TensorVariable, GETATTR, _asking(getattr(variables.TensorVariable, GETATTR)))
    variables.TensorVariable.unpack_var_sequence = _taking_apart(  # type: ignore[method-assign]
        variables.TensorVariable.unpack_var_sequence
    )
    if hasattr(VariableTracker, "mp_ass_subscript_impl"):  # no function mode is told of it
        of_tensors: Any = variables.TensorVariable
        of_tensors.mp_ass_subscript_impl = _writing(of_tensors.mp_ass_subscript_impl)
    InstructionTranslatorBase.inline_user_function_return = _not_following(  # type: ignore[method-assign]
        InstructionTranslatorBase.inline_user_function_return
    )
    misc.AutogradFunctionVariable.call_apply = functools.partialmethod(  # type: ignore[assignment, method-assign]
        _applied, misc.AutogradFunctionVariable.call_apply
    )
    inlined = symbolic_convert.InliningInstructionTranslator
    inlined.get_globals_source_and_value = _unguarded(inlined.get_globals_source_and_value)  # type: ignore[method-assign]


def _unguarded(of_dynamo: Callable[..., Any]) -> Callable[..., Any]:
    """What this package is made of is not guarded: functions, classes and texts that its modules name, and `torch`.

    They stay what they are, as those of Python's own modules do for Dynamo. Each call of a region asks all its guards,
    and half of them were of these: 459 to 236 of a BlockMask's, 388 to 202 of ready masks'.
    """

    def get_globals_source_and_value(self: Any, name: str) -> Any:
        holder, variable, source = of_dynamo(self, name)
        value = self.f_globals.get(name)
        stays = value is torch or isinstance(value, types.FunctionType | type | str | tuple)
        if stays and str(self.f_globals.get("__name__")).startswith(_PACKAGE):
            source = SkipGuardSource(source)
        return holder, variable, source

    return get_globals_source_and_value


def _asking(of_dynamo: Callable[..., Any]) -> Callable[..., Any]:
    """What a tensor is may be asked of Dynamo; what it holds (`.data`, `.grad`) is asked as in eager code."""

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        reading = getattr(pending, "reading", None)
        holds = type(getattr(torch.Tensor, name, None)) in (types.GetSetDescriptorType, property) and name not in FORM
        if reading is None or not holds or not _is_tensor(self):
            return of_dynamo(self, tx, name)
        reading.tx = tx
        return reading.run(tx, getattr, (reading.real(self), name))

    return var_getattr


def _taking_apart(of_dynamo: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor that a mod unpacks is read, as in eager code: Dynamo's views of one may not enter a branch together."""

    def unpack_var_sequence(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        reading = getattr(pending, "reading", None)
        if reading is None or not _is_tensor(self):
            return of_dynamo(self, tx, *args, **kwargs)
        return list(reading.run(tx, tuple, (reading.real(self),)).items)

    return unpack_var_sequence


def _writing(of_dynamo: Callable[..., Any]) -> Callable[..., Any]:
    """A write to an element of a tensor."""

    def mp_ass_subscript_impl(self: Any, tx: Any, key: Any, value: Any) -> Any:
        reading = getattr(pending, "reading", None)
        if reading is None or value is None or not _is_tensor(self):
            return of_dynamo(self, tx, key, value)
        return reading.call(tx, operator.setitem, [self, key, value], {})

    return mp_ass_subscript_impl


def _hand_over_comparisons() -> None:
    """Dynamo keeps what does them apart from the classes, as it was when it was imported."""
    tables: list[dict[str, Any]] = [symbolic_convert.compare_op_handlers, vars(symbolic_convert)]
    for table in tables:
        for name, handler in list(table.items()):
            if isinstance(handler, types.MethodType) and handler.__func__.__name__ == "call_function":
                table[name] = handler.__self__.call_function  # type: ignore[attr-defined]


def _hand_over_membership() -> None:
    """`in` is an instruction of its own, which each version of Dynamo follows in another way."""
    kinds = [InstructionTranslatorBase]
    for kind in kinds:
        kinds += kind.__subclasses__()
        table: list[Any] = kind.dispatch_table
        table[dis.opmap["CONTAINS_OP"]] = functools.partial(_found_in, table[dis.opmap["CONTAINS_OP"]])


def _found_in(of_dynamo: Callable[..., Any], tx: Any, instruction: Any) -> Any:
    item, held = tx.stack[-2:]
    among_tensors = isinstance(held.realize(), _SEQUENCES) and _is_tensor(item)
    of_tensors = _is_traced(held) or _is_traced(item) or _is_tensor(held) or among_tensors
    if getattr(pending, "reading", None) is None or not of_tensors:
        return of_dynamo(tx, instruction)
    tx.popn(2)
    tx.push(symbolic_convert.handle_contains(tx, [held, item], {}))
    return tx.UNARY_NOT(instruction) if instruction.argval else None


ARRAYS = (
    "a mod made in a compiled region does this with a numpy array, of whose contents torch.compile knows nothing; make "
    "it a tensor by torch.from_numpy outside of the region, or read a Python number there"
)
_OF_ARRAYS = {torch.Tensor.__getitem__, torch.tensor, torch.as_tensor}  # what Dynamo does to them as numpy does
_TO_TEXT = {str, repr, ascii, format, print, str.format}  # of what holds tensors, too
_OF_TENSORS = {
    *(getattr(operator, name) for name in operator.__all__ if name not in ("is_", "is_not", "setitem", "attrgetter")),
    abs, bool, int, float, complex, round, pow, divmod, sum, min, max, any, all, range,
    *_TO_TEXT,
}  # fmt: skip


_SEQUENCES = (variables.TupleVariable, variables.ListVariable)


def _is_of_tensors(func: Any, args: Any, given: list[Any]) -> bool:
    """Whether a function that is given tensors is an operation on them; a dict looks up by identity, with none."""
    if args and isinstance(args[0].realize(), variables.ConstDictVariable):
        return False
    return func.__hash__ and func in _OF_TENSORS and any(_is_tensor(a, func in _TO_TEXT) for a in given)


def _is_tensor(value: Any, or_holds: bool = False) -> bool:
    if or_holds and isinstance(value.realize(), _SEQUENCES):
        return any(_is_tensor(item, True) for item in value.items)
    return value.is_tensor() and not _is_array(value)


def _is_array(value: Any) -> bool:
    """Whether it is one of numpy's, of some dimensions: Dynamo takes it for a tensor, and alone knows what it holds."""
    if not isinstance(value.realize(), variables.NumpyNdarrayVariable):
        return False
    found: bool = value.as_proxy().node.meta["example_value"].ndim > 0
    _reading().met_arrays |= found
    return found


_METHODS: dict[Any, str] = {
    operator.invert: "__invert__",
    operator.and_: "__rand__",
    operator.or_: "__ror__",
    operator.rshift: "__rrshift__",
    operator.add: "__radd__",
}
"""What `~mask` and `function & mask` call: Dynamo knows the first of tensors alone, and that of torch 2.11 no other."""


def _is_of_a_mod(args: Sequence[Any]) -> bool:
    """Whether an operator's last argument is an object, and one before it a function."""
    *functions, last = [a.realize() for a in args]
    is_function = all(isinstance(a, BaseUserFunctionVariable) for a in functions)
    return is_function and isinstance(last, UserDefinedObjectVariable)


def _handing_over(of_dynamo: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        reading = getattr(pending, "reading", None)
        method = _METHODS.get(getattr(self, "fn", None))
        if method is not None and not kwargs and _is_of_a_mod(args):
            return args[-1].call_method(tx, method, list(args[:-1]), {})
        if reading is None:
            return of_dynamo(self, tx, args, kwargs)
        args, kwargs = [reading.known(tx, a) for a in args], {k: reading.known(tx, v) for k, v in kwargs.items()}
        func, given = self.as_python_constant(), [*args, *kwargs.values()]
        if not _is_of_tensors(func, args, given) and not any(map(_is_traced, given)):
            return of_dynamo(self, tx, args, kwargs)
        reading.tx = tx
        try:
            real = [reading.real(a) for a in args]
            named = {k: reading.real(v) for k, v in kwargs.items()}
        except _Unknown:
            if func in _OF_TENSORS:
                return reading.call(tx, func, args, kwargs)
            return of_dynamo(self, tx, args, kwargs)
        return reading.run(tx, func, real, named)

    return call_function


def _not_following(of_dynamo: Callable[..., Any]) -> Callable[..., Any]:
    def inline_user_function_return(
        self: Any, fn: Any, args: Sequence[Any], kwargs: Any, *more: Any, **named: Any
    ) -> Any:
        code = fn.get_code()
        if code is dynamo.read.__code__:
            return read(self, args[0], args[1].as_python_constant())
        reading = getattr(pending, "reading", None)
        if reading is not None and (code.co_filename in _OF_VALUES or code in dynamo.HANDED_OVER):
            return reading.call(self, fn.get_function(), args, kwargs)
        return of_dynamo(self, fn, args, kwargs, *more, **named)

    return inline_user_function_return


def _applied(function: Any, of_dynamo: Callable[..., Any], tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dynamo's `call_apply`: in a mod the forward of an `autograd.Function` is followed, its backward is looked at."""
    from .autograd_functions import agrees

    reading = getattr(pending, "reading", None)
    if reading is None:
        return of_dynamo(function, tx, args, kwargs)
    reading.tx = tx
    given, named = [reading.given(a) for a in args], {k: reading.given(v) for k, v in kwargs.items()}
    nodes, pending.nodes = pending.nodes, None if pending.nodes is None else nodes_made() - 1
    try:
        held = [Traced(v) if isinstance(v, torch.Tensor) else a for a, v in zip(args, given, strict=True)]
        with_names = {k: Traced(named[k]) if isinstance(named[k], torch.Tensor) else a for k, a in kwargs.items()}
        result = of_dynamo(function, tx, held, with_names)
    finally:
        pending.nodes = nodes
    if reading.of_score and not agrees(function.fn_cls, given, named):
        refuse(errors.UnsupportedOperation, OWN_BACKWARD)
    return result
