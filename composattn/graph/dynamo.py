"""Who follows what is run, and where mods begin that Dynamo follows."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

T = TypeVar("T", bound=Callable[..., Any])

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
    compiling = eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        eval_frame.set_eval_frame(compiling)


def left_alone(function: T) -> T:
    """`function`, which Dynamo compiles neither by itself nor in what it calls, though it does so behind a break.

    There it compiles each function that runs, gradients too. It would follow a rewriting of graphs and guard all that
    is known of them (10 s of a vmap where 600 plans are kept, 3.6 where one is; left alone it takes 1.4), keep what a
    transform had wrapped after that has ended, and ask twice for tensors that a checkpoint gives once. A call takes no
    longer. Who follows a function that calls it does follow it.
    """
    alone = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, alone)
    return function


HANDED_OVER: set[types.CodeType] = set()
"""Code of functions that are on traced values, which Dynamo does not follow in a mod, beside those of `proxies`."""


def read(fn: Callable[..., Any], trace: Callable[..., Any]) -> tuple[str, tuple[Any, ...]]:
    """(form, leaves) of a mod in a compiled region, by `trace`: `followed.read`, which Dynamo calls instead."""
    raise AssertionError("only what Dynamo follows is read here")
