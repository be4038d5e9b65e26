"""Memory in the order of dimensions of another tensor: an output lies as q does, a gradient as what it belongs to.

So `out.transpose(1, 2).reshape(B, S, -1)` of a (B, S, H, D) caller copies nothing, as after torch's own attention. The
last dimension is always innermost.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..graph.sizes import surely


def ordered(t: torch.Tensor, width: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Uninitialised memory (*t.shape[:-1], width), its other dimensions in the order of t's strides; by default in t's
    dtype.
    """
    order = _order(t)
    if order is None:
        return t.new_empty((*t.shape[:-1], width), dtype=dtype)
    return t.new_empty_strided((*t.shape[:-1], width), _strides(t.shape, width, order), dtype=dtype)


def strides_of_ordered(t: torch.Tensor, width: int) -> tuple[int, ...]:
    """The strides of what `ordered` gives; of sizes that are numbers."""
    return _ordered(t.shape, t.stride(), t.is_contiguous(), width)


@functools.lru_cache(maxsize=512)
def _ordered(shape: torch.Size, strides: tuple[int, ...], contiguous: bool, width: int) -> tuple[int, ...]:
    order = None if contiguous else _order_of(strides[:-1])
    return tuple(_strides(shape, width, list(range(len(shape) - 1)) if order is None else order))


def _strides(shape: torch.Size, width: Any, order: list[int]) -> list[Any]:
    strides, step = [1] * len(shape), width
    for d in reversed(order):
        strides[d] = step
        step = step * shape[d]
    return strides


def in_order_of(form: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """`t`, or a copy of it, with its dimensions but the last in the order of those of `form`; differentiable."""
    order = _order(form)
    if order is None:
        return t.contiguous()
    back = sorted(range(len(order)), key=order.__getitem__)
    return t.permute(*order, -1).contiguous().permute(*back, -1)


def _order(t: torch.Tensor) -> list[int] | None:
    """Dimensions but the last, outermost first, where that is not their own order.

    A tensor that repeats one row in many places (stride 0) has no order but theirs.
    """
    if t._has_symbolic_sizes_strides:
        return _symbolic_order(t)
    if t.is_contiguous():
        return None
    return _order_of(t.stride()[:-1])


def _order_of(strides: tuple[int, ...]) -> list[int] | None:
    own = list(range(len(strides)))
    order = sorted(own, key=strides.__getitem__, reverse=True)  # of equal ones the first stays first
    return None if order == own or 0 in strides else order


def _symbolic_order(t: torch.Tensor) -> list[int] | None:
    """`_order` where sizes may be symbolic. Dimensions of one row may lie anywhere, so no size has to be known."""
    from torch._prims_common import is_contiguous_or_false

    strides = t.stride()[:-1]
    if is_contiguous_or_false(t) or any(surely(stride == 0) for stride in strides):
        return None
    own = list(range(len(strides)))

    def outer_first(a: int, b: int) -> int:
        return _outer(strides[b], strides[a]) - _outer(strides[a], strides[b])

    order = sorted(own, key=functools.cmp_to_key(outer_first))
    return None if order == own else order


def _outer(a: Any, b: Any) -> bool:
    """Whether `a` is the stride of the outer of two dimensions, where rows lie apart: then it is a multiple."""
    return surely(a > b) or (surely(a % b == 0) and not surely(b % a == 0))
