"""A `torch.autograd.Function` that a mod applies in a compiled region: its forward is followed, its backward checked.

No graph shows a backward. In eager mode the mod's own gradient is compared with its graph's (`own_gradient`), for which
the mod has to run on numbers; in a compiled region only Dynamo has the mod. But the function is there as it is, so a
mod that does nothing but apply it is traced, with all that tracing checks.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .form import INDICES
from .recorded import Recorded, Recording
from .trace import trace_score

_OTHERS = (0.7, -1.6)  # what the other numbers are, while the gradient by one of them is compared
_UNKNOWN = object()


class Number(NamedTuple):
    """An argument that is known when the mod runs."""

    is_integer: bool


def followed(function: Any, of_dynamo: Callable[..., Any], tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Dynamo's `call_apply`, which is `of_dynamo`; in a mod, a refused step follows unless the backward agrees."""
    mode = _recording(tx)
    if mode is None:
        return of_dynamo(function, tx, args, kwargs)
    given = [_held(a, mode, tx) for a in args]
    named = {name: _held(a, mode, tx) for name, a in kwargs.items()}
    result = of_dynamo(function, tx, given, named)
    if not _agrees(function.fn_cls, [_known(a, tx) for a in given], {k: _known(a, tx) for k, a in named.items()}):
        mode.call_method(tx, "own_backward", [], {})
    return result


def _recording(tx: Any) -> Any:
    """The mode that records the mod at hand, as Dynamo has it."""
    modes = reversed(tx.symbolic_torch_function_state.mode_stack)
    return next((mode for mode in modes if mode.python_type() is Recording), None)


def _held(argument: Any, mode: Any, tx: Any) -> Any:
    """A tensor is made a value of the mod: given to a function it would make a step of the region's graph of it."""
    is_tensor = issubclass(argument.python_type(), torch.Tensor)
    return mode.call_method(tx, "held", [argument], {}) if is_tensor else argument


def _known(argument: Any, tx: Any) -> Any:
    """What Dynamo knows of an argument: a constant, or what kind of number it will be; else `_UNKNOWN`."""
    if argument.python_type() is Recorded:
        word = ast.literal_eval(argument.var_getattr(tx, "word").as_python_constant())
        steps = argument.var_getattr(tx, "tape").var_getattr(tx, "steps")
        return Number(_is_integer(word, steps.as_python_constant()))
    return argument.as_python_constant() if argument.is_python_constant() else _UNKNOWN


_OF_INTEGERS = {"add", "sub", "mul", "floordiv", "mod", "neg", "abs"}


def _is_integer(word: Any, steps: Sequence[str]) -> bool:
    """Whether a word of a form is surely an integer: made of indices and integers alone."""
    if not isinstance(word, str) or word in INDICES:
        return not isinstance(word, (tuple, bool)) and word is not None
    if not word.startswith("x"):
        return False
    name, *arguments = ast.literal_eval(steps[int(word[1:])])
    return name.strip("_").removeprefix("r") in _OF_INTEGERS and all(_is_integer(a, steps) for a in arguments)


def _agrees(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the backward is the gradient of the forward, by each `Number` among the arguments that is no index."""
    given = [*args, *kwargs.values()]
    if _UNKNOWN in given:
        return False
    by: list[int | None] = [n for n, a in enumerate(given) if isinstance(a, Number) and not a.is_integer] or [None]

    def applied(one: int | None, other: float) -> Callable[..., Any]:
        def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            values = [_number(a, score if n == one else other, q) for n, a in enumerate(given)]
            made = function.apply(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
            parts = made if isinstance(made, tuple) else (made,)
            return sum(part * (1.0 + 0.3 * n) for n, part in enumerate(parts) if part is not None)

        return mod

    try:
        for one, other in itertools.product(by, _OTHERS):
            trace_score(applied(one, other))
    except Exception:  # whatever a forward raises
        return False
    return True


def _number(argument: Any, value: Any, index: Any) -> Any:
    if not isinstance(argument, Number):
        return argument
    if argument.is_integer:
        return index
    return torch.tensor(value) if isinstance(value, float) else value
