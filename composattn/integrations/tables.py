"""Masks and biases that other libraries pass as whole tensors, read where a mod is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..graph.sizes import surely


def reader(table: torch.Tensor) -> Callable[..., Any]:
    """b, h, q, kv → what a (B or 1, H or 1, Sq or 1, Skv or 1) table says; an axis of size 1 is one for all."""
    several = [not surely(size <= 1) for size in table.shape]

    def at(*place: Any) -> Any:
        return table[tuple(i if many else 0 for i, many in zip(place, several, strict=True))]

    return at
