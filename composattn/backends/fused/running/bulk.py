"""Which tensors bulk copies can read: a contiguous last dimension, address and other strides of whole 16 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from ....errors import UnsupportedLayout
from ....graph.foreign import is_computed


def tidy(t: torch.Tensor) -> torch.Tensor | None:
    """`t`, with harmless strides where sizes are 1, whose own may be anything; None where copies can't read it."""
    strides: Sequence[int] = t.stride()
    # address and strides together, as a number is a multiple of 16 by its last bits
    if strides[-1] == 1 and 0 not in strides and not (gcd(*strides[:-1]) * t.element_size() | t.data_ptr()) % 16:
        return t
    unit = 16 // t.element_size()
    *strides, last = strides
    strides = [unit if size == 1 else s for size, s in zip(t.shape, strides, strict=False)]
    if t.data_ptr() % 16 or (last != 1 and t.shape[-1] != 1) or any(s % unit for s in strides):
        return None
    return t.as_strided(t.shape, (*strides, 1))


def readable(t: torch.Tensor, name: str) -> torch.Tensor:
    """`t`, tidy.

    Raises `UnsupportedLayout`.
    """
    found = tidy(t)
    if is_computed(t):
        raise UnsupportedLayout(
            f"the class {type(t).__name__} computes what {name} holds, and a copy of it is one too; pass a plain tensor"
        )
    if found is None:
        raise UnsupportedLayout(
            f"{name} has strides {t.stride()} and starts at {t.data_ptr() % 16} bytes past a multiple of 16; bulk "
            f"copies need a last dimension that is contiguous, and data and other strides in whole 16 bytes "
            f"({16 // t.element_size()} elements): pass {name}.contiguous()"
        )
    return found


def copyable(t: torch.Tensor) -> torch.Tensor:
    """`t`, tidy, or a copy: gradients arrive in any form (`out.sum().backward()` expands one number)."""
    found = tidy(t)
    if found is t:
        return t
    if found is None or 0 in found.stride():
        return t.clone(memory_format=torch.contiguous_format)
    return found
