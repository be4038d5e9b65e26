"""Sums in fp32 memory in the order of registers, as `register_chunks` has them, a number at a time.

Older GPUs add no more than a number with one instruction. Number e of thread t lies at e * threads + t, so that a
warp's numbers lie side by side.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


def add_numbers(start: Any, registers: cute.Tensor, threads: int, first: int = 0) -> None:
    """Registers added to memory that other blocks add to as well; `start`: of this thread's number 0."""
    for e in range(cute.size(registers)):
        cute.arch.inline_ptx(
            f"red.relaxed.gpu.global.add.f32 [{{$r0}} + {(first + e) * threads * 4}], {{$r1}};",
            read_only_args=[start, registers[e]],
        )


def store_numbers(start: Any, registers: cute.Tensor, threads: int) -> None:
    """Registers to memory that nobody else writes."""
    _strided(start, registers, threads).store(_plain(registers).load())


def load_numbers(start: Any, registers: cute.Tensor, threads: int) -> None:
    """What `add_numbers` and `store_numbers` have left."""
    _plain(registers).store(_strided(start, registers, threads).load())


def _strided(start: Any, registers: cute.Tensor, threads: int) -> cute.Tensor:
    return cute.make_tensor(start, cute.make_layout(cute.size(registers), stride=threads))


def _plain(registers: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(registers.iterator, cute.make_layout(cute.size(registers), stride=1))
