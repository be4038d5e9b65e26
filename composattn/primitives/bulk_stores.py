"""Bulk copies from shared memory to tensors."""

from collections.abc import Callable, Iterable
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean

from .cut_rows import partition, store
from .strip_sums import SumTiles


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


def start(mine, tma, shared: cute.Tensor, tiles: Any, number) -> None:
    """Starts the copy of an output, see `send`."""
    if isinstance(tiles, SumTiles):
        tiles.add(mine, tma, shared, number)
        return
    source, target = partition(tma, shared, tiles)
    store(mine, tma, source, target, number)


@cute.jit
def wait_read(condition: Boolean):
    """Until the copies that this warp has started have read shared memory."""
    if condition:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
