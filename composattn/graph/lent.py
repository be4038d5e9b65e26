"""Captured tensors that a kept plan has during calls only: lent by who calls, held by nobody in between.

A plan that outlives a call of `ca.attention` must not keep the user's tensors alive. Its graphs read `Lent` captures;
a `Lending` puts the tensors in their place for a call, and again for its backward. Which tensors a capture stands for
is told by their memory: the storage (watched by a weak reference, tensors themselves take none without getting in the
way of `torch.utils.swap_tensors`), where in it they begin, and their form. When the storage goes, so does the capture,
and with it every plan that reads it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from .expr import Capture

_lock = threading.RLock()


class Lent(Capture):
    """A captured tensor that is there while a `Lending` is entered; two are equal when they are the same object."""

    __slots__ = ("__weakref__", "_held", "_lenders", "dependents")

    def __init__(self) -> None:
        self._held: torch.Tensor | None = None
        self._lenders = 0
        self.dependents: dict[Hashable, Callable[[Hashable], None]] = {}  # whom to tell when the memory is gone

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor, during a call."""
        held = self._held
        assert held is not None, "a captured tensor is read outside of the call that lent it"
        return held

    @property
    def identity(self) -> int:
        return id(self)

    def lend(self, tensor: torch.Tensor) -> None:
        with _lock:
            self._held = tensor
            self._lenders += 1

    def give_back(self) -> None:
        with _lock:
            self._lenders -= 1
            if not self._lenders:
                self._held = None

    def __repr__(self) -> str:
        return "Lent()" if self._held is None else super().__repr__()


class _Local(threading.local):
    now: Lending | None = None  # what is lent in this thread


_local = _Local()


class Lending:
    """Tensors for the captures that stand for them; inside of it (`with`), a plan that reads those can run."""

    __slots__ = ("_outer", "captures", "tensors")

    def __init__(self, captures: Sequence[Lent], tensors: Sequence[torch.Tensor]) -> None:
        self.captures, self.tensors = captures, tensors

    def __enter__(self) -> None:
        for capture, tensor in zip(self.captures, self.tensors, strict=True):
            capture.lend(tensor)
        self._outer, _local.now = _local.now, self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _local.now = self._outer
        for capture in self.captures:
            capture.give_back()

    def again(self) -> Lending:
        """The same for another time: a backward may run in another thread, or beside a second one."""
        return Lending(self.captures, self.tensors)


def current() -> Lending | None:
    """What is lent in this thread, for who has to lend it again later."""
    return _local.now


def lent_again(lending: Lending | None) -> AbstractContextManager[None]:
    """Inside, what was lent for a call is there again; a recomputation or a backward runs when the call is over."""
    return _NOTHING if lending is None else lending.again()


_NOTHING = nullcontext()


def capture_of(tensor: torch.Tensor) -> Capture:
    """What a graph reads for `tensor`: what it was lent to, if it was, else the tensor itself."""
    now = _local.now
    if now is not None:
        for capture, held in zip(now.captures, now.tensors, strict=True):
            if held is tensor:
                return capture
    return Capture(tensor)


_known: dict[Hashable, Lent] = {}
_watched: dict[int, weakref.ref[Any]] = {}
_of_storage: dict[int, list[Hashable]] = {}


def lent_for(tensor: torch.Tensor, user: str = "eager") -> Lent | None:
    """The capture that stands for `tensor`, and for other tensors of the same memory and form.

    user: who reads it. What is derived from it is made again in place, which one user may do under another's eyes.
    None where no one can say when the memory ends: a wrapper without storage, a tensor of a torch.func transform.
    """
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    place = (id(storage), tensor.storage_offset(), tensor.shape, tensor.stride())
    key = (user, *place, tensor.dtype, tensor.requires_grad)
    found = _known.get(key)
    return found if found is not None else _begin(key, storage)


def _begin(key: Hashable, storage: torch.UntypedStorage) -> Lent:
    number = id(storage)

    def ended(_: Any) -> None:
        _watched.pop(number, None)
        for gone in _of_storage.pop(number, ()):
            capture = _known.pop(gone, None)
            for key, forget in () if capture is None else list(capture.dependents.items()):
                forget(key)

    with _lock:
        if number not in _watched:
            _watched[number] = weakref.ref(storage, ended)
        found = _known.get(key)
        if found is None:
            found = _known[key] = Lent()
            _of_storage.setdefault(number, []).append(key)
        return found


def lend(tensors: Iterable[torch.Tensor], user: str = "eager") -> Lending | None:
    """A lending of all `tensors`; None where one of them can't be lent."""
    tensors = tuple(tensors)
    captures = []
    for tensor in tensors:
        capture = lent_for(tensor, user)
        if capture is None:
            return None
        captures.append(capture)
    return Lending(captures, tensors)
