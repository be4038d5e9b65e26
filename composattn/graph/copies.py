"""Tables that a mod reads in place of a caller's tensor, made of it once: whether it still holds what it held then.

A mask of documents by their offsets reads where each row's document begins. Those are numbers for each row, in memory
of their own, which a write to the offsets leaves as it is. So calls with such a table look at the offsets' writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..errors import CapturedTensorChanged


class Sources:
    """The tensors that a table was made of, called `name`. A copy's are copies, as current as these are."""

    __slots__ = ("_stamp", "name", "tensors")

    def __init__(self, name: str, tensors: tuple[torch.Tensor, ...], are_current: bool = True) -> None:
        self.name, self.tensors = name, tensors
        self._stamp = self._now() if are_current else None

    def _now(self) -> list[Any]:
        """Another one after a write to them; nobody counts those of inference mode."""
        return [(t.data_ptr(), None if t.is_inference() else t._version) for t in self.tensors]

    def __getstate__(self) -> tuple[str, tuple[torch.Tensor, ...], bool]:
        return self.name, self.tensors, self._now() == self._stamp

    def __setstate__(self, state: tuple[str, tuple[torch.Tensor, ...], bool]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def refuse_outdated(self) -> None:
        """Raises `CapturedTensorChanged` where they were written to since the table was made."""
        if self._now() != self._stamp:
            raise CapturedTensorChanged(
                f"{self.name} of a mask were written to since it was made of them; make the mask again, in the "
                "step or as an argument of ca.attention"
            )


made: dict[int, Sources] = {}
"""By the address of a table; where nothing is in it, nobody has to look."""


def copy_of(table: torch.Tensor, name: str, *sources: torch.Tensor) -> torch.Tensor:
    """`table`, which was made of `sources`, now; what they hold is called `name`."""
    _follow(table, Sources(name, sources))
    return table


def _follow(table: torch.Tensor, sources: Sources) -> None:
    address = table.data_ptr()
    made[address] = sources
    weakref.finalize(table.untyped_storage(), made.pop, address, None)


def sources_of(leaves: Sequence[Any]) -> dict[int, Sources]:
    """What those of `leaves` were made of that are such tables, by their places: for a copy, which keeps looking."""
    if not made:
        return {}
    found = {place: _known(leaf) for place, leaf in enumerate(leaves)}
    return {place: sources for place, sources in found.items() if sources is not None}


def follow(leaves: Sequence[Any], sources: Mapping[int, Sources]) -> None:
    """From now on the tables among `leaves` are looked at as tables made of `sources`, by their places."""
    for place, of_table in sources.items():
        if _known(leaves[place]) is not of_table:
            _follow(leaves[place], of_table)


def _known(leaf: Any) -> Sources | None:
    if not isinstance(leaf, torch.Tensor):
        return None  # a run-time number
    try:
        return made.get(leaf.data_ptr())
    except RuntimeError:  # fake, or below a transform: no memory to know it by
        return None


def refuse_outdated(leaves: Iterable[Any]) -> None:
    """Raises `CapturedTensorChanged` for a table among `leaves` whose sources were written to since it was made."""
    with torch._C.DisableTorchFunction():  # a mod may be running, whose torch calls are all intercepted
        for leaf in leaves:
            known = _known(leaf)
            if known is not None:
                known.refuse_outdated()
