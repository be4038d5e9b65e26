"""What a table says of a tile of keys: which queries it visits, and what captured tensors say where its keys agree.

Documents by ids leave each key the queries of its document: two numbers that tensors say. Where a tile has keys of one
document they are the same for all, so that a test reads nothing. `fused.tiles.segments` makes the table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..graph.expr import Expr
from .emit_ops import convert
from .segment_entry import RUN, WIDE
from .values import Fixed


@dataclasses.dataclass
class KeyTileMetadata(Fixed):
    """An entry of the table; `reads`: what it says of each key."""

    entry: cute.Tensor
    reads: tuple[Expr, ...]

    @property
    def queries(self) -> tuple[Any, Any, Any, Any]:
        """(begin, end, full_begin, full_end) of the queries that the tile visits, as of a `TileInterval`."""
        begin, end, full_begin, full_end = (Int32(self.entry[WIDE + n]) for n in range(RUN))
        return begin, end, full_begin, full_end

    def agreed(self) -> AgreedReads:
        at = WIDE + RUN
        said = {read: convert(self.entry[at + 1 + n], read.dtype) for n, read in enumerate(self.reads)}
        return AgreedReads(self.entry[at] != 0, said)


@dataclasses.dataclass
class AgreedReads(Fixed):
    """Whether all keys of the tile read the same, and the limits hold; and what they read."""

    all_keys: Boolean
    said: dict[Expr, Any]
