"""Where modules hold a tensor as a buffer, told by those that are being made, moved or loaded when somebody asks.

`Module.to` puts another tensor into each module that holds one: what two of them shared they share no more. A write to
a module's buffer then is a write to what stands in its place, so whoever captured the buffer has to know that place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch

Place = tuple[dict[str, torch.Tensor | None], str]  # the buffers of a module, and the name there


def place_of(tensor: torch.Tensor, counts: Callable[[torch.nn.Module, str], bool]) -> Place | None:
    """Where one of these or of their parts holds `tensor`, if it `counts` by that name; None where none does."""
    seen: set[torch.nn.Module] = set()
    for root in _in_hand():
        for _, module in root.named_modules(seen):
            buffers = module.__dict__.get("_buffers")
            for name, buffer in buffers.items() if isinstance(buffers, dict) else ():
                if buffer is tensor and counts(module, name):
                    return buffers, name
    return None


_AT_WORK = "__init__", "_apply", "load_state_dict"


def _in_hand() -> Iterator[torch.nn.Module]:
    """Modules that are being made, moved or loaded in the frames below.

    Of other frames nothing is read: until Python 3.12 one that was asked for its locals keeps them until it ends.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _AT_WORK:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and "_modules" in module.__dict__:  # not before its __init__
                yield module
        frame = frame.f_back  # type: ignore[assignment]


def held_at(place: Place | None, otherwise: torch.Tensor | None) -> torch.Tensor | None:
    """What a module holds there now, None where it holds nothing."""
    return otherwise if place is None else place[0].get(place[1])
