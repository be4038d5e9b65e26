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
    started = []
    for mine, tma, shared, tiles, number in outputs:
        begin(mine, tiles, number)
        start(mine, tma, shared, tiles, number)
        started.append((mine, tiles, number))
    for mine, tiles, number in started:
        end(mine, tiles, number)


def begin(mine, tiles: Any, number) -> None:
    """Before `start`: until it may, where tiles are written by one block and added to by another."""
    if isinstance(tiles, SumTiles):
        tiles.begin(mine, number)


def end(mine, tiles: Any, number) -> None:
    """Behind `start`: tells the block that waits."""
    if isinstance(tiles, SumTiles):
        tiles.end(mine, number)


def start(mine, tma, shared: cute.Tensor, tiles: Any, number) -> None:
    """Starts the copy of an output, see `send`."""
    if isinstance(tiles, SumTiles):
        tiles.start(mine, tma, shared, number)
        return
    source, target = partition(tma, shared, tiles)
    store(mine, tma, source, target, number)


@cute.jit
def wait_read(condition: Boolean):
    """Until the copies that this warp has started have read shared memory."""
    if condition:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
