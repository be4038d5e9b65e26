"""Who follows what is run; and what Dynamo can't follow by itself in a mod, taught to it the first time it does.

Dynamo calls the operators of Python objects, all but two (torch 2.11 to 2.13): `~` it knows of tensors and integers
only, and a comparison with an integer that it keeps symbolic it takes for one of unrelated things. `~(q >= kv)` is an
everyday mask, and so is `q - kv < window` with a window that changes. Nor does it say which integers those are. Torch
2.11 does not tell a function mode of `torch.rand`, so that a random number would be taken for a captured tensor.
Of a `torch.autograd.Function` that is given no tensor Dynamo follows the forward, and its own backward is lost.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from .ops import MIRRORED

is_traced = torch.compiler.is_dynamo_compiling
"""Whether Dynamo follows what is run. `torch.export` need not: its inputs are fake ones, its constants plain ones."""


function_modes, dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
"""How many modes of each kind are entered."""
_PROXIES = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]


def is_written_down() -> bool:
    """Whether `make_fx` writes down what is run: only calls of operators, and no value may be asked of a tensor.

    Its tensors may be plain ones. Where no mode is entered, this takes 0.1 µs.
    """
    if not function_modes() and not dispatch_modes():
        return False
    before = torch._ops._get_dispatch_mode_pre_dispatch
    return torch._C._get_dispatch_mode(_PROXIES) is not None or before(_PROXIES) is not None


class Varying:
    """In code that Dynamo follows, an int is an instance of this where it is symbolic: another one in the next call."""


def teach_dynamo() -> bool:
    """Add what is missing; run for real while Dynamo traces, as a function that is constant to it."""
    from torch._dynamo.variables import builtin, misc

    if not hasattr(builtin.BuiltinVariable, "composattn_taught"):
        _teach_invert(builtin.BuiltinVariable)
        _teach_varying(builtin.BuiltinVariable)
        if hasattr(builtin.BuiltinVariable, "_binop_handlers"):
            _teach_comparisons(builtin.BuiltinVariable._binop_handlers())
        _teach_factories()
        _teach_functions(misc.AutogradFunctionVariable)
        getattr(builtin.BuiltinVariable, "call_function_handler_cache", {}).clear()
        builtin.BuiltinVariable.composattn_taught = True  # type: ignore[attr-defined]
    return True


def _teach_invert(builtins: Any) -> None:
    from torch._dynamo.variables import user_defined

    def call_invert(self: Any, tx: Any, value: Any) -> Any:
        if isinstance(value, user_defined.UserDefinedObjectVariable):
            return value.call_method(tx, "__invert__", [], {})
        return None  # not ours: Dynamo goes on as it would have

    if not hasattr(builtins, "call_invert"):
        builtins.call_invert = call_invert


def _teach_varying(builtins: Any) -> None:
    from torch._dynamo.variables import constant, tensor, user_defined

    of_dynamo = builtins.call_isinstance

    def call_isinstance(self: Any, tx: Any, value: Any, kind: Any) -> Any:
        if isinstance(kind, user_defined.UserDefinedClassVariable) and kind.value is Varying:
            varies = isinstance(value, tensor.SymNodeVariable) and value.python_type() is int
            return constant.ConstantVariable.create(varies)
        return of_dynamo(self, tx, value, kind)

    builtins.call_isinstance = call_isinstance


def _teach_factories() -> None:
    """Function modes are told of what makes tensors of nothing, all of it, as torch 2.13 tells them."""
    from torch._dynamo.variables import torch as torchs
    from torch.utils._device import _device_constructors

    torchs.get_overridable_functions().update(_device_constructors())


def _teach_functions(functions: Any) -> None:
    from .applied import followed

    functions.call_apply = functools.partialmethod(followed, functions.call_apply)


def _teach_comparisons(handlers: dict[Any, list[Any]]) -> None:
    """A row of Dynamo's own table for each: objects compare by their methods, with symbolic integers too."""
    from torch._dynamo.variables import constant, tensor, user_defined

    from .recorded import Recorded

    thing, number = user_defined.UserDefinedObjectVariable, tensor.SymNodeVariable
    known = constant.ConstantVariable

    def by_method(name: str) -> Any:
        def compare(tx: Any, value: Any, other: Any) -> Any:
            if value.python_type() is not Recorded:
                return None
            return value.call_method(tx, f"__{name}__", [other], {})

        return compare

    def turned(name: str) -> Any:
        compare = by_method(MIRRORED[name])
        return lambda tx, other, value: compare(tx, value, other)

    for name in MIRRORED:
        rows = handlers[getattr(operator, name)]
        # torch 2.11 makes `0 <= x` of `0 == x or 0 < x`, which asks x for a truth value
        rows[:0] = [((thing, number), by_method(name)), *(((left, thing), turned(name)) for left in (number, known))]


teach_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result sets
