"""The order in which tiles of queries (in the backward, of keys) run: of the kernel's own, or by a table on the device.

`orders.json` says which: rows without a table are the order of a kernel that is given none, the last queries first, or
the first keys.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ....analysis.bands import TileInterval
from ....analysis.strips import Strips
from ....call.problem import Problem
from ..tiles.segments import Segments, most_tiles
from ..tiles.work import WorkTables, ascends, descends, entries, segment_tables, work_tables
from .tables import first, tables_of

ORDERS = tables_of(Path(__file__).with_name("orders.json"))["orders"]  # in words; and what a table has, if there is one


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of so many `rows` for each batch entry of `heads`, by `columns`; of a backward's keys, which are its rows.

    `visited`: which columns; None: lists say so. `fixed`: dQ is summed in their order. `at_once`: so many run.
    `strips`: of an image, which share gradients of keys.
    """

    problem: Problem
    visited: tuple[TileInterval, ...] | Segments | None
    rows: int
    columns: int
    heads: int
    at_once: int
    of_keys: bool = False
    fixed: bool = False
    strips: Strips | None = None

    @property
    def longest_first(self) -> bool:
        """Whether the kernel's own order is."""
        is_so = descends if self.of_keys else ascends
        return isinstance(self.visited, tuple) and bool(is_so(self.problem, self.visited, self.rows, self.columns))

    @property
    def run_at_once(self) -> bool:
        p = self.problem
        segments = isinstance(self.visited, Segments)
        tiles = p.batch * most_tiles(p.q_len, self.rows) if segments else entries(p, self.rows)
        return tiles * self.heads <= self.at_once

    def ordered(self) -> tuple[str, WorkTables | None]:
        """Their order in words, and the tables that say so, if any."""
        lie = "segments" if isinstance(self.visited, Segments) else self.problem.layout.q
        said = first(ORDERS, self, lie=lie, wanted=self.problem.schedule.order)
        words, order = said["words"], said.get("table")
        if order is None:
            return words, None
        if isinstance(self.visited, Segments):
            words += "; tiles begin where the mask falls apart"
            return words, segment_tables(self.problem, self.rows, order, self.visited, self.of_keys)
        return words, work_tables(self.problem, self.visited, self.rows, self.columns, order, self.strips)
