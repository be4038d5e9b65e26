"""Tensors that the analysis derives from captured tensors: range minima of per-row values, where columns match a row.

A `Derived` is a capture like any other to whoever reads it, computed by a few torch operations on the captured
tensor's device, with no host synchronisation and O(S log S) work. It is computed when it is made, and again, into the
same storage, by `refresh` when a tensor it comes from was written to (torch's version counter says so). Whoever runs a
kernel calls `refresh` on its captures before: a few attribute reads where nothing changed. A tensor made in inference
mode has no counter and is recomputed at every call. Inside a captured CUDA graph nothing is recomputed at replay unless
the tensor was written to between the last call and the capture: capture a call that follows the write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..graph.expr import Capture
from ..graph.lent import Lent
from .refreshed import Refreshed, distrusted, version
from .rerun import Rerun
from .streams import has_streams, stream_handle

Recipe = Callable[..., torch.Tensor]
Kind = TypeVar("Kind", bound="Derived")


class Derived(Capture):
    """A tensor computed from captured ones; `tensor` stays the same object for as long as this lives."""

    __slots__ = ("__weakref__", "_made", "_run", "recipe", "sources")

    def __init__(self, recipe: Recipe, sources: tuple[Capture, ...]) -> None:
        self.recipe, self.sources = recipe, sources
        self._run = Rerun(lambda inputs: [recipe(*inputs).contiguous()])
        stamp = self._stamp()
        super().__init__(self._compute())
        self._made = Refreshed(self.tensor, stamp, self.tensor.device)

    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]

    @property
    def says_visible(self) -> bool:
        """Whether it says of blocks of a mask what is visible there, as looking at each pair found."""
        return False

    @property
    def version(self) -> int:
        """How often it was computed again."""
        return self._made.version

    def _stamp(self) -> tuple[Hashable, ...]:
        return tuple(stamps(self.sources))

    def _compute(self) -> torch.Tensor:
        with plain_tensors():
            return self._run([s.tensor for s in self.sources])[0]

    def _computed_again(self) -> torch.Tensor:
        made = self._compute()
        return made if made is self.tensor else self.tensor.copy_(made)

    def refresh(self) -> None:
        """Bring the tensor up to date with what it comes from; costs nothing where that has not changed."""
        refresh(self.sources)
        self._made(self._stamp(), self._computed_again)

    def __repr__(self) -> str:
        return f"Derived({getattr(self.recipe, '__name__', 'recipe')}, {list(self.tensor.shape)})"


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Inside, tensors are made that can be written to anywhere: not so an inference tensor outside of its mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def refresh(captures: Iterable[Capture]) -> None:
    """Bring every derived tensor among `captures` up to date; to be called before each launch."""
    for capture in captures:
        if isinstance(capture, Derived):
            capture.refresh()


class Upkeep:
    """Brings the derived tensors among `captures` up to date; where nothing was written to it only reads versions."""

    def __init__(self, captures: Iterable[Capture]) -> None:
        self.derived = [c for c in captures if isinstance(c, Derived)]
        self.written = list(dict.fromkeys(c for c in behind(self.derived) if not isinstance(c, Derived)))
        on = self.derived[0].tensor.device if self.derived else None
        self._streams_on = on if on is not None and has_streams(on) else None
        self._refreshed: dict[int | None, Refreshed[None]] = {None: Refreshed(None)}  # by stream: each waits for itself

    def __call__(self) -> None:
        """To be called before each launch, where there are `derived` ones."""
        stream = None if self._streams_on is None else stream_handle(self._streams_on)
        if stream not in self._refreshed:
            self._refreshed[stream] = Refreshed(None)
        self._refreshed[stream](stamps(self.written), refresh, (), self.derived)


def behind(captures: Iterable[Capture]) -> Iterator[Capture]:
    """What derived tensors come from, and what that comes from."""
    for source in (s for c in captures if isinstance(c, Derived) for s in c.sources):
        yield source
        yield from behind([source])


def value_of(capture: Capture, replaced: Mapping[Capture, torch.Tensor]) -> torch.Tensor:
    """What is to be read for `capture` where other tensors stand in for captured ones.

    Where their memory is another than the captures hold (compiled code copies its inputs at times), what is derived
    from it is computed anew.
    """
    if capture in replaced or not isinstance(capture, Derived):
        return replaced.get(capture, capture.tensor)
    sources = [value_of(s, replaced) for s in capture.sources]
    if all(_same_memory(now, s.tensor) for now, s in zip(sources, capture.sources, strict=True)):
        return capture.tensor
    with torch.no_grad():
        return capture.recipe(*sources).contiguous()


def _same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())


def stamp(source: Capture) -> Hashable:
    """Changes when what `source` stands for was written to, or it stands for another; None where nobody says so."""
    if isinstance(source, Derived):
        return source._made.version
    if not isinstance(source, Lent):
        return version(source.tensor)
    if source.unwritten is not None and distrusted() is None:  # found out when it was lent
        return source.unwritten
    now = version(source.tensor)
    return None if now is None else (now, source.epoch)


def stamps(sources: Iterable[Capture]) -> list[Hashable]:
    """`stamp` of each."""
    found: list[Hashable] = []
    for source in sources:
        known = source.unwritten if source.__class__ is Lent else None  # type: ignore[attr-defined]
        found.append(known if known is not None and distrusted() is None else stamp(source))
    return found


_made: weakref.WeakValueDictionary[Any, Derived] = weakref.WeakValueDictionary()


def derive(name: Hashable, recipe: Recipe, *sources: Capture, kind: type[Kind] = Derived) -> Kind:  # type: ignore[assignment]
    """The one `Derived` of this name and these sources."""
    key = (name, *(s.identity for s in sources))
    found = _made.get(key)  # it keeps its sources alive, so an id in the key can't have been taken over
    if found is None:
        found = _made[key] = kind(recipe, sources)
    return found  # type: ignore[return-value]


def countable(x: torch.Tensor) -> torch.Tensor:
    """`x` of a type that torch orders: a number where it is a bool, wider where it has no sign."""
    if x.dtype is torch.bool or x.dtype is torch.uint16:
        return x.to(torch.int32)
    return x.to(torch.int64) if x.dtype is torch.uint32 else x
