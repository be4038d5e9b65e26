"""Captured tensors that a cached plan borrows for a call: the caller owns them, and no plan keeps them alive.

A plan that outlives a call of `ca.attention` must not keep the user's tensors alive. Its graphs read
`BorrowedCapture`s; `Borrowed` puts the tensors in their place for a call, and again for its backward. Which tensors a
capture stands for is told by their memory: the storage (watched by a weak reference, tensors themselves take none
without getting in the way of `torch.utils.swap_tensors`), where in it they begin, and their form. When the storage
goes, the capture waits for another tensor of that form, with the plans that read it: a new batch's mask is planned as
the last one's was, and only what is derived from the tensor is computed. Few wait; the others go, and their plans with
them. The same memory may be borrowed from tensors whose writes are counted apart (`x` and `x.data`): to a capture that
is as if the memory were another.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch

from ..errors import UnsupportedCapture
from .counters import OF_ONE_TENSOR, Counter, is_shared, storage_uses
from .expr import Capture
from .foreign import is_computed, is_fake, is_heard, reason_against
from .moved import refused
from .tensor_forms import of_the_form

_lock = threading.RLock()
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # a subclass has its own `detach`


class Unwritten(NamedTuple):
    """Stands for the time between two writes to a tensor, and equals what `analysis.derived.stamp` says of it."""

    stamp: tuple[int, int, weakref.ref[Any]]  # its counter, where its elements begin, its memory
    epoch: int  # of who follows it

    @property
    def version(self) -> int:
        """The tensor's version in that time."""
        return self.stamp[0]

    def lies_under(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` begins in the memory where it did."""
        _, address, memory = self.stamp
        return tensor.data_ptr() == address and memory() is not None


class BorrowedCapture(Capture):
    """A captured tensor that is there while a `Borrowed` is entered; two are equal when they are the same object."""

    __slots__ = (
        "__weakref__", "_address", "_counter", "_is_of_form", "_last", "_lies", "_seen", "_version",
        "dependents", "epoch", "unwritten", "written_apart",
    )  # fmt: skip

    def __init__(self) -> None:
        self._last: int | None = None  # the address of the tensor that was followed last
        self._counter: Counter | None = None  # its
        self._is_of_form: Callable[[torch.Tensor], bool] | None = None  # known where it is alone in its memory, and
        self._lies: tuple[torch.Size, tuple[int, ...]] | None = None  # shape and strides, of every tensor that comes
        self._address = 0  # of its elements
        self._version = 0  # by its counter
        self._seen = 0  # by its counter, when it was followed last
        self.written_apart = 0  # the last of `_apart` that was its own
        self.unwritten: Unwritten | None = None  # another one after each write; None: `version` has to be asked
        self.epoch = 0  # which memory it stands for, by which counter: the first, the second, ...
        self.dependents: dict[Hashable, Callable[[Hashable], None]] = {}  # whom to tell when it goes

    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The tensor, during a call."""
        borrowed = _local.now
        while borrowed is not None:
            for capture, tensor in zip(borrowed.captures, borrowed.tensors):  # noqa: B905  named arguments take time
                if capture is self:
                    return tensor
            borrowed = borrowed.outer
        raise AssertionError("a captured tensor is read outside of the call that borrowed it")

    @property
    def identity(self) -> int:
        return id(self)

    def is_bound_to(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether `tensor` is the one that was followed last, in the same memory and of the same form.

        It has to be alone in its memory: with another one there an address may be taken over. Its writes are looked at.
        number: what torch knows it by, which takes as long to ask for as its version and its address.
        """
        if (
            self._last != number
            or self._is_of_form is None
            or not self._is_of_form(tensor)
            or tensor.data_ptr() != self._address
            or storage_uses(tensor.untyped_storage()._cdata) > OF_ONE_TENSOR
        ):
            return False
        if tensor._version != self._version:
            self._mark(tensor)
        return True

    def follow(self, tensor: torch.Tensor) -> None:
        """From now on the writes that `tensor` counts are what tells of changes to its memory."""
        if self.is_bound_to(tensor, tensor._cdata):
            return
        with _lock:
            _forget_tensor(self)
            before = self._last, self._address, self._version, self.epoch
            plain, alone = tensor.__class__ in _PLAIN, not is_shared(tensor.untyped_storage())
            self._last, self._address = tensor._cdata, tensor.data_ptr()
            self._lies = tensor.shape, tensor.stride()
            if tensor.is_inference():
                self._counter = None
            elif not self._counts(tensor, alone and before[:2] == (self._last, self._address)):
                self._count(tensor, plain)
            self._seen = 0 if self._counter is None else self._counter.version
            trusted = plain and alone and self._counter is not None
            self._is_of_form = of_the_form(tensor) if trusted else None
            if not trusted:
                self._version, self.unwritten = 0, None
            elif self.unwritten is None or before != (self._last, self._address, tensor._version, self.epoch):
                self._mark(tensor)

    def _count(self, tensor: torch.Tensor, plain: bool) -> None:
        """From now on by a counter of its own."""
        if self._counter is not None and (tensor._version or self._counter.version != self._seen):
            self.written_apart = _apart.again()
        self._counter = Counter(tensor) if plain else None
        self.epoch += 1  # two counters may well say the same

    def _mark(self, tensor: torch.Tensor) -> None:
        """Equal to what `analysis.derived.stamp` says where it is not alone in its memory: coming there is no write."""
        self._version = self._seen = tensor._version
        stamp = self._version, tensor.data_ptr(), weakref.ref(tensor.untyped_storage())
        self.unwritten = Unwritten(stamp, self.epoch)

    def _counts(self, tensor: torch.Tensor, same: bool) -> bool:
        """Whether the counter is that of `tensor`; of a subclass there is none: `same`, whether it is the last one."""
        return same if self._counter is None else self._counter.counts(tensor)

    def lies_as(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has the shape and the strides of those that it stands for, whatever a dispatch mode sees."""
        return self._lies == (tensor.shape, tensor.stride())

    def is_written_apart_from(self, tensor: torch.Tensor) -> bool:
        """Whether it follows another tensor than `tensor`, which counts for itself and was written to meanwhile."""
        with _lock:
            counter = self._counter
            return counter is not None and counter.version != self._seen and not counter.counts(tensor)

    def ended(self) -> None:
        """Its memory is gone: whatever tensor comes at that address is another one."""
        self._last = self._is_of_form = self.unwritten = None

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except AssertionError:
            return "BorrowedCapture()"


class FormCapture(BorrowedCapture):
    """Stands for whatever tensor of one form a call gives, where nobody trusts what was derived before.

    Its writes are not followed. `stamped`: who trusts nothing from before, and what that one was told of the memory.
    """

    __slots__ = ("stamped",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.stamped: tuple[object, Hashable] | None = None
        self._lies = tensor.shape, tensor.stride()

    def follow(self, tensor: torch.Tensor) -> None:  # type: ignore[override]
        """From now on it stands for `tensor`."""
        now = tensor._cdata, tensor.data_ptr()
        if now != (self._last, self._address):
            self._last, self._address = now
            self.stamped = None


class _Apart:
    """How often memory came that tensors write to whose writes are counted apart, `x` and `x.data`, and one had."""

    count = 0

    def again(self) -> int:
        self.count += 1
        return self.count


_apart = _Apart()


class _Local(threading.local):
    now: Borrowed | None = None  # what this thread has borrowed


_local = _Local()


class Borrowed:
    """Tensors for the captures that stand for them; inside of it (`with`), a plan that reads those can run, here."""

    __slots__ = ("captures", "epoch", "numbers", "outer", "since", "tensors", "unwritten")

    def __init__(
        self,
        captures: tuple[BorrowedCapture, ...],
        tensors: Sequence[torch.Tensor],
        unwritten: Sequence[Unwritten | None] | None = None,
        epoch: int = 0,
        numbers: Sequence[int] = (),
    ) -> None:
        """`unwritten`: those of the captures, as they are now; `epoch`: the sum of theirs, which never go back.

        `numbers`: what torch knows the tensors by, now: `torch.utils.swap_tensors` puts others in their place.
        """
        self.unwritten = (None,) * len(captures) if unwritten is None else unwritten
        self.captures, self.tensors, self.epoch = captures, tensors, epoch
        self.numbers, self.since = numbers, _apart.count

    def __enter__(self) -> None:
        self.outer, _local.now = _local.now, self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _local.now = self.outer

    def is_valid(self) -> bool:
        """Guard: whether nothing was written to what was borrowed, and the captures still stand for it."""
        for capture, tensor, then in zip(self.captures, self.tensors, self.unwritten):  # noqa: B905  as above
            if (
                then is None
                or capture.unwritten is not then
                or tensor._version != capture._version
                or tensor._cdata != capture._last
                or tensor.data_ptr() != capture._address
                or capture._is_of_form is None
                or not capture._is_of_form(tensor)
            ):
                return False
        return True

    def refuse_written(self) -> None:
        """Raises `RuntimeError`, as torch does of what autograd saved, where a tensor was written to, or swapped."""
        self.refuse_written_apart()
        of_each = self.captures, self.tensors, self.unwritten, self.numbers
        for capture, tensor, then, number in zip(*of_each):  # noqa: B905  as above
            if tensor._cdata != number:
                raise RuntimeError(
                    f"a captured tensor of shape {tuple(tensor.shape)} that a gradient needs has been swapped for "
                    "another one since the call (torch.utils.swap_tensors)"
                )
            if then is not None and tensor._version != then.version:
                raise RuntimeError(
                    f"a captured tensor of shape {tuple(tensor.shape)} that a gradient needs has been modified by an "
                    f"inplace operation: it is at version {tensor._version}, the call read version {then.version}"
                )
            if then is not None and not (then.lies_under(tensor) and capture.lies_as(tensor)):
                raise refused(tensor.shape)

    def refuse_written_apart(self) -> None:
        """Raises `RuntimeError` if another tensor of that memory, which counts its writes apart, was borrowed since."""
        for capture, tensor in zip(self.captures, self.tensors, strict=True):
            if capture.written_apart > self.since or capture.is_written_apart_from(tensor):
                raise RuntimeError(
                    f"the memory of a captured tensor of shape {tuple(tensor.shape)} that a gradient needs was "
                    "captured since the call as another tensor, x.data of an x, to which was written; nobody says "
                    "whether before the call: compute the gradient first, or write to the tensor itself"
                )

    def again(self) -> Borrowed:
        """Borrows these tensors once more: a backward may run in another thread, or beside a second one.

        Raises `RuntimeError`, see `refuse_written_apart`.
        """
        if not self.is_valid():
            self.refuse_written_apart()
            for capture, tensor in zip(self.captures, self.tensors, strict=True):
                capture.follow(tensor)
        unwritten = [capture.unwritten for capture in self.captures]
        return Borrowed(self.captures, self.tensors, unwritten, self.epoch, self.numbers)


def current() -> Borrowed | None:
    """What this thread has borrowed, for who has to borrow it again later."""
    return _local.now


def borrowed_again(borrowed: Borrowed | None) -> AbstractContextManager[None]:
    """Inside, what a call borrowed is there again; a recomputation or a backward runs when the call is over."""
    return _NOTHING if borrowed is None else borrowed.again()


_NOTHING = nullcontext()


def capture_of(tensor: torch.Tensor) -> Capture:
    """What a graph reads for `tensor`: the capture that borrowed it, if one did, else the tensor itself."""
    now = _local.now
    if now is not None:
        for capture, held in zip(now.captures, now.tensors, strict=True):
            if held is tensor:
                return capture
    return Capture(tensor)


_known: dict[Hashable, BorrowedCapture] = {}
_of_tensor: dict[int, BorrowedCapture] = {}  # those that follow one, by its address
_watched: dict[int, weakref.ref[Any]] = {}
_of_storage: dict[int, list[tuple[Hashable, Hashable]]] = {}
_idle: OrderedDict[BorrowedCapture, Hashable] = OrderedDict()
IDLE_LIMIT = 64  # captures whose memory ended and that wait for another of their form, with the plans that read them


def _begin(key: Hashable, form: Hashable, storage: torch.UntypedStorage) -> BorrowedCapture:
    number = storage._cdata  # `id` is audited: 0.3 µs where somebody listens, as filelock does

    def ended(_: Any) -> None:
        with _lock:
            _watched.pop(number, None)
            for gone, form in _of_storage.pop(number, ()):
                capture = _known.pop(gone, None)
                if capture is not None:
                    _forget_tensor(capture)
                    capture.ended()
                    _idle[capture] = form
            too_many = [_idle.popitem(last=False)[0] for _ in range(len(_idle) - IDLE_LIMIT)]
        for capture in too_many:
            for key, forget in list(capture.dependents.items()):
                forget(key)

    with _lock:
        if number not in _watched:
            _watched[number] = weakref.ref(storage, ended)
        found = _known.get(key)
        if found is None:
            found = _known[key] = _taken_over(form) or BorrowedCapture()
            _of_storage.setdefault(number, []).append((key, form))
        return found


def _taken_over(form: Hashable) -> BorrowedCapture | None:
    # the one that ended last: most likely the last call's, whose plan then serves
    for capture, of in reversed(list(_idle.items())):  # a storage may end meanwhile, in this very thread
        if of == form and _idle.pop(capture, None) is not None:
            capture.epoch += 1  # nothing that was derived from the memory before holds
            return capture
    return None


def borrow(tensors: Sequence[torch.Tensor], reader: Hashable = None) -> Borrowed | None:
    """Borrows all `tensors`, in the order in which `reader` reads them; None where one of them can't be borrowed.

    A capture stands for one tensor, and for others of the same memory and form. One whose memory ended takes over new
    memory of its form that is read at the same place of a plan: a new batch's mask is planned as the last one's was,
    also where two masks read tensors of one form in turns.
    No one can say when the memory ends of a wrapper without storage, and of a tensor of a torch.func transform.
    """
    captures: list[BorrowedCapture] = []
    unwritten: list[Unwritten | None] = []
    numbers: list[int] = []
    epoch = 0
    for tensor in tensors:
        number = tensor._cdata
        capture = _of_tensor.get(number)
        if capture is None or not capture.is_bound_to(tensor, number):
            capture = _found(tensor, (reader, len(captures)))
            if capture is None:
                return None
        captures.append(capture)
        unwritten.append(capture.unwritten)
        numbers.append(number)
        epoch += capture.epoch
    return Borrowed(tuple(captures), tensors, unwritten, epoch, numbers)


def borrowed_before(leaves: Sequence[Any], are_of_form: bool = False) -> Borrowed | None:
    """Borrows tensors that were borrowed before, eagerly; None where one of them was not or is another by now.

    are_of_form: whoever asks has their forms, and takes the captures for nothing but tensors of those forms.
    """
    captures: list[BorrowedCapture] = []
    unwritten: list[Unwritten | None] = []
    numbers: list[int] = []
    epoch = 0
    for leaf in leaves:
        if leaf.__class__ not in _PLAIN:
            return None
        number = leaf._cdata
        capture = _of_tensor.get(number)
        # as `is_bound_to`, without the call
        if (
            capture is None
            or capture._last != number
            or capture._is_of_form is None
            or not (are_of_form or capture._is_of_form(leaf))
            or leaf.data_ptr() != capture._address
            or storage_uses(leaf.untyped_storage()._cdata) > OF_ONE_TENSOR
            or getattr(leaf, "_fsdp_flattened", False)
        ):
            return None
        if leaf._version != capture._version:
            capture._mark(leaf)
        captures.append(capture)
        unwritten.append(capture.unwritten)
        numbers.append(number)
        epoch += capture.epoch
    return Borrowed(tuple(captures), leaves, unwritten, epoch, numbers)


class TensorsOf:
    """Tensors that captures stand for now: borrowed ones at once where others, whose tensors are fixed, come last."""

    __slots__ = ("_captures", "borrowable", "others")

    def __init__(self, captures: tuple[Capture, ...]) -> None:
        count = sum(isinstance(capture, BorrowedCapture) for capture in captures)
        in_front = all(isinstance(capture, BorrowedCapture) for capture in captures[:count])
        self._captures, self.borrowable = captures, captures[:count]
        # behind the borrowed ones; None where they are not all in front
        self.others = tuple([capture.kept for capture in captures[count:]]) if in_front else None

    def __call__(self) -> Sequence[torch.Tensor]:
        found = None if _local.now is None else self.of(_local.now)
        return [capture.kept for capture in self._captures] if found is None else found

    def of(self, borrowed: Borrowed) -> Sequence[torch.Tensor] | None:
        """The tensors, from what was borrowed but not entered; None where it has to be entered."""
        if self.others is None or borrowed.captures != self.borrowable:
            return None
        return (*borrowed.tensors, *self.others) if self.others else borrowed.tensors


def _found(tensor: torch.Tensor, place: Hashable) -> BorrowedCapture | None:
    """The capture that stands for the memory of `tensor`, or a new one, which from now on follows it.

    Raises: `UnsupportedCapture` for a tensor whose elements are not to be read.
    """
    if tensor.__class__ not in _PLAIN:
        reason = "a FakeTensor beside q that is none; make both of one FakeTensorMode" if is_fake(tensor) else None
        reason = reason_against(tensor) if reason is None else reason
        if reason is not None:
            raise UnsupportedCapture(f"a captured tensor is {reason}")
    if torch._is_functional_tensor(tensor):
        return None  # its storage has no memory, and torch ends the process where it is asked for its counter
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    key = (
        storage._cdata, tensor.storage_offset(),
        tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_neg(), is_computed(tensor),
        is_heard(tensor),
    )  # fmt: skip
    capture = _known.get(key)
    if capture is None:
        capture = _begin(key, (*key[2:], tensor.device, place), storage)
    with _lock:
        capture.follow(tensor)
        _of_tensor[tensor._cdata] = capture
    return capture


def _forget_tensor(capture: BorrowedCapture) -> None:
    if capture._last is not None and _of_tensor.get(capture._last) is capture:
        del _of_tensor[capture._last]
