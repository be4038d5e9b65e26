"""Which kv tiles a work tile visits, asked inside a kernel: of the mask's bands, or of lists on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..graph.block_map import KeyLists
from .emit import Leaves, Mods
from .interval_shape import IntervalShape
from .kv_tiles import WHOLE, TileSequence, listed, visit
from .values import Fixed, smaller


@dataclasses.dataclass
class BandTiles(Fixed):
    """Tiles of the intervals that the mods compute at each work tile."""

    mods: Mods
    shapes: tuple[IntervalShape, ...]
    tile_n: int

    def of(self, leaves: Leaves, m: Any, split: tuple[Any, Any] = WHOLE) -> TileSequence:
        """The kv tiles of query tile `m`, or a part of them; `leaves` are those of the work tile."""
        return visit(self.mods.intervals(leaves), self.shapes, leaves.kv_len, self.tile_n, split)


@dataclasses.dataclass
class ListedTiles(Fixed):
    """Tiles of `KeyLists`, which are the captured tensors `slot` and `slot + 1` of the kernel."""

    slot: int

    def of(self, leaves: Leaves, m: Any, split: tuple[Any, Any] = WHOLE) -> TileSequence:
        """As of `BandTiles`."""
        counts, tiles = leaves.captured[self.slot], leaves.captured[self.slot + 1]
        # one list serves all batches or heads where there is one
        b, h = smaller(leaves.b, counts.shape[1] - 1), smaller(leaves.h, counts.shape[2] - 1)
        return listed(tiles[b, h, m, None], counts[0, b, h, m], counts[1, b, h, m], split)


def kv_tiles_of(
    mods: Mods, lists: KeyLists | None, shapes: tuple[IntervalShape, ...], tile_n: int
) -> BandTiles | ListedTiles:
    """Who knows the tiles; lists come behind all that the mods read."""
    return BandTiles(mods, shapes, tile_n) if lists is None else ListedTiles(len(mods.capture_slot))
