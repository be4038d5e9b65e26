"""Registers of a group of threads added to fp32 memory, in the order of `register_chunks`, by bulk copies that add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .barriers import Barrier
from .pipelines import Slot
from .register_chunks import THREADS
from .values import Fixed


class BulkSums(Fixed):
    """`columns` numbers a thread go through one of two buffers from `start` on, while the ones before leave the other.

    `barrier` is where the group meets; its first warp starts the copies.
    """

    def __init__(self, start: cute.Pointer, thread: Any, columns: int, barrier: Barrier) -> None:
        self.start, self.thread, self.barrier = start, thread, barrier
        self.size = 4 * THREADS * columns
        self.is_sender = cute.arch.make_warp_uniform(thread // 32) == 0

    def add(self, numbers: Sequence[Any], slot: Slot, target: cute.Pointer) -> Slot:
        """Starts the addition to `target`, from buffer `slot`; gives the one that is free."""
        buffer = self.start.toint() + slot.index * self.size
        for j in range(len(numbers) // 4):
            four = cute.make_rmem_tensor(4, Float32)
            for e in range(4):
                four[e] = numbers[4 * j + e]
            place = buffer + (j * THREADS + self.thread) * 16
            room = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(four, cute.make_tensor(room, cute.make_layout(4)))
        cute.arch.fence_view_async_shared()
        wait_sums(self.is_sender, read=True)  # whoever meets the sender knows that the other buffer is free
        self.barrier.meet()
        add_if(self.is_sender, buffer, target, self.size)
        return slot.next()


@cute.jit
def add_if(condition: Boolean, source: Int32, target: cute.Pointer, size: cutlass.Constexpr):
    """Starts the addition of `size` bytes of shared memory to `target`, by one lane of a warp."""
    if condition:
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{{$r0}}], [{{$r1}}], {size};",
                read_only_args=[target, source],
            )
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def write_or_add(writes: Int32, source: Int32, target: cute.Pointer, size: cutlass.Constexpr):
    """Starts the addition of `size` bytes to `target`; where `writes` is not 0, overwrites it instead."""
    if writes != 0:
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                f"cp.async.bulk.global.shared::cta.bulk_group [{{$r0}}], [{{$r1}}], {size};",
                read_only_args=[target, source],
            )
            cute.arch.cp_async_bulk_commit_group()
    else:
        add_if(Boolean(True), source, target, size)


@cute.jit
def wait_sums(condition: Boolean, read: cutlass.Constexpr):
    """Until the additions that this warp has started have read their buffers, or are done."""
    if condition:
        cute.arch.cp_async_bulk_wait_group(0, read=read)
