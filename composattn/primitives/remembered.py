"""Registers whose numbers the trace remembers: one that was read or written is not loaded again.

A load is two operations of the kernel language, 0.1 ms of a compilation each, and a softmax reads a score four times.
The machine code is the same, as the compiler finds what was stored, too.
"""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute as language

from .values import Fixed


class Remembered(Fixed):
    """Registers by number, or by row and column, which `place` turns into a number.

    Whoever writes them otherwise makes a new one. What is known holds in one block of code: another one, of a branch or
    a loop, begins with nothing, and so does the code behind it.
    """

    def __init__(self, registers: cute.Tensor, place: Callable[[int, int], int]) -> None:
        self.registers, self.place = registers, place
        self._known: dict[int, Any] = {}
        self._coordinates: dict[int, Any] = {}
        self._block: Any = None

    @property
    def iterator(self) -> cute.Pointer:
        return self.registers.iterator

    def __getitem__(self, at: int | tuple[int, int]) -> Any:
        known, number = self._of_this_block(), self._number(at)
        if number not in known:
            found = language.memref_load(self.registers.value, self._coordinate(number))
            known[number] = self.registers.element_type(found)
        return known[number]

    def __setitem__(self, at: int | tuple[int, int], value: Any) -> None:
        known, number = self._of_this_block(), self._number(at)
        known[number] = value = self.registers.element_type(value)
        language.memref_store(self.registers.value, self._coordinate(number), value.ir_value())

    def _coordinate(self, number: int) -> Any:
        """That of a register as the language wants it, made once in a block: it is half of what an access takes."""
        if number not in self._coordinates:
            self._coordinates[number] = cute.core._pack_coord(number)
        return self._coordinates[number]

    def _number(self, at: int | tuple[int, int]) -> int:
        return at if isinstance(at, int) else self.place(*at)

    def _of_this_block(self) -> dict[int, Any]:
        block = ir.InsertionPoint.current.block
        if self._block is None or block != self._block:
            self._known, self._coordinates, self._block = {}, {}, block
        return self._known
