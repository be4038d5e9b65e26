"""Operators that others registered with torch: one that has the name of torch's need not have its meaning.

`approx::tanh` may be a hardware's tanh, and is traced as one; `mine::relu` may be anything. So an operator outside of
`aten` goes by its plain name only where it is that function of one number, in value and in its gradient if it has one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import _disable_current_modes

OPERATORS = (OpOverload, OpOverloadPacket)
_NUMBERS = [sign * size for size in (0.01, 0.3, 0.7, 1.0, 1.6, 3.2, 7.5, 40.0) for sign in (1.0, -1.0)]


def name_of(func: Callable[..., Any]) -> str:
    """The name that a function is traced by: its own, or "space::name" of an operator with a meaning of its own."""
    if isinstance(func, OPERATORS) and not _means_what_it_is_called(func):
        return "::".join(str(func).split(".")[:2])
    return func.__name__


name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result sets


@functools.lru_cache(maxsize=512)
def _means_what_it_is_called(operator: Any) -> bool:
    space, name = str(operator).split(".")[:2]
    if space == "aten":
        return True
    plain = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operators that have no gradient registered
            return plain is not None and all(_agree(operator, plain, number) for number in _NUMBERS)
    except (RuntimeError, TypeError, ValueError):  # it does not run on one number
        return False


def _agree(operator: Any, plain: Callable[..., Any], number: float) -> bool:
    x = torch.tensor(number, dtype=torch.float32, device="cpu", requires_grad=True)
    found, wanted = operator(x), plain(x)
    if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3):
        return False
    gradient = _gradient(found, x)
    return gradient is None or torch.allclose(gradient, _gradient(wanted, x), rtol=1e-3, atol=1e-3)


def _gradient(out: torch.Tensor, x: torch.Tensor) -> Any:
    """None where it can't be asked for, as torch raises."""
    if not out.requires_grad:
        return torch.zeros_like(x)
    try:
        return torch.autograd.grad(out, x)[0]
    except RuntimeError:
        return None
