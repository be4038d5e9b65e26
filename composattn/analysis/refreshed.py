"""What is made from tensors and kept from call to call: made again when one of them was written to.

Torch counts the writes to a tensor; what it can't say so of (made in inference mode, below a transform of torch.func)
counts as written to at every call. What a CUDA graph records, and what torch runs beforehand in the memory of the
graph's own pool (mode "reduce-overhead"), keeps nothing: torch refuses to go on when some of that memory is still held
after the call, and a replay must see what tensors hold then.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ..graph.counters import is_shared
from . import streams
from .streams import stream_handle, streams_of

V = TypeVar("V")


class Refreshed(Generic[V]):
    """A value, made when it is first asked for and when the stamp of what it comes from is another.

    What is made may be the value itself, rewritten in place. Threads make it one at a time. Streams of `device` come
    after the one that made it, and one that makes it again comes after them; None: no memory of a device.
    """

    __slots__ = ("_kept", "_lock", "_streams", "version")

    def __init__(self, value: V, stamp: Sequence[Hashable] | None = None, device: torch.device | None = None) -> None:
        # one object, so that a thread never reads the value of another stamp
        self._kept: tuple[Sequence[Hashable] | None, V, Sequence[object]] = stamp, value, ()
        self.version, self._lock = 0, threading.RLock()
        self._streams = None if device is None else streams_of(device)
        if stamp is not None and self._streams is not None:
            self._streams.write()

    @property
    def value(self) -> V:
        """The value as it was last made, up to date or not."""
        return self._kept[1]

    def __call__(
        self, stamp: Sequence[Hashable], make: Callable[..., V], holding: Sequence[object] = (), *given: Any
    ) -> V:
        """The value up to date, by `make(*given)`. A None in the stamp: nobody says whether it changed.

        `holding` is kept alive with the value: an address in the stamp is then nobody else's.
        """
        made_for, value, _ = self._kept
        if made_for is None or stamp != made_for or None in stamp:
            return self._made_again(stamp, make, holding, given)
        if self._streams is not None and not self._streams.know():
            with self._lock:
                self._streams.read(value)
        return value

    def _made_again(
        self, stamp: Sequence[Hashable], make: Callable[..., V], holding: Sequence[object], given: tuple[Any, ...]
    ) -> V:
        with self._lock:
            made_for, value, _ = self._kept
            if made_for is not None and stamp == made_for and None not in stamp:  # another thread made it meanwhile
                if self._streams is not None:
                    self._streams.read(value)
                return value
            if self._streams is not None:
                self._streams.write(value)
            made = make(*given)
            if made is value or may_cache():
                self._kept = stamp, made, holding
                self.version += 1
            return made

    def stands(self, stamp: Sequence[Hashable]) -> bool:
        """Whether the value was made for this stamp; then the current stream comes after what made it."""
        made_for, value, _ = self._kept
        if made_for is None or stamp != made_for or None in stamp:
            return False
        if self._streams is not None and not self._streams.know():
            with self._lock:
                self._streams.read(value)
        return True


class Rewriting:
    """Inside, all of these values are rewritten in place; `done` says for which stamps."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[Refreshed[Any]]) -> None:
        self._values = values

    def __enter__(self) -> Rewriting:
        _together.acquire()
        for value in self._values:
            value._lock.acquire()
        for value in self._values:
            if value._streams is not None:
                value._streams.write(value._kept[1])
            value._kept = None, value._kept[1], ()  # nobody's, should this fail
        return self

    def done(self, stamp_of: Callable[[int], Sequence[Hashable]]) -> None:
        """Each is now for the stamp of its place, asked for in turn: it may speak of those before."""
        for n, value in enumerate(self._values):
            value._kept = stamp_of(n), value._kept[1], ()
            value.version += 1

    def __exit__(self, *error: object) -> None:
        for value in self._values:
            value._lock.release()
        _together.release()


_together = threading.RLock()  # who rewrites several takes their locks in any order


# --- whether a tensor was written to ---------------------------------------------------------------------------


def version(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Changes when `tensor` is written to or its memory is another; None where nobody says so.

    Torch counts writes by the version, but not `tensor.data = other`, which the address shows, and the storage where a
    new one begins at the address of one that ended. Inference tensors and those below a transform of torch.func have
    no version, and that of parameters that FSDP2 gathers stands still.
    """
    if tensor.is_inference() or is_functorch_wrapped_tensor(tensor):
        return None
    storage = tensor.untyped_storage()
    if is_shared(storage) and _FSDP2 in sys.modules and _may_be_gathered(tensor):
        return None
    # of a storage that ended the reference equals no other; it holds no memory
    return _distrust.get() or tensor._version, tensor.data_ptr(), weakref.ref(storage)


_FSDP2 = "torch.distributed.fsdp._fully_shard"


def _may_be_gathered(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 may gather a parameter into this memory, at the same address and without counting it as written.

    Torch leaves no mark on it. But it keeps a flat tensor of the same memory, so it is shared, and reads in mods of
    views of parameters are of floating-point ones: lengths of sequences, slices of a batch's, stay trusted.
    """
    return tensor.is_floating_point() or tensor.__class__ is torch.nn.Parameter


class Moment:
    """Stands for a block that trusts nothing from before, and for later ones that trust what it derived for them."""

    __slots__ = ("first", "found")

    def __init__(self) -> None:
        self.first: Any = None  # who derived first
        self.found: dict[object, Sequence[torch.Tensor]] = {}  # by who reads it


_distrust: ContextVar[Moment | None] = ContextVar("distrust", default=None)
distrusted = _distrust.get  # what stands for the block that this is, None outside of any


class distrusting:
    """Inside, no tensor counts as unwritten since before: what comes from it is made anew, once.

    since: an object of the caller's that stands for an earlier such block, where tensors of the same memory hold now
    what they held then, as those that a backward gets do. What was made there, and not again since, stands.
    """

    __slots__ = ("_since", "_token")

    def __init__(self, since: Moment | None = None) -> None:
        self._since = Moment() if since is None else since

    def __enter__(self) -> None:
        self._token = _distrust.set(self._since)

    def __exit__(self, *error: object) -> None:
        _distrust.reset(self._token)


# --- whether memory that a call makes may outlive it -----------------------------------------------------------


_may_cache: ContextVar[bool] = ContextVar("may_cache", default=True)
may_cache = _may_cache.get  # whether what is made now may be held after the call


class no_caching:
    """Inside, nothing that is made is held on to; what was kept before may be used."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _may_cache.set(False)

    def __exit__(self, *error: object) -> None:
        _may_cache.reset(self._token)


def memory_is_ours() -> bool:
    """Whether what is made now may be kept, and what is kept read: not so where all of it belongs to a CUDA graph."""
    return not belongs_to_graph()


def belongs_to_graph() -> bool:
    """Whether a CUDA graph records this call, or torch runs it in a graph's memory before it records it.

    The graph may be replayed when tensors hold something else.
    """
    if has_looked():
        return False
    if streams.is_capturing():
        return True
    trees, name = sys.modules.get("torch._inductor.cudagraph_trees"), "tree_manager_containers"
    if trees is None or not (hasattr(trees.local, name) or torch._C._is_key_in_tls(name)):
        return False  # before torch 2.13 threads that have no containers are not asked for them
    managers = [container.tree_manager for container in trees.get_obj(trees.local, name).values()]
    # a manager runs and records on a stream of its own, and nothing else
    streams_of = [m.stream for m in managers if m is not None]
    return any(stream_handle(stream.device) == stream.cuda_stream for stream in streams_of)


_free: ContextVar[int | None] = ContextVar("free", default=None)  # the device, if its stream is no graph's


def has_looked() -> bool:
    """Whether this is inside of a `LookedOnce` of the device that is the current one."""
    free = _free.get()
    return free is not None and free == streams.current_device()


class LookedOnce:
    """Inside, `belongs_to_graph` says what it said before, of the device that is the current one now: that it is not.

    A call asks a dozen times. To be entered where neither a capture begins nor the stream changes.
    """

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _free.set(streams.current_device() if torch.cuda.is_initialized() else None)

    def __exit__(self, *error: object) -> None:
        _free.reset(self._token)
