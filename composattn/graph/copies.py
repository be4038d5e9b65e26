"""Tables that a mod reads in place of a caller's tensor, made of it once: whether it still holds what it held then.

A mask of documents by their offsets reads where each row's document begins. Those are numbers for each row, in memory
of their own, which a write to the offsets leaves as it is. So calls with such a table look at the offsets' writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..errors import CapturedTensorChanged


class _Made(NamedTuple):
    name: str
    sources: tuple[torch.Tensor, ...]
    stamp: list[Any]


made: dict[int, _Made] = {}
"""By the address of a table; where nothing is in it, nobody has to look."""


def copy_of(table: torch.Tensor, name: str, *sources: torch.Tensor) -> torch.Tensor:
    """`table`, which was made of `sources`, now; what they hold is called `name`."""
    address = table.data_ptr()
    made[address] = _Made(name, sources, _stamp(sources))
    weakref.finalize(table.untyped_storage(), made.pop, address, None)
    return table


def _stamp(sources: Iterable[torch.Tensor]) -> list[Any]:
    """Another one after a write to them; nobody counts those of inference mode."""
    return [(t.data_ptr(), None if t.is_inference() else t._version) for t in sources]


def refuse_outdated(leaves: Iterable[Any]) -> None:
    """Raises `CapturedTensorChanged` for a table among `leaves` whose sources were written to since it was made."""
    with torch._C.DisableTorchFunction():  # a mod may be running, whose torch calls are all intercepted
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue  # a run-time number
            try:
                known = made.get(leaf.data_ptr())
            except RuntimeError:  # fake, or below a transform: no memory to know it by
                continue
            if known is not None and _stamp(known.sources) != known.stamp:
                raise CapturedTensorChanged(
                    f"{known.name} of a mask were written to since it was made of them; make the mask again, in the "
                    "step or as an argument of ca.attention"
                )
