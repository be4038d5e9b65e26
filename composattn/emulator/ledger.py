"""Who wrote and who read each cell of a memory last, and when: what races are found by.

Accesses are stamped (agent, clock). An agent is whatever may work on its own: a warp, a unit that works for it, the
copies that complete on one barrier. What an access may rely on is a vector of clocks, one an agent (`knows`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from composattn.emulator.findings import Finding

Array = np.ndarray[Any, Any]
NOBODY = -1  # in place of the last writer: not written yet


class Ledger:
    """Stamps of one memory. `cells` in calls is any index of an array of this shape."""

    def __init__(self, shape: Any) -> None:
        self.shape = shape
        self.writer = np.full(shape, NOBODY, np.int32)
        self.written = np.zeros(shape, np.int32)
        self.reads: dict[int, Array] = {}

    def order_read(self, cells: Any, knows: Array) -> None:
        """Raises unless all last writes of `cells` are known to a reader whose clocks are `knows`."""
        writer, written = self.writer[cells], self.written[cells]
        if writer.size and writer.min() < 0:
            self._unusable(cells, writer)
            self._unwritten(cells, writer == NOBODY)
        seen = written <= knows[writer]
        if not seen.all():
            raise Unordered(self, cells, writer, written, ~seen, "written")

    def order_write(self, cells: Any, knows: Array) -> None:
        """Raises unless all earlier writes and reads of `cells` are known to a writer."""
        writer, written = self.writer[cells], self.written[cells]
        if writer.size and writer.min() < NOBODY:
            self._unusable(cells, writer)
        late = (writer >= 0) & (written > knows[writer])
        if late.any():
            raise Unordered(self, cells, writer, written, late, "written")
        for agent, clocks in self.reads.items():
            read = clocks[cells]
            late = read > knows[agent]
            if late.any():
                raise Unordered(self, cells, np.full(late.shape, agent), read, late, "read")

    def stamp_read(self, cells: Any, agent: int, clock: int) -> None:
        if agent not in self.reads:
            self.reads[agent] = np.zeros(self.shape, np.int32)
        self.reads[agent][cells] = clock

    def stamp_write(self, cells: Any, agent: Any, clock: Any) -> None:
        self.writer[cells] = agent
        self.written[cells] = clock

    def first(self, cells: Any, which: Array) -> int:
        """The number of the first of `cells` that is marked."""
        numbers = np.arange(self.writer.size).reshape(self.shape)[cells]
        return int(np.broadcast_to(numbers, which.shape)[which][0])

    # --- what a memory says of its cells --------------------------------------------------------------------

    def race(self, e: Unordered, writer: str) -> Finding:
        """The finding for an access that nothing orders behind that of the agent named `writer`."""
        raise NotImplementedError

    def _unusable(self, cells: Any, writer: Array) -> None:
        """Raises if cells are not free to be used (their writer is below NOBODY)."""

    def _unwritten(self, cells: Any, which: Array) -> None:
        """Raises: the marked cells are read and nobody wrote them."""
        raise NotImplementedError


class Unordered(Finding):
    """An access and an earlier one that nothing orders, before its agents have names."""

    def __init__(self, ledger: Ledger, cells: Any, agents: Array, clocks: Array, late: Array, what: str) -> None:
        self.ledger, self.what = ledger, what
        self.cell, self.count = ledger.first(cells, late), int(late.sum())
        self.agent, self.clock = int(agents[late][0]), int(clocks[late][0])
        super().__init__(f"{self.count} cells from {self.cell}, last {what} by agent {self.agent}")
