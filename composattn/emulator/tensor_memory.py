"""A block's tensor memory: 128 lanes of 512 columns of 32 bits, its allocations and its ledger; a warp's tcgen05 units.

Facts: PTX ISA, "TensorCore 5th Generation Family Instructions" (addresses, allocation, which lanes a warp reaches, the
order of its asynchronous instructions). Multiplies that one thread issues are taken to run in the order of issue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from composattn.emulator.findings import Finding, OutOfBounds, TensorAllocation, TensorRace, UninitialisedTensor
from composattn.emulator.ledger import NOBODY, Ledger, Unordered

Array = np.ndarray[Any, Any]
LANES, COLUMNS = 128, 512
GROUP = 16  # lanes that are used together: a cell of the ledger is a column of so many lanes
FREE = NOBODY - 1  # in place of the last writer: in columns that nobody allocated


class EmulatedTensorMemory(Ledger):
    """An address is lane << 16 | column."""

    def __init__(self) -> None:
        super().__init__((LANES // GROUP, COLUMNS))
        self.writer[:] = FREE
        self.data = np.zeros((LANES, COLUMNS), np.uint32)
        self.values = self.data.view(np.float32)
        self.allocated: dict[int, int] = {}  # first column -> how many
        self.permit = True

    def cells(self, lane: int, lanes: int, column: int, columns: int) -> tuple[slice, slice]:
        """The cells of a box, which must lie in tensor memory."""
        if lane % GROUP or lane + lanes > LANES or column + columns > COLUMNS:
            raise OutOfBounds(f"tensor memory lanes {lane}..{lane + lanes}, columns {column}..{column + columns}")
        return slice(lane // GROUP, (lane + lanes + GROUP - 1) // GROUP), slice(column, column + columns)

    def room(self, columns: int) -> int | None:
        """The first column of a free run of so many, aligned to its size; None where there is none."""
        free = (self.writer[0] == FREE).reshape(-1, columns).all(1)
        return int(free.argmax()) * columns if free.any() else None

    def allocate(self, column: int, columns: int) -> None:
        self.allocated[column] = columns
        self.writer[:, column : column + columns] = NOBODY

    def free(self, column: int, columns: int, knows: Array) -> None:
        """Gives columns back. Whoever used them must be known to whoever does that."""
        if self.allocated.get(column) != columns:
            raise TensorAllocation(f"{columns} columns from {column} are freed; allocated are {self.allocated}")
        self.order_write((slice(None), slice(column, column + columns)), knows)
        del self.allocated[column]
        self.writer[:, column : column + columns] = FREE

    def race(self, e: Unordered, writer: str) -> Finding:
        return TensorRace(
            f"{self.place(e.cell)}, last {e.what} by {writer}, that nothing orders before this access ({e.count} times "
            f"{GROUP} lanes of a column)"
        )

    @staticmethod
    def place(cell: int) -> str:
        group, column = divmod(cell, COLUMNS)
        return f"tensor memory column {column} of lanes {group * GROUP}-{group * GROUP + GROUP - 1}"

    def _unusable(self, cells: Any, writer: Array) -> None:
        if writer.min() == FREE:
            raise TensorAllocation(f"{self.place(self.first(cells, writer == FREE))} is used and not allocated")

    def _unwritten(self, cells: Any, which: Array) -> None:
        raise UninitialisedTensor(f"{self.place(self.first(cells, which))} was never written")


@dataclass
class TensorUnits:
    """What works for one warp on tensor memory: multiplies, loads and stores, each an agent, and what is under way.

    Clocks count what was issued. `busy` are the registers that loads under way write, as bits.
    """

    agent: int  # of the multiplies; of the loads one more, of the stores two
    open: list[Any] = field(default_factory=list)  # multiplies that no commit covers
    groups: list[list[Any]] = field(default_factory=list)  # committed and not run, oldest first
    issued: int = 0
    moved: dict[str, int] = field(default_factory=lambda: {"ld": 0, "st": 0})
    moving: dict[str, list[Callable[[], None]]] = field(default_factory=lambda: {"ld": [], "st": []})
    busy: int = 0

    def agent_of(self, kind: str) -> int:
        return self.agent + {"mma": 0, "ld": 1, "st": 2}[kind]
