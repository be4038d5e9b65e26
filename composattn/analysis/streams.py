"""CUDA streams that share memory: a writer waits for the streams that used it, and they wait for the writer."""

from __future__ import annotations

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

DEFAULT_STREAM = 0  # the handle of CUDA's legacy default stream, on every device


class Streams:
    """Which streams of a device know of memory that is rewritten now and then. Calls are made one at a time.

    Work that a CUDA graph records has no part in it: torch waits for the whole device before it records.
    """

    __slots__ = ("_device", "_knowing")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._knowing: dict[int, torch.cuda.Stream] = {}  # by their handles; the first is the one that wrote

    def know(self) -> bool:
        """Whether the current stream comes after what was written."""
        return stream_handle(self._device) in self._knowing

    def read(self, memory: object) -> None:
        """The current stream is about to read."""
        if self.know() or is_capturing():
            return
        now = torch.cuda.current_stream(self._device)
        now.wait_stream(next(iter(self._knowing.values()), now))
        self._knowing[now.cuda_stream] = now
        used_on(now, memory)

    def write(self, memory: object = None) -> None:
        """The current stream is about to write, into this memory, and is the only one that comes after it."""
        if len(self._knowing) == 1 and self.know():  # it wrote last, and nobody else has read
            return
        if is_capturing():
            return
        now = torch.cuda.current_stream(self._device)
        for other in self._knowing.values():
            if other != now:
                now.wait_stream(other)
        if self._knowing and now.cuda_stream not in self._knowing:
            used_on(now, memory)
        self._knowing = {now.cuda_stream: now}


def used_on(stream: torch.cuda.Stream, memory: object) -> None:
    """The memory of these tensors is no one else's before this stream is done with it."""
    for tensor in memory if isinstance(memory, list | tuple) else [memory]:
        if isinstance(tensor, torch.Tensor) and not is_functorch_wrapped_tensor(tensor):
            tensor.record_stream(stream)


def streams_of(device: torch.device) -> Streams | None:
    """None where no other stream can be in the way."""
    return Streams(device) if has_streams(device) else None


def has_streams(device: torch.device) -> bool:
    """Not so a CPU, nor a GPU that is not there and only spoken of. Asking takes microseconds: not at each call."""
    return device.type == "cuda" and torch.cuda.is_available()


def is_capturing() -> bool:
    """Whether a CUDA graph records what is put into the current stream."""
    if not torch.cuda.is_initialized():  # asking whether a GPU is there takes as long
        return False
    return is_captured(torch._C._cuda_getCurrentRawStream(current_device()))


def is_captured(stream: int) -> bool:
    """Whether a CUDA graph records the current stream, of this handle.

    Not so the default stream, which can't be captured: to ask CUDA about it would take 1 to 2 µs of each step.
    """
    return stream != DEFAULT_STREAM and torch._C._cuda_isCurrentStreamCapturing()


_device_now = getattr(torch._C, "_cuda_getDevice", None)  # not in a build for CPUs


def current_device() -> int:
    """The number of the current GPU, where CUDA is in use."""
    # torch.cuda.current_device first looks whether it is
    return torch.cuda.current_device() if _device_now is None else _device_now()


def stream_handle(device: torch.device) -> int:
    """The stream that work on `device`, which has some, is put into now."""
    # torch.cuda.current_stream makes an object each time
    return torch._C._cuda_getCurrentRawStream(device_number(device))


def device_number(device: torch.device) -> int:
    """The number of a GPU: that of the current one if `device` names none."""
    return current_device() if device.index is None else device.index
