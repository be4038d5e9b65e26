"""Which keys each tile of queries sees, and how many pairs that is: what division and movement are made of.

Tiles are rows of queries that stay together; grains are runs of keys, finer than tiles, that are fetched whole. Both
are read off the mask as kernels' tile lists are: by its bands and by interval arithmetic, so every callable has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import errors
from ..analysis.intervals import Tiles
from ..analysis.tile_lists import Extent, KeyLists, TileLists
from ..analysis.tiles import EMPTY, FULL, PARTIAL
from ..graph.expr import Dep, Expr, captures, const

TILES_A_RANK = 64  # what imbalance of a few percent needs
MOST_TILES = 8192  # of all ranks, while each has eight
LARGEST_TILE, SMALLEST_TILE = 1024, 128
MOST_TILES_A_RANK = 1024
MOST_GRAINS = 8192
MOST_ROWS = 512  # that extremes of captured tensors are known over, see `analysis.range_extremes`


@dataclass(frozen=True)
class Visits:
    """seen: bool (tiles, grains), on the CPU; pairs: float64 (tiles,), those of all batches and heads together.

    A tile that a mask may see is counted whole where all of it is seen, and half where it is tested.
    """

    tile: int
    grain: int
    seen: torch.Tensor
    pairs: torch.Tensor

    @property
    def tiles(self) -> int:
        return self.seen.shape[0]

    @property
    def grains(self) -> int:
        return self.seen.shape[1]

    def joined(self, other: Visits) -> Visits:
        """Visits of two attentions of one model together: tiles that either sees, and the work of both."""
        return Visits(self.tile, self.grain, self.seen | other.seen, self.pairs + other.pairs)


def tile_for(seq_len: int, ranks: int, asked: int | None = None) -> int:
    """Rows of a tile: the largest divisor of a rank's rows that leaves enough tiles to balance with.

    Raises: `IndivisibleSequence`.
    """
    if seq_len % ranks or not seq_len:
        more = -(-max(seq_len, 1) // (ranks * SMALLEST_TILE)) * ranks * SMALLEST_TILE
        raise errors.IndivisibleSequence(
            f"{seq_len} positions can't be shared by {ranks} ranks evenly; pad the sequence to {more}"
        )
    rows = seq_len // ranks
    if asked is not None:
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1 or rows % asked:
            raise errors.IndivisibleSequence(
                f"tile is {asked!r}; the {rows} rows of a rank must be whole tiles of it, such as of "
                f"{tile_for(seq_len, ranks)}"
            )
        return asked
    count = max(8, min(TILES_A_RANK, MOST_TILES // ranks))
    target = min(LARGEST_TILE, max(rows // count, min(SMALLEST_TILE, rows // 8), 1))
    tile = max(d for d in range(1, target + 1) if rows % d == 0)
    if rows // tile > MOST_TILES_A_RANK:
        more = -(-rows // SMALLEST_TILE) * SMALLEST_TILE * ranks
        raise errors.IndivisibleSequence(
            f"{rows} rows of a rank divide into {rows // tile} tiles of {tile} at the least; pad the sequence to {more}"
        )
    return tile


def grain_for(seq_len: int, tile: int) -> int:
    """Rows that are fetched together: as few as a table of all of them allows."""
    return min(d for d in range(1, tile + 1) if tile % d == 0 and (d == tile or seq_len // d <= MOST_GRAINS))


def visits_of(mask: Expr | None, seq_len: int, tile: int, grain: int, batch: int = 1, heads: int = 1) -> Visits:
    """What `mask` lets each tile of queries see. Waits for the device that captured tensors lie on."""
    tiles, grains = seq_len // tile, seq_len // grain
    held = [] if mask is None else captures(mask)
    device = held[0].tensor.device if held else torch.device("cpu")
    if mask is None or mask is const(True):
        kinds = torch.full((1, 1, tiles, grains), FULL, dtype=torch.int8, device="cpu")
        times = batch * heads
    else:
        extent = Extent(seq_len, seq_len, batch, heads, device)
        known = _Kinds if KeyLists.reason_for(mask, (tile, grain)) else _OfBands
        rows = max(d for d in range(1, min(tile, MOST_ROWS) + 1) if tile % d == 0)
        kinds = known(mask, extent, (rows, grain)).of_call()[0].cpu()
        times = (1 if mask.deps & Dep.B else batch) * (1 if mask.deps & Dep.H else heads)
    kinds = kinds.flatten(0, 1)
    parts = seq_len // kinds.shape[1]  # tiles are asked in parts where they are large
    pairs = kinds.sum((0, 2), dtype=torch.float64).view(tiles, -1).sum(1) * (parts * grain / FULL * times)
    return Visits(tile, grain, (kinds != EMPTY).any(0).view(tiles, -1, grains).any(1), pairs)


class _Kinds(TileLists):
    """The kinds of tiles themselves, int8 (B|1, H|1, Tq, Tkv)."""

    ranks = (4,)
    dims = (2,)

    @staticmethod
    def reason_for(mask: Expr, tile: tuple[int, int]) -> str | None:
        return None

    def rows_of(self, found: torch.Tensor, grid: Tiles) -> tuple[torch.Tensor]:
        return (found,)

    def lists(self, *parts: torch.Tensor) -> Sequence[torch.Tensor]:  # type: ignore[override]
        return parts


class _OfBands(_Kinds):
    """Kinds of tiles where the mask's bands say all: no tile is evaluated by itself."""

    def kinds_of(self, grid: Tiles) -> torch.Tensor:
        return torch.full((1, 1, grid.count(0), grid.count(1)), PARTIAL, dtype=torch.int8, device=grid.device)
