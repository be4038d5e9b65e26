"""A `torch.autograd.Function` that a mod applies in a compiled region: its forward is followed, its backward checked.

No graph shows a backward. In eager mode the mod's own gradient is compared with its graph's (`own_gradient`), for which
the mod has to run on numbers; in a compiled region only Dynamo has the mod. But the function is there as it is, so a
mod that does nothing but apply it is traced, with all that tracing checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .proxies import Symbolic
from .trace import trace_score
from .vectors import Several

_OTHERS = (0.7, -1.6)  # what the other numbers are, while the gradient by one of them is compared


def agrees(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the backward is the gradient of the forward, by each value among the arguments that is no integer."""
    given = [*args, *kwargs.values()]
    if any(isinstance(a, (torch.Tensor, Several)) and not is_number(a) for a in given):
        return False
    by: list[int | None] = [n for n, a in enumerate(given) if is_number(a) and not is_integer(a)] or [None]

    def applied(values: Sequence[Any]) -> Any:
        return function.apply(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    try:
        for one, other in itertools.product(by, _OTHERS):
            trace_score(_mod(applied, given, one, other))
    except Exception:  # whatever a forward raises
        return False
    return True


def _mod(applied: Callable[[Sequence[Any]], Any], given: Sequence[Any], one: int | None, other: float) -> Any:
    """A score mod that sums what is `applied`, with the score for argument `one` and `other` for other numbers."""

    def mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        made = applied([of(a, score if n == one else other, q) for n, a in enumerate(given)])
        parts = made if isinstance(made, tuple) else (made,)
        return sum(part * (1.0 + 0.3 * n) for n, part in enumerate(parts) if part is not None)

    return mod


def is_number(argument: Any) -> bool:
    """Whether an argument is a number that is known when the mod runs."""
    return isinstance(argument, Symbolic) or (isinstance(argument, torch.Tensor) and argument.ndim == 0)


def is_integer(argument: Any) -> bool:
    """Whether such a number is none that has a gradient."""
    return not argument.is_floating_point()


def of(argument: Any, value: Any, index: Any) -> Any:
    """What stands for an argument while the gradient by one of them is compared."""
    if not is_number(argument):
        return argument
    if is_integer(argument):
        return index
    return torch.tensor(value, dtype=torch.float64, device="cpu") if isinstance(value, float) else value
