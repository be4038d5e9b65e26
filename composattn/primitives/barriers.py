"""A block's numbered barriers, handed out one after the other, so that no two parts of a kernel share one."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute

from .values import Fixed

NUMBERS = 16  # that a block has; 0 is that of `sync_threads`


@dataclasses.dataclass(frozen=True)
class Barrier(Fixed):
    """Where `threads` threads meet."""

    number: Any  # of a row of barriers known at run time
    threads: int

    def meet(self) -> None:
        """Arrive, and wait for all others."""
        cute.arch.barrier(barrier_id=self.number, number_of_threads=self.threads)

    def arrive(self) -> None:
        """Arrive, and go on."""
        cute.arch.barrier_arrive(barrier_id=self.number, number_of_threads=self.threads)


@dataclasses.dataclass(frozen=True)
class BarrierRow(Fixed):
    """Barriers of one kind, one for each of several groups of threads."""

    first: int
    threads: int

    def __getitem__(self, index: Any) -> Barrier:
        return Barrier(self.first + index, self.threads)


class Barriers(Fixed):
    """Hands out the numbers of one block."""

    def __init__(self) -> None:
        self.next = 1

    def row(self, count: int, threads: int) -> BarrierRow:
        first, self.next = self.next, self.next + count
        assert self.next <= NUMBERS, f"a block has {NUMBERS - 1} barriers beside sync_threads"
        return BarrierRow(first, threads)

    def one(self, threads: int) -> Barrier:
        return self.row(1, threads)[0]
