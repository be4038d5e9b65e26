"""A mask as a dense tensor, to look at before trusting it; and the sizes and devices that looking takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import errors
from ..graph.evaluate import Env, evaluate
from ..graph.expr import Capture, Dep, Expr, captures
from ..graph.linear import MOST
from .derived import refresh


def check_sizes(least: int, **sizes: Any) -> None:
    """Raises `InvalidArgument` unless all are ints of at least `least`, and none is more than the analysis follows."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise errors.InvalidArgument(f"{name} must be an int of at least {least}, got {value!r}")
        if value > MOST.get(name, value):
            raise errors.InvalidArgument(f"{name} is {value}; masks are analysed up to {MOST[name]}")


def device_of(device: torch.device | str | None, held: Sequence[Capture]) -> torch.device:
    """`device`, by default that of the captured tensors. Raises `InvalidArgument` for one that is not there."""
    if device is None:
        return held[0].tensor.device if held else torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:  # unknown, or torch was built without it
        raise errors.InvalidArgument(f"device is {device!r}: {str(error).partition(chr(10))[0]}") from None


def dense(
    expr: Expr,
    q_len: int,
    kv_len: int,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The mask itself, bool (B|1, H|1, q_len, kv_len); a dimension it does not depend on is 1.

    `device` defaults to that of the captured tensors. S² bytes per (b, h): for looking and testing, not for computing.
    """
    check_sizes(0, q_len=q_len, kv_len=kv_len)
    check_sizes(1, batch=batch, heads=heads)
    held = captures(expr)
    refresh(held)
    device = device_of(device, held)
    b = batch if expr.deps & Dep.B else 1
    h = heads if expr.deps & Dep.H else 1

    def axis(n: int, *shape: int) -> torch.Tensor:
        return torch.arange(n, device=device).view(shape)

    index: dict[str, torch.Tensor | int] = {
        "b": axis(b, -1, 1, 1, 1),
        "h": axis(h, 1, -1, 1, 1),
        "q": axis(q_len, 1, 1, -1, 1),
        "kv": axis(kv_len, 1, 1, 1, -1),
        "q_len": torch.tensor(q_len, device=device),
        "kv_len": torch.tensor(kv_len, device=device),
    }
    env = Env(index, device=device, float_dtype=torch.float32)
    try:
        return evaluate(expr, env).expand(b, h, q_len, kv_len)
    except (MemoryError, RuntimeError) as error:  # CPU and CUDA allocators say it in words of their own
        if "memory" not in str(error).lower():
            raise
        gigabytes = b * h * q_len * kv_len / 2**30
        raise errors.InvalidArgument(
            f"a dense mask of {b} x {h} x {q_len} x {kv_len} takes {gigabytes:.3g} GiB and as much again while it is "
            "made, more than there is; look at .tiles(...), which needs memory per tile, not per pair"
        ) from None
