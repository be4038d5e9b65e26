"""Tensors that the analysis derives from captured tensors: range minima of per-row values, where columns match a row.

A `Derived` is a capture like any other to whoever reads it, computed by a few torch operations on the captured
tensor's device, with no host synchronisation and O(S log S) work. It is computed when it is made, and again, into the
same storage, by `refresh` when a tensor it comes from was written to (torch's version counter says so). Whoever runs a
kernel calls `refresh` on its captures before: a few attribute reads where nothing changed. A tensor made in inference
mode has no counter and is recomputed at every call.

A call that a CUDA graph records derives all of it anew (`Anew`): those operations are a part of the graph, so a replay
sees what tensors hold then, and their memory is the graph's. Nothing that is kept is read or written there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ..graph.borrowed import BorrowedCapture, FormCapture
from ..graph.expr import Capture
from ..graph.foreign import is_fake, mode_of
from . import refreshed, replayed
from .refreshed import Refreshed, Rewriting, distrusted, version
from .rerun import Rerun
from .streams import has_streams, stream_handle

Recipe = Callable[..., torch.Tensor]
Kind = TypeVar("Kind", bound="Derived")
_NOTHING: AbstractContextManager[None] = nullcontext()


class Derived(Capture):
    """A tensor computed from captured ones.

    `kept` stays the same object for as long as this lives; it has no memory before it is needed between calls.
    """

    __slots__ = ("__weakref__", "_kept", "_made", "_run", "recipe", "sources")

    def __init__(self, recipe: Recipe, sources: tuple[Capture, ...]) -> None:
        self.recipe, self.sources = recipe, sources
        self._run = Rerun(lambda inputs: [recipe(*inputs).contiguous()])
        stamp: tuple[Hashable, ...] | None = None
        # a mod that a compiled region reads calls another
        if any(is_fake(s.kept if isinstance(s, Derived) else s.tensor) for s in sources):
            self._kept = self._faked()
        elif refreshed.belongs_to_graph():
            self._kept = self._formed()
        else:
            _brought_up_to_date(sources)
            stamp = self._stamp()
            self._kept = self._compute()
        self._made = Refreshed(self._kept, stamp, self._kept.device)

    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """What is to be read now: of a call that derives anew its own, of others the one that is kept."""
        anew = _anew.get()
        return self._kept if anew is None else anew.of(self)

    @property
    def kept(self) -> torch.Tensor:
        return self._kept

    @property
    def identity(self) -> int:
        return id(self)

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
            return self._run([s.tensor for s in self.sources], for_now=1)[0]  # what follows the first is copied

    def _formed(self) -> torch.Tensor:
        """A tensor of its form with no memory, made where all memory is a graph's."""
        with derived_anew(), plain_tensors():
            found = torch.empty_like(self.tensor)
        found.untyped_storage().resize_(0)
        return found

    def _faked(self) -> torch.Tensor:
        """A fake tensor of its form."""
        tensors = [source.tensor for source in self.sources]
        with mode_of(tensors), plain_tensors():
            return self.recipe(*tensors).contiguous()

    def _computed_again(self) -> torch.Tensor:
        made = self._compute()
        return made if made is self._kept else self._with_memory().copy_(made)

    def _with_memory(self) -> torch.Tensor:
        """What is kept, from now on with memory."""
        kept = self._kept
        # a table that vmap wraps has memory from the start, and a storage that torch does not give
        if not is_functorch_wrapped_tensor(kept) and not kept.untyped_storage().nbytes():
            kept.untyped_storage().resize_(kept.numel() * kept.element_size())
        return kept

    def is_up_to_date(self) -> bool:
        """Whether what it comes from was not written to since; that may be out of date itself."""
        return self._made.stands(self._stamp())

    def refresh(self) -> None:
        """Bring the tensor up to date with what it comes from; costs nothing where that has not changed."""
        refresh([self])

    def bring_up_to_date(self) -> None:
        """Makes the value again if its sources changed, where no CUDA graph records."""
        _brought_up_to_date(self.sources)
        self._made(self._stamp(), self._computed_again)

    def __repr__(self) -> str:
        return f"Derived({getattr(self.recipe, '__name__', 'recipe')}, {list(self._kept.shape)})"


def plain_tensors() -> AbstractContextManager[None]:
    """Inside, tensors are made that can be written to anywhere: not so an inference tensor outside of its mode."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _plain_tensors()
    return _NOTHING


@contextmanager
def _plain_tensors() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


class Anew:
    """What one call derives for itself, each once, by operations of the call: whoever replays it derives it again.

    given: tensors that are read in place of captured ones.
    """

    __slots__ = ("given", "made")

    def __init__(self, given: Mapping[Capture, torch.Tensor]) -> None:
        self.given = {c: t for c, t in given.items() if not isinstance(c, Derived)}
        self.made: dict[Derived, torch.Tensor] = {}

    def of(self, derived: Derived) -> torch.Tensor:
        """The tensor of this call."""
        found = self.made.get(derived)
        if found is None:
            sources = [self._source(s) for s in derived.sources]
            with plain_tensors():
                found = self.made[derived] = derived.recipe(*sources).contiguous()
        return found

    def _source(self, source: Capture) -> torch.Tensor:
        if isinstance(source, Derived):
            return self.of(source)
        found = self.given.get(source)
        return source.tensor if found is None else found


_anew: ContextVar[Anew | None] = ContextVar("anew", default=None)


def derives_anew() -> bool:
    """Whether this is inside of a call that derives all for itself."""
    return _anew.get() is not None


@contextmanager
def derived_anew(captures: Iterable[Capture] = (), given: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Inside, all that is derived is derived for the call that this is, from what is `given` for these captures."""
    token = _anew.set(Anew(dict(zip(captures, given, strict=True))))
    try:
        yield
    finally:
        _anew.reset(token)


def derived_for_graph(
    captures: Iterable[Capture] = (), given: Iterable[torch.Tensor] = ()
) -> AbstractContextManager[None]:
    """`derived_anew` where a CUDA graph records the call, unless that is so already; elsewhere nobody asks again."""
    if derives_anew():
        return _NOTHING
    if refreshed.has_looked():
        return _NOTHING
    return derived_anew(captures, given) if refreshed.belongs_to_graph() else refreshed.LookedOnce()


def refresh(captures: Iterable[Capture]) -> None:
    """Bring every derived tensor among `captures` up to date; to be called before each launch.

    Nothing that is kept is up to date at a replay: a call that a graph records derives anew what it reads.
    """
    derived = [c for c in captures if isinstance(c, Derived)]
    if derived and not (derives_anew() or refreshed.belongs_to_graph()):
        _brought_up_to_date(derived)


def _brought_up_to_date(captures: Iterable[Capture]) -> None:
    for capture in captures:
        if isinstance(capture, Derived):
            capture.bring_up_to_date()


class Upkeep:
    """Brings the derived tensors among `captures` up to date; where nothing was written to it only reads versions."""

    def __init__(self, captures: Iterable[Capture]) -> None:
        self.derived = [c for c in captures if isinstance(c, Derived)]
        self.written = list(dict.fromkeys(c for c in sources_behind(self.derived) if not isinstance(c, Derived)))
        self._refresh = RefreshedTogether(self.derived)
        on = self.derived[0].kept.device if self.derived else None
        self._streams_on = on if on is not None and has_streams(on) else None
        self._refreshed: dict[int | None, Refreshed[None]] = {None: Refreshed(None)}  # by stream: each waits for itself

    def __call__(self) -> None:
        """To be called before each launch, where there are `derived` ones."""
        stream = None if self._streams_on is None else stream_handle(self._streams_on)
        if stream not in self._refreshed:
            self._refreshed[stream] = Refreshed(None)
        self._refreshed[stream](stamps(self.written), self._refresh)


class RefreshedTogether:
    """`refresh` of several derived tensors: where a device replays graphs, one launch for all that is out of date."""

    def __init__(self, derived: Sequence[Derived]) -> None:
        self.derived = derived
        # each after what it comes from
        found = [*reversed([*sources_behind(derived)]), *derived]
        self._order = list(dict.fromkeys(c for c in found if isinstance(c, Derived)))
        self._replays = bool(derived) and derived[0].kept.device.type in replayed.GRAPHS
        self._runs: dict[tuple[Derived, ...], _Together] = {}

    def __call__(self) -> None:
        if not self._replays or derives_anew() or refreshed.belongs_to_graph():
            refresh(self.derived)
            return
        out_of_date: dict[Derived, None] = {}
        for d in self._order:
            if not out_of_date.keys().isdisjoint(d.sources) or not d.is_up_to_date():
                out_of_date[d] = None
        old = tuple(out_of_date)
        if old:
            run = self._runs.get(old)
            if run is None:
                run = self._runs[old] = _Together(old)
            if not run():
                refresh(self.derived)


class _Together:
    """Derived tensors that are out of date together, made by one run that writes where each is kept."""

    def __init__(self, parts: Sequence[Derived]) -> None:
        self.parts = parts
        sources = dict.fromkeys(s for d in parts for s in d.sources if s not in parts)
        self.sources = sorted(sources, key=lambda s: isinstance(s, Derived))  # those last, which stay where they are
        moving = sum(not isinstance(s, Derived) for s in self.sources)
        self._standing = range(moving, len(self.sources) + len(parts))
        self._kept, self._rewriting = [d._with_memory() for d in parts], Rewriting([d._made for d in parts])
        self._run = Rerun(self._compute)

    def __call__(self) -> bool:
        """Whether it made them: not so where a run can't be recorded."""
        if not self._run.follows:
            return False
        tensors = [s.tensor for s in self.sources]
        if True in map(is_functorch_wrapped_tensor, tensors):
            return False
        now = dict(zip(self.sources, stamps(self.sources), strict=True))
        with plain_tensors(), self._rewriting as values:
            self._run((*tensors, *self._kept), standing=self._standing)
            values.done(lambda n: tuple([now[s] if s in now else stamp(s) for s in self.parts[n].sources]))
        return True

    def _compute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = dict(zip((*self.sources, *self.parts), tensors, strict=True))
        return [found[d].copy_(d.recipe(*[found[s] for s in d.sources])) for d in self.parts]


def sources_behind(captures: Iterable[Capture]) -> Iterator[Capture]:
    """What derived tensors come from, and what that comes from."""
    for source in (s for c in captures if isinstance(c, Derived) for s in c.sources):
        yield source
        yield from sources_behind([source])


def value_of(capture: Capture, replaced: Mapping[Capture, torch.Tensor]) -> torch.Tensor:
    """What is to be read for `capture` where other tensors stand in for captured ones.

    Where their memory is another than the captures hold (compiled code copies its inputs at times), what is derived
    from it is computed anew.
    """
    if capture in replaced:
        return replaced[capture]
    if not isinstance(capture, Derived) or derives_anew():
        return capture.tensor
    sources = [value_of(s, replaced) for s in capture.sources]
    if all(same_memory(now, s.tensor) for now, s in zip(sources, capture.sources, strict=True)):
        return capture.tensor
    with torch.no_grad():
        return capture.recipe(*sources).contiguous()


def values(captures: Iterable[Capture], replaced: Mapping[Capture, torch.Tensor]) -> list[torch.Tensor]:
    """What is to be read for `captures`, up to date; `replaced` are tensors in place of captured ones."""
    captures = tuple(captures)
    refresh(captures)
    return [value_of(c, replaced) for c in captures]


def same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both are of one form and of the same memory."""
    if x is y:
        return True
    # a view that torch negates as it is read is another tensor
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride() and x.is_neg() == y.is_neg()


def stamp(source: Capture) -> Hashable:
    """Changes when what `source` stands for was written to, or it stands for another; None where nobody says so."""
    if isinstance(source, Derived):
        return source._made.version
    if not isinstance(source, BorrowedCapture):
        return version(source.tensor)
    since = distrusted()
    if source.unwritten is not None and since is None:  # found out when it was borrowed
        return source.unwritten
    if isinstance(source, FormCapture) and source.stamped is not None and source.stamped[0] is since:
        return source.stamped[1]
    now = version(source.tensor)
    found = None if now is None else (now, source.epoch)
    if isinstance(source, FormCapture):
        source.stamped = since, found
    return found


def stamps(sources: Iterable[Capture]) -> list[Hashable]:
    """`stamp` of each."""
    found: list[Hashable] = []
    for source in sources:
        known = source.unwritten if source.__class__ is BorrowedCapture else None  # type: ignore[attr-defined]
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
