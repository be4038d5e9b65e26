"""What the kernels of a dense backward use among themselves; that of small calls is kept for the next on its stream.

Kernels of one stream come one after the other, so the next call may write over what the last one left, as it may in
memory that torch's allocator gives out again; but torch takes 2 µs of an H200's host for each tensor, and twice that
where its caches are cold. Whoever takes memory takes it away until it is left again: two threads never share any.
"""

from __future__ import annotations

import itertools

import torch

from ....analysis.refreshed import memory_is_ours
from ....analysis.streams import device_number, has_streams, is_captured
from .launch import form_alone

SMALL = 1 << 20  # bytes: calls of more take the GPU as long as the host
LIMIT = 32  # of them, of all streams and forms of calls

Memory = tuple[torch.Tensor, torch.Tensor]  # a workspace, sums of dQ
Place = tuple[int, int]  # the form of calls, the stream

kept: dict[Place, Memory] = {}
_numbers = itertools.count()


class Scratch:
    """The memory of calls of one form."""

    __slots__ = ("_device", "_forms", "_is_small", "number")

    def __init__(self, workspace: int, sums: tuple[int, ...], strides: tuple[int, ...], device: torch.device) -> None:
        self._forms = form_alone((workspace,), (1,), device), form_alone(sums, strides, device)
        self._device = device_number(device) if has_streams(device) else None
        self._is_small = sum(t.nbytes for t in self._forms) <= SMALL
        self.number = next(_numbers)

    def take(self) -> tuple[Memory, Place | None]:
        """Memory that nobody else has, and where to keep it (`kept`) once what uses it is in the stream, or None."""
        stream: int | None = 0
        if self._is_small and self._device is not None:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            if is_captured(stream):  # what a graph uses belongs to it
                stream = None
        return self.taken(stream)

    def taken(self, stream: int | None) -> tuple[Memory, Place | None]:
        """Memory on the current stream, of this handle, which no graph records; None: one that does."""
        place = (self.number, stream) if self._is_small and stream is not None else None
        found = None if place is None else kept.pop(place, None)
        if found is not None:
            return found, place
        workspace, sums = self._forms
        made = torch.empty_like(workspace), torch.empty_like(sums)
        if place is None or not memory_is_ours():
            return made, None
        if len(kept) >= LIMIT:
            kept.clear()
        return made, place
