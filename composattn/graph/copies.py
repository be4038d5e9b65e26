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
from .buffers import Place, held_at


class Sources:
    """The tensors that a table was made of, called `name`. A copy's are copies, as current as these are.

    `places`: where a module holds them; what stands there later is looked at in their place.
    """

    __slots__ = ("_stamp", "name", "places", "tensors")

    def __init__(
        self,
        name: str,
        tensors: tuple[torch.Tensor, ...],
        are_current: bool = True,
        places: tuple[Place | None, ...] | None = None,
    ) -> None:
        self.name, self.tensors = name, tensors
        self.places = (None,) * len(tensors) if places is None else places
        self._stamp: list[Any] | None = _stamp(tensors) if are_current else None

    def _are_current(self) -> bool:
        if _stamp(self.tensors) != self._stamp:
            self._stamp = None  # for good: a third memory may lie where the first one did
            return False
        held = list(map(held_at, self.places, self.tensors))
        if all(h is t for h, t in zip(held, self.tensors, strict=True)):
            return True
        found = tuple([t for t in held if t is not None])
        if len(found) < len(held) or not all(map(_hold_the_same, found, self.tensors)):
            return False
        self.tensors, self._stamp = found, _stamp(found)  # their module has moved, and nobody wrote to them since
        return True

    def __getstate__(self) -> tuple[str, tuple[torch.Tensor, ...], bool, tuple[Place | None, ...]]:
        return self.name, self.tensors, self._are_current(), self.places

    def __setstate__(self, state: tuple[str, tuple[torch.Tensor, ...], bool, tuple[Place | None, ...]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def refuse_outdated(self) -> None:
        """Raises `CapturedTensorChanged` where they were written to since the table was made."""
        if not self._are_current():
            raise CapturedTensorChanged(
                f"{self.name} of a mask were written to since it was made of them; make the mask again, in the "
                "step or as an argument of ca.attention"
            )


def _stamp(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Another one after a write to them; nobody counts those of inference mode. Memory may become shared meanwhile."""
    with torch._C.DisableTorchFunction():  # it may be asked while a mod that reads them is traced
        return [
            (t.untyped_storage()._cdata, t.storage_offset(), None if t.is_inference() else t._version) for t in tensors
        ]


def _hold_the_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, on any devices, do; none do on meta, where there are no numbers."""
    return not (a.is_meta or b.is_meta) and torch.equal(a.cpu(), b.cpu())


made: dict[int, Sources] = {}
"""By a table's storage, which may move in memory; where nothing is in it, nobody has to look."""


def copy_of(table: torch.Tensor, name: str, *sources: torch.Tensor) -> torch.Tensor:
    """`table`, which was made of `sources`, now; what they hold is called `name`."""
    _follow(table, Sources(name, sources))
    return table


def _follow(table: torch.Tensor, sources: Sources) -> None:
    storage = table.untyped_storage()
    made[storage._cdata] = sources
    weakref.finalize(storage, made.pop, storage._cdata, None)


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
    return next((sources for _, sources in made_among([leaf])), None)


def refuse_outdated(leaves: Iterable[Any]) -> None:
    """Raises `CapturedTensorChanged` for a table among `leaves` whose sources were written to since it was made."""
    for _, sources in made_among(leaves):
        sources.refuse_outdated()


def made_among(leaves: Iterable[Any]) -> list[tuple[torch.Tensor, Sources]]:
    """The tables among `leaves` that were made of other tensors, and what each was made of.

    While any table lives, every call that reads tensors asks this: it enters no function of Python.
    """
    found = []
    with torch._C.DisableTorchFunction():  # a mod may be running, whose torch calls are all intercepted
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                continue  # a run-time number
            try:
                sources = made.get(leaf.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):
                continue  # below a transform: no memory to know it by
            if sources is not None:
                found.append((leaf, sources))
    return found
