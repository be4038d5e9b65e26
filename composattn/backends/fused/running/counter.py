"""Counters from which the blocks of a forward draw their tiles, and flags that they raise: zero before a kernel, which
leaves them so.

Kernels of one stream come one after the other and share one. Each launch that a CUDA graph records has one for good, as
a replay may run beside whatever else there is. All lie in a slab that is zero before anyone reads its address, so that
no stream has to wait for another.
"""

from __future__ import annotations

import itertools
import threading

import torch

from ....analysis.refreshed import memory_is_ours
from ....analysis.streams import has_streams

# of a device, 64 KiB: as many streams and recorded launches get one each; fewer have flags too, 2 MiB with 8 of each
# of 132 SMs
MANY, MANY_WITH_FLAGS = 1 << 14, 1 << 9


class Slab:
    """The counters of a device, of so many numbers each."""

    def __init__(self, device: torch.device, numbers: int) -> None:
        many = MANY if numbers == 1 else MANY_WITH_FLAGS
        self._counters = torch.zeros((many, numbers), dtype=torch.int32, device=device)
        if has_streams(device):
            torch.cuda.current_stream(device).synchronize()
        self._numbers = itertools.count()
        self.of_streams: dict[int, torch.Tensor] = {}  # by their handles

    def take(self) -> torch.Tensor | None:
        """One that nobody has, for good; None where none is left."""
        number = next(self._numbers)
        return self._counters[number] if number < len(self._counters) else None


_slabs: dict[tuple[int, int], Slab] = {}  # by the device's number, and how many a counter has


def counter_of(q: torch.Tensor, numbers: int = 1) -> torch.Tensor:
    """That of the next kernel on the current stream, on the device of `q`, which is the current one: int32."""
    on_gpu = q.is_cuda
    device = q.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device) if on_gpu else threading.get_ident()
    recorded = on_gpu and torch._C._cuda_isCurrentStreamCapturing()
    slab = _slabs.get((device, numbers))
    if slab is not None and not recorded:
        found = slab.of_streams.get(stream)
        if found is not None:
            return found
    return _first(q.device, numbers, slab, None if recorded else stream)


def _first(device: torch.device, numbers: int, slab: Slab | None, stream: int | None) -> torch.Tensor:
    """A counter for a stream, or for a recorded launch; one of its own where there can't be another."""
    key = -1 if device.index is None else device.index, numbers
    if slab is None and memory_is_ours():
        slab = _slabs.setdefault(key, Slab(device, numbers))
    found = None if slab is None else slab.take()
    if found is None or slab is None:
        return torch.zeros(numbers, dtype=torch.int32, device=device)
    if stream is not None:
        # another thread may have been faster: all on a stream share one
        return slab.of_streams.setdefault(stream, found)
    return found
