"""Which kv positions a query tile can see, as expressions that a kernel evaluates once per tile.

The contract with every backend is `TileInterval`: four int32 expressions in the leaves `b`, `h`, `first`, `last`
(first and last query row of the tile, both inside the sequence), `q_len`, `kv_len`, scalars and captured tensors:

    begin, end              every visible kv of the tile lies in [begin, end)
    full_begin, full_end    every kv in [full_begin, full_end) is visible from every row of the tile: no test

Ends may lie outside [0, kv_len] and full ranges may be inverted (empty): whoever loops clamps. A mask is a tuple of
such intervals, in ascending order; a kv tile that two intervals touch is visited once, and partial tiles are tested
with the whole mask, so overlaps cost nothing but are never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from .expr import Expr, const, index


@dataclass(frozen=True, eq=False)
class TileInterval:
    """One run of kv positions that a query tile visits; see the module's page for the four ends."""

    begin: Expr
    end: Expr
    full_begin: Expr
    full_end: Expr


EVERYTHING = (TileInterval(const(0), index("kv_len"), const(0), index("kv_len")),)
"""No mask: all of kv, all of it without a test."""

UNKNOWN = (TileInterval(const(0), index("kv_len"), const(0), const(0)),)
"""Nothing is known of the mask: all of kv, all of it with the test."""


def tile_intervals(mask: Expr) -> tuple[TileInterval, ...]:
    """What a query tile visits under `mask`."""
    return UNKNOWN
