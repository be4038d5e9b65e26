"""Sums in fp32 memory, in the order of a product's registers, on their way out: rounded, through shared memory."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass.memory import SmemAllocator

from ....primitives.bulk_stores import send, wait_read
from ....primitives.register_chunks import THREADS
from ....primitives.values import Fixed, narrowed


class Sums(Protocol):
    """What a product of one architecture leaves in the registers of `THREADS` threads."""

    def registers(self) -> cute.Tensor:
        """Room for a thread's fp32 numbers."""

    def put(self, rounded: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        """Registers, rounded to 16 bits, to their tile in shared memory."""


@dataclasses.dataclass
class RowSums(Fixed):
    """Some columns of a row in each thread: the sums of a product whose rows lie with threads."""

    columns: int

    def registers(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.columns, Float32)

    def put(self, rounded: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        put_row(rounded, shared, thread, 0)


@dataclasses.dataclass
class LineSums(Fixed):
    """`rows` x `columns` that lie in memory line by line, multiples of 4: what a product leaves that is transposed."""

    rows: int
    columns: int

    def registers(self) -> cute.Tensor:
        return cute.make_rmem_tensor(self.rows * self.columns // THREADS, Float32)

    def put(self, rounded: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        for j in range(cute.size(rounded) // 4):
            place = (j * THREADS + thread) * 4
            row, column = place // self.columns, place % self.columns
            four = cute.make_tensor(rounded.iterator + 4 * j, cute.make_layout(4))
            cute.autovec_copy(four, cute.local_tile(shared[row, None], (4,), (column // 4,)))


def put_row(numbers: cute.Tensor, shared: cute.Tensor, row: Any, first: Any) -> None:
    """16-bit numbers to `row` of a tile in shared memory, from column `first` on, a multiple of 8."""
    for i in range(cute.size(numbers) // 8):
        eight = cute.make_tensor(numbers.iterator + 8 * i, cute.make_layout(8))
        cute.autovec_copy(eight, cute.local_tile(shared[row, None], (8,), (first // 8 + i,)))


class Exit(Fixed):
    """The shared memory of a tile through which a block's sums leave."""

    def __init__(self, layout: Any, dtype: Any):
        self.dtype = dtype
        self.shared = SmemAllocator().allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)

    def leave(
        self,
        sums: Sums,
        registers: cute.Tensor,
        part: Callable[[cute.Tensor], cute.Tensor],
        thread: Any,
        outputs: Callable[[cute.Tensor], Iterator[tuple]],
    ) -> None:
        """Registers to their `part` of the tile, and the tile to where `outputs` says (see `send`)."""
        sums.put(narrowed(registers, self.dtype), part(self.shared), thread)
        send(outputs(self.shared), cute.arch.sync_threads)
        wait_read(is_first_warp())


def is_first_warp() -> Boolean:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
