"""The tensors that mods read, as one call has them: its own inputs, and what is derived from them, up to date."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .graph.derived import Derived, refresh
from .graph.expr import Capture


def values(captures: Iterable[Capture], given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What is to be read for `captures`, up to date; `given` are tensors for those that are not derived, in order.

    Where other memory is given than the captures hold (compiled code copies its inputs at times), what is derived
    from it is computed anew.
    """
    captures, taken = tuple(captures), iter(given)
    refresh(captures)
    replaced = {c: next(taken) for c in captures if not isinstance(c, Derived)}
    return [_value(c, replaced) for c in captures]


def _value(capture: Capture, replaced: dict[Capture, torch.Tensor]) -> torch.Tensor:
    if not isinstance(capture, Derived):
        return replaced.get(capture, capture.tensor)
    sources = [_value(s, replaced) for s in capture.sources]
    if all(_same_memory(now, s.tensor) for now, s in zip(sources, capture.sources, strict=True)):
        return capture.tensor
    with torch.no_grad():
        return capture.recipe(*sources).contiguous()


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())
