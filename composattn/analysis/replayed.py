"""A recorded run as a graph of the device (a CUDA graph): one launch in place of one for each operation.

A replay reads and writes the memory that it was captured with: what differs from run to run is copied there, and what
it gives is copied out. What it makes meanwhile lies in one pool of memory for all graphs of a device, so replays take
turns: one thread at a time, and a stream waits for the one that replayed last. Memory is bound, so only small runs are
captured; of others launches take a small part of the time.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from .streams import has_streams, stream_handle, streams_of, used_on

T = torch.Tensor

AFTER = 3  # recorded runs of a form, then it is captured: who changes a mask now and then pays for no capture
MOST_BYTES = 2**24  # of what a run reads and gives; a window table of 100,000 rows


class Graph(Protocol):
    """A run that was captured; called, it runs again on the same memory."""

    def __call__(self) -> None: ...


class CudaGraph:
    """`run`, captured aside of the current stream, in the memory of the graphs that live; its errors are torch's."""

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        turn = turn_on(device)
        other = next(iter(turn.graphs), None)  # held meanwhile: a pool whose graphs have all ended is taken no more
        self.pool: Any = torch.cuda.graph_pool_handle() if other is None else other.pool
        self._graph = torch.cuda.CUDAGraph()
        if turn.aside is None:
            turn.aside = torch.cuda.Stream(device)
        now, aside = torch.cuda.current_stream(device), turn.aside
        aside.wait_stream(now)
        with torch.cuda.stream(aside), _no_collection():
            # other threads may do what they like meanwhile
            self._graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                self._graph.capture_end()
        now.wait_stream(aside)
        turn.graphs.add(self)

    def __call__(self) -> None:
        self._graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no garbage is collected: what ends there may ask something of the device that a capture forbids."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


GRAPHS: dict[str, Callable[[Callable[[], object], torch.device], Graph]] = {"cuda": CudaGraph}
"""Who captures a run, by the type of device; on others each operation is dispatched."""


class _Turn:
    """Who replays on a device now; its graphs that live, which share a pool of memory, and where they are captured."""

    def __init__(self, device: torch.device) -> None:
        self.lock, self.streams = threading.RLock(), streams_of(device)
        self.graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self.refused = False  # torch did once: what a capture that fails leaves behind, another would meet
        self.aside: Any = None  # one stream: memory of a pool is taken again by the stream alone that gave it back

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.streams is not None:
            self.streams.write()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


_turns: dict[torch.device, _Turn] = {}


def turn_on(device: torch.device) -> _Turn:
    """The one of this device."""
    found = _turns.get(device)
    return _turns.setdefault(device, _Turn(device)) if found is None else found


class Replay:
    """A run on inputs of one form, replayed. Results are the caller's, but those among the inputs and those `for_now`.

    standing: places of inputs that have the same memory in every run, and are read or written there.
    """

    def __init__(
        self,
        run: Callable[[Sequence[T | None]], Sequence[T]],
        inputs: Sequence[T | None],
        results: Sequence[T],
        standing: Collection[int],
    ) -> None:
        self.device = results[0].device
        self.moving = [n for n, t in enumerate(inputs) if t is not None and n not in standing]
        self.memory = [_memory_like(inputs[n]) for n in self.moving]  # type: ignore[arg-type]
        self._copies = _by_type(zip(self.moving, self.memory, strict=True))
        own = dict(zip(self.moving, self.memory, strict=True))
        read = [own.get(n, t) for n, t in enumerate(inputs)]
        stands = {id(inputs[n]) for n in standing}
        self.given = [(t, True) if id(t) in stands else (_memory_like(t), False) for t in results]
        self.results = [memory for memory, _ in self.given]
        self.written = [memory for memory, stands in self.given if stands]
        self._given_out: dict[int, list[tuple[list[T], list[int]]]] = {}  # copied, by how many results are for now

        def captured() -> None:
            for (memory, stands), found in zip(self.given, run(read), strict=True):
                if not stands:
                    memory.copy_(found)

        self._streams_on = self.device if has_streams(self.device) else None
        self._known = {self._stream()}
        with turn_on(self.device):
            self.graph = GRAPHS[self.device.type](captured, self.device)

    def __call__(self, inputs: Sequence[T | None], for_now: int = 0) -> list[T]:
        """What the run gives for inputs of its form, standing ones in the memory of the first.

        for_now: whoever asks has read so many results, on this stream, before the next run is asked for: they are not
        copied.
        """
        with turn_on(self.device):
            if self._stream() not in self._known:
                self._meet_stream()
            for memories, places in self._copies:
                torch._foreach_copy_(memories, [inputs[n] for n in places])  # type: ignore[misc]
            self.graph()
            if self.written:
                torch.autograd.graph.increment_version(self.written)  # torch counts no writes of a graph
            return self._own(for_now)

    def _own(self, for_now: int) -> list[T]:
        """The results, but for the first so many in memory of their own."""
        found = list(self.results)
        copies = self._given_out.get(for_now)
        if copies is None:
            apart = enumerate(self.given[for_now:], start=for_now)
            copies = self._given_out[for_now] = _by_type((n, memory) for n, (memory, stands) in apart if not stands)
        for memories, places in copies:
            own = [torch.empty_like(m) if m.is_contiguous() else _memory_like(m) for m in memories]
            torch._foreach_copy_(own, memories)
            for n, memory in zip(places, own, strict=True):
                found[n] = memory
        return found

    def _stream(self) -> int | None:
        return None if self._streams_on is None else stream_handle(self._streams_on)

    def _meet_stream(self) -> None:
        """The memory is no one else's before the current stream is done with it."""
        now = torch.cuda.current_stream(self.device)
        self._known.add(now.cuda_stream)
        used_on(now, [*self.memory, *(memory for memory, stands in self.given if not stands)])


def replay_of(
    run: Callable[[Sequence[T | None]], Sequence[T]],
    inputs: Sequence[T | None],
    results: Sequence[T],
    standing: Collection[int],
) -> Replay | None:
    """The run as one graph, where its device has graphs and it is small; None elsewhere, and once torch refused one.

    On a GPU by torch's own allocator alone, whose graphs have pools.
    """
    tensors = [*(t for t in inputs if t is not None), *results]
    device = results[0].device
    if device.type not in GRAPHS or any(t.device != device for t in tensors):
        return None
    turn = turn_on(device)
    if turn.refused or (device.type == "cuda" and not _has_pools()):
        return None
    # memory like that of expanded ones can't be written to
    if sum(map(_reach, tensors)) > MOST_BYTES or any(map(torch._debug_has_internal_overlap, tensors)):
        return None
    try:
        return _apart(device, lambda: Replay(run, inputs, results, standing))
    except RuntimeError as error:
        turn.refused = True
        warnings.warn(
            f"what derives a mask's tiles was not captured, and runs as it did, as all on {device} will: {error}",
            stacklevel=2,
        )
        return None


def _apart(device: torch.device, make: Callable[[], Replay]) -> Replay:
    """What is made in a thread of its own, on the current stream.

    What a thread has entered would have a part in what it captures: memory of a pool (`torch.cuda.use_mem_pool`) that
    its owner gives to others, operations of modes, autocast. A new thread has entered nothing.
    """
    stream = torch.cuda.current_stream(device) if has_streams(device) else None
    made: list[Replay] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="composattn captures")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def _has_pools() -> bool:
    """Whether what a graph makes meanwhile is nobody else's: other allocators may give it to others, unasked."""
    return torch.cuda.get_allocator_backend() == "native" and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


def _by_type(memory: Iterable[tuple[int, T]]) -> list[tuple[list[T], list[int]]]:
    """Tensors of one type together, each with its place: torch copies one type in one launch."""
    found: dict[torch.dtype, tuple[list[T], list[int]]] = {}
    for n, t in memory:
        tensors, places = found.setdefault(t.dtype, ([], []))
        tensors.append(t)
        places.append(n)
    return list(found.values())


def _reach(t: T) -> int:
    """Bytes from its first element to its last: what memory like it takes, as a column of a large one does."""
    return (1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def _memory_like(t: T) -> T:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
