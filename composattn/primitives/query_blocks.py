"""Kernels with a block per tile of queries: their grid, and which tile a block has.

Tiles, heads and sequences are the three dimensions of a grid. The second and the third of these take 65,535, so where
there are more heads or sequences all blocks lie `in_one_row`, in the first one, which takes 2^31 - 1.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from .tile_scheduler import Segment
from .values import Fixed


class QueryBlocks(Fixed):
    """One for each tile and head of a workspace (B, H, tiles, ...), or for each entry of `work` and head.

    So many for each, if tiles come in `parts`. Made on the host and, again, inside of the kernel.
    """

    def __init__(
        self, workspace: cute.Tensor, work: cute.Tensor | None, in_one_row: bool = False, parts: int = 1
    ) -> None:
        self.workspace, self.work, self.in_one_row, self.parts = workspace, work, in_one_row, parts

    @property
    def _counts(self) -> tuple[Any, Any, Any]:
        entries, heads, tiles = self.workspace.shape[:3]
        if self.work is None:
            return tiles * self.parts, heads, entries
        return self.work.shape[0] * self.parts, heads, 1

    @property
    def grid(self) -> tuple[Any, Any, Any]:
        """What is launched."""
        x, y, z = self._counts
        return (x * y * z, 1, 1) if self.in_one_row else (x, y, z)

    def counts(self) -> tuple[Any, Any, Any]:
        """Numbers of tiles, heads and sequences, inside of the kernel."""
        return tuple(map(Int32, self._counts)) if self.in_one_row else cute.arch.grid_dim()  # type: ignore[return-value]

    def place(self) -> tuple[Any, Any, Any]:
        """Which tile, head and sequence this block has."""
        if not self.in_one_row:
            return cute.arch.block_idx()  # type: ignore[no-any-return]
        number, (x, y, _) = cute.arch.block_idx()[0], self.counts()
        return number % x, number // x % y, number // (x * y)

    def tile(self) -> tuple[Int32, Int32, Int32]:
        """(number of the tile, or part, in its sequence, head, sequence) of this block; sequence -1: there is no work.

        The last heads come first: the main kernel goes from the first to the last, and what was written before it, or
        is read behind it, is in L2 so far as it fits.
        """
        number, head, b = self.place()
        _, heads, entries = self.counts()
        head, b = heads - 1 - head, entries - 1 - b
        if self.work is None:
            return number, head, b
        if self.parts == 1:
            return self.work[number, 1], head, self.work[number, 0]
        entry = number // self.parts
        return self.work[entry, 1] * self.parts + number % self.parts, head, self.work[entry, 0]

    def segment(self) -> Segment | None:
        """The segment of which that tile is, if tiles begin with segments."""
        number, _, _ = self.place()
        return Segment.of(self.work, number // self.parts)
