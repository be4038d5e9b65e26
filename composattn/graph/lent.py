"""Captured tensors that a kept plan has during calls only: lent by who calls, held by nobody in between.

A plan that outlives a call of `ca.attention` must not keep the user's tensors alive. Its graphs read `Lent` captures;
a `Lending` puts the tensors in their place for a call, and again for its backward. Which tensors a capture stands for
is told by their memory: the storage (watched by a weak reference, tensors themselves take none without getting in the
way of `torch.utils.swap_tensors`), where in it they begin, and their form. When the storage goes, the capture waits for
another tensor of that form, with the plans that read it: a new batch's mask is planned as the last one's was, and only
what is derived from the tensor is computed. Few wait; the others go, and their plans with them. The same memory may be
lent by tensors whose writes are counted apart (`x` and `x.data`): to a capture that is as if the memory were another.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch

from .counters import OF_ONE_TENSOR, Counter, storage_uses
from .expr import Capture

_lock = threading.RLock()
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # a subclass has its own `detach`


class Lent(Capture):
    """A captured tensor that is there while a `Lending` is entered; two are equal when they are the same object."""

    __slots__ = ("__weakref__", "_counter", "_last", "_lent", "dependents", "epoch")

    def __init__(self) -> None:
        self._lent: list[torch.Tensor] = []  # by whom it is entered now; appended to and shortened in one step each
        self._last: int | None = None  # the id of the tensor that was followed last
        self._counter: Counter | None = None  # its
        self.epoch = 0  # which memory it stands for, by which counter: the first, the second, ...
        self.dependents: dict[Hashable, Callable[[Hashable], None]] = {}  # whom to tell when it goes

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor, during a call."""
        assert self._lent, "a captured tensor is read outside of the call that lent it"
        return self._lent[-1]

    @property
    def identity(self) -> int:
        return id(self)

    def follows(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether `tensor` is followed already: alone in its memory; with another one there an id may be taken over."""
        return id(tensor) == self._last and storage_uses(storage._cdata) <= OF_ONE_TENSOR

    def follow(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """From now on the writes that `tensor` counts are what tells of changes to its memory, `storage`."""
        with _lock:
            self._last = id(tensor)
            if tensor.is_inference():
                self._counter = None
            elif self._counter is None or not self._counter.counts(tensor):
                self._counter = Counter(tensor) if tensor.__class__ in _PLAIN else None
                self.epoch += 1  # two counters may well say the same

    def __repr__(self) -> str:
        return super().__repr__() if self._lent else "Lent()"


class _Local(threading.local):
    now: Lending | None = None  # what is lent in this thread


_local = _Local()


class Lending:
    """Tensors for the captures that stand for them; inside of it (`with`), a plan that reads those can run."""

    __slots__ = ("_outer", "captures", "tensors")

    def __init__(self, captures: Sequence[Lent], tensors: Sequence[torch.Tensor]) -> None:
        self.captures, self.tensors = captures, tensors

    def __enter__(self) -> None:
        for capture, tensor in zip(self.captures, self.tensors):  # noqa: B905  as many, and named arguments take time
            capture._lent.append(tensor)
        self._outer, _local.now = _local.now, self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _local.now = self._outer
        for capture in self.captures:
            capture._lent.pop()

    def again(self) -> Lending:
        """The same for another time: a backward may run in another thread, or beside a second one."""
        for capture, tensor in zip(self.captures, self.tensors, strict=True):
            storage = tensor.untyped_storage()
            if not capture.follows(tensor, storage):
                capture.follow(tensor, storage)
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
_of_storage: dict[int, list[tuple[Hashable, Hashable]]] = {}
_idle: OrderedDict[Lent, Hashable] = OrderedDict()
IDLE_LIMIT = 64  # captures whose memory ended and that wait for another of their form, with the plans that read them


def _followed(key: Hashable, tensor: torch.Tensor, storage: torch.UntypedStorage, place: Hashable) -> Lent:
    """The capture that is known by `key`, or a new one, which from now on follows `tensor`."""
    capture = _known.get(key)
    if capture is None:
        capture = _begin(key, (*key[2:], tensor.device, place), storage)  # type: ignore[index]
    if not capture.follows(tensor, storage):
        capture.follow(tensor, storage)
    return capture


def _begin(key: Hashable, form: Hashable, storage: torch.UntypedStorage) -> Lent:
    number = id(storage)

    def ended(_: Any) -> None:
        with _lock:
            _watched.pop(number, None)
            for gone, form in _of_storage.pop(number, ()):
                capture = _known.pop(gone, None)
                if capture is not None:
                    _idle[capture] = form
            too_many = [_idle.popitem(last=False)[0] for _ in range(len(_idle) - IDLE_LIMIT)]
        for capture in too_many:
            _drop(capture)

    with _lock:
        if number not in _watched:
            _watched[number] = weakref.ref(storage, ended)
        found = _known.get(key)
        if found is None:
            found = _known[key] = _taken_over(form) or Lent()
            _of_storage.setdefault(number, []).append((key, form))
        return found


def _taken_over(form: Hashable) -> Lent | None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None  # each replay would write to tables that other calls count on
    # the one that ended last: most likely the last call's, whose plan then serves
    for capture, of in reversed(list(_idle.items())):  # a storage may end meanwhile, in this very thread
        if of == form and _idle.pop(capture, None) is not None:
            capture.epoch += 1  # nothing that was derived from the memory before holds
            capture._last = None
            return capture
    return None


def _drop(capture: Lent) -> None:
    for key, forget in list(capture.dependents.items()):
        forget(key)


def lend(tensors: Sequence[torch.Tensor], user: str = "eager", reader: Hashable = None) -> Lending | None:
    """A lending of all `tensors`, in the order in which `reader` reads them; None where one of them can't be lent.

    A capture stands for one tensor, and for others of the same memory and form. One whose memory ended takes over new
    memory of its form that is read at the same place of a plan: a new batch's mask is planned as the last one's was,
    also where two masks read tensors of one form in turns.
    user: who reads. What is derived from a tensor is made again in place, which one user may do under another's eyes.
    No one can say when the memory ends of a wrapper without storage, and of a tensor of a torch.func transform.
    """
    captures: list[Lent] = []
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key = (
            id(storage), tensor.storage_offset(), user,
            tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad,
        )  # fmt: skip
        capture = _known.get(key)
        # as `follows` says, without the call
        if capture is None or id(tensor) != capture._last or storage_uses(storage._cdata) > OF_ONE_TENSOR:
            capture = _followed(key, tensor, storage, (reader, len(captures)))
        captures.append(capture)
    return Lending(captures, tensors)
