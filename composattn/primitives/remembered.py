"""Registers whose numbers the trace remembers: one that was read or written is not loaded again.

A load is two operations of the kernel language, 0.1 ms of a compilation each, and a softmax reads a score four times.
The machine code is the same, as the compiler finds what was stored, too.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass._mlir import ir

from .values import Fixed


class Remembered(Fixed):
    """Registers by number, or by row and column, which `place` turns into a number.

    Whoever writes them otherwise makes a new one. What is known holds in one block of code: another one, of a branch or
    a loop, begins with nothing, and so does the code behind it.
    """

    def __init__(self, registers: cute.Tensor, place: Callable[[int, int], int]) -> None:
        self.registers, self.place = registers, place
        self._known: dict[int, Any] = {}
        self._block: Any = None

    @property
    def iterator(self) -> cute.Pointer:
        return self.registers.iterator

    def __getitem__(self, at: int | tuple[int, int]) -> Any:
        known, number = self._of_this_block(), self._number(at)
        if number not in known:
            known[number] = self.registers[number]
        return known[number]

    def __setitem__(self, at: int | tuple[int, int], value: Any) -> None:
        number = self._number(at)
        self.registers[number] = value
        self._of_this_block()[number] = value

    def _number(self, at: int | tuple[int, int]) -> int:
        return at if isinstance(at, int) else self.place(*at)

    def _of_this_block(self) -> dict[int, Any]:
        block = ir.InsertionPoint.current.block
        if self._block is None or block != self._block:
            self._known, self._block = {}, block
        return self._known
