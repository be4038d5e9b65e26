"""Bulk copies from shared memory to tensors."""

from collections.abc import Callable, Iterable

import cutlass.cute as cute
from cutlass import Boolean

from .kv_source import partition


def send(outputs: Iterable[tuple], meet: Callable[[], None]) -> None:
    """What was put into shared memory to its tensors, once all who put it there `meet`.

    An output: (whether this warp starts the copy, the copy, shared memory, the tensor's tiles, which of them). The one
    warp that does waits (`wait_read`) before the shared memory is used again or the block ends. What lies beyond a
    tensor's end is left out.
    """
    cute.arch.fence_view_async_shared()
    meet()
    for output in outputs:
        start(*output)


def start(mine, tma, shared: cute.Tensor, tiles: cute.Tensor, number) -> None:
    """Starts the copy of an output, see `send`."""
    source, target = partition(tma, shared, tiles)
    _copy_if(mine, tma, source, target[None, number])


@cute.jit
def _copy_if(condition: Boolean, tma, source, target):
    if condition:
        cute.copy(tma, source, target)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def wait_read(condition: Boolean):
    """Until the copies that this warp has started have read shared memory."""
    if condition:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
