"""Who follows what is run, and where mods begin that Dynamo follows."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

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


@contextlib.contextmanager
def unfollowed() -> Iterator[None]:
    """Inside, Dynamo compiles none of the functions that are called, as it does behind a break of a graph.

    Of a mod on traced values they hold nothing that it could compile, and that of torch 2.11 takes them for tensors.
    """
    compiling = torch._C._dynamo.eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(compiling)


HANDED_OVER: set[types.CodeType] = set()
"""Code of functions that are on traced values, which Dynamo does not follow in a mod, beside those of `proxies`."""


def read(fn: Callable[..., Any], trace: Callable[..., Any]) -> tuple[str, tuple[Any, ...]]:
    """(form, leaves) of a mod in a compiled region, by `trace`: `followed.read`, which Dynamo calls instead."""
    raise AssertionError("only what Dynamo follows is read here")
