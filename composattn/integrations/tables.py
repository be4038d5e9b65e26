"""Masks, biases and score mods as other libraries pass them, as one mod of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..graph.sizes import surely


def reader(table: torch.Tensor) -> Callable[..., Any]:
    """b, h, q, kv → what a (B or 1, H or 1, Sq or 1, Skv or 1) table says; an axis of size 1 is one for all."""
    several = [not surely(size <= 1) for size in table.shape]

    def at(*place: Any) -> Any:
        return table[tuple(i if many else 0 for i, many in zip(place, several, strict=True))]

    return at


def joined(join: Callable[[Any, Any], Any], mods: Iterable[Any]) -> Any:
    """Those of `mods` that are there, by an operator of masks or score mods; None where none is."""
    there = [mod for mod in mods if mod is not None]
    return functools.reduce(join, there) if there else None
