"""A block's numbered barriers, handed out one after the other, so that no two parts of a kernel share one."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

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

    def meet_and_ask(self, condition: Any) -> Any:
        """Arrive, wait for all others, and hear whether the condition holds for any thread."""
        found = cute.arch.inline_ptx(
            "{\n\t.reg .pred p, q;\n\tsetp.ne.s32 p, {$r0}, 0;\n\t"
            f"barrier.cta.red.or.pred q, {{$r1}}, {self.threads}, p;\n\t"
            "selp.s32 {$w0}, 1, 0, q;\n\t}",
            write_only_types=[Int32],
            read_only_args=[Int32(condition), Int32(self.number)],
        )
        return found != 0

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
