"""Where the tiles of a sequence lie in a workspace that has whole tiles: statistics of rows, sums of dQ, turns.

Dense workspaces are (B, H, tiles, ...). Packed ones are (1, H, total // tile + B, ...), and sequence b begins at tile
start // tile + b: it ends at most at (start + length) // tile + b + 1, where the next one begins: no two overlap, and
no sum over the sequences is needed to find a place. So do the segments of a dense sequence lie in its entry.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from .seqlen import DenseSequence, PackedSequence, Sequence
from .strip_rows import StripSequence
from .values import Fixed


@dataclasses.dataclass
class PaddedTiles(Fixed):
    """Entry `b` of a workspace's first mode, and which of the entry's tiles is the sequence's first one."""

    b: Any
    first: Any

    @staticmethod
    def of(sequence: Sequence, b: Any, tile: int) -> PaddedTiles:
        """The padded tiles of sequence `b`, of `tile` rows each."""
        if isinstance(sequence, DenseSequence):
            segment = sequence.segment
            return PaddedTiles(b, 0 if segment is None else segment.start // tile + segment.number)
        if isinstance(sequence, StripSequence):
            return PaddedTiles(b, 0)
        assert isinstance(sequence, PackedSequence), "keys in pages have no workspaces"
        return PaddedTiles(0, sequence.start // tile + b)


def statistics_of(workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int) -> cute.Tensor:
    """(2, B, H, rows padded to tiles) in a workspace of fp32 numbers, from `first` on; dq_accum: (B, H, tiles, ...)."""
    entries, heads, tiles, _ = dq_accum.shape
    rows = cute.assume(Int64(tiles) * tile, divby=tile)
    strides = (entries * heads * rows, heads * rows, rows, 1)
    layout = cute.make_layout((2, entries, heads, Int32(rows)), stride=strides)
    return cute.make_tensor(workspace.iterator + first, layout)


def flags_of(workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int, numbers: Any) -> cute.Tensor:
    """int32 (`numbers`,) behind those statistics: of `cleared_of` or `claims_of`, then of `written_of`."""
    start = cute.recast_ptr(_behind_statistics(workspace, first, dq_accum, tile), dtype=Int32)
    return cute.make_tensor(start, cute.make_layout(numbers))


def cleared_of(workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int) -> cute.Tensor:
    """int32 (B, H), how many tiles of dQ have been cleared: behind those statistics."""
    entries, heads, _, _ = dq_accum.shape
    start = cute.recast_ptr(_behind_statistics(workspace, first, dq_accum, tile), dtype=Int32)
    return cute.make_tensor(start, cute.make_layout((entries, heads), stride=(heads, 1)))


def claims_of(workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int, parts: int) -> cute.Tensor:
    """int32 (B, H, tiles, parts), who has been at each part of a tile of dQ: in the same place."""
    entries, heads, tiles, _ = dq_accum.shape
    start = cute.recast_ptr(_behind_statistics(workspace, first, dq_accum, tile), dtype=Int32)
    strides = heads * tiles * parts, tiles * parts, parts, 1
    return cute.make_tensor(start, cute.make_layout((entries, heads, tiles, parts), stride=strides))


def written_of(
    workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int, flags: Any, parts: Any, heads: Any
) -> cute.Tensor:
    """int32 (2, strips, `heads`, `parts`), which parts of dK and dV strips have written: behind all else.

    `flags` as of `shares_of`.
    """
    strips = dq_accum.shape[0]
    start = cute.recast_ptr(_behind_flags(workspace, first, dq_accum, tile, flags), dtype=Int32)
    strides = strips * heads * parts, heads * parts, parts, 1
    return cute.make_tensor(start, cute.make_layout((2, strips, heads, parts), stride=strides))


def shares_of(
    workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int, flags: Any, sums: Any, work: Any
) -> cute.Tensor:
    """fp32 (`sums`, blocks that have a part of each), of all blocks of `QueryBlocks`: behind all else.

    `flags`: numbers before it, for each head.
    """
    entries, heads, tiles, _ = dq_accum.shape
    blocks = entries * heads * tiles if work is None else heads * work.shape[0]
    start = _behind_flags(workspace, first, dq_accum, tile, flags)
    return cute.make_tensor(start, cute.make_layout((sums, blocks // sums), stride=(blocks // sums, 1)))


def _behind_flags(workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int, flags: Any) -> cute.Pointer:
    return _behind_statistics(workspace, first, dq_accum, tile) + dq_accum.shape[0] * dq_accum.shape[1] * flags


def _behind_statistics(workspace: cute.Tensor, first: int, dq_accum: cute.Tensor, tile: int) -> cute.Pointer:
    entries, heads, tiles, _ = dq_accum.shape
    return workspace.iterator + first + Int64(2 * tile) * tiles * heads * entries


def counter_of(workspace: cute.Tensor) -> cute.Tensor:
    """The counter at the beginning of that workspace: int32 (1,), of tiles of keys; the next number counts others."""
    return cute.make_tensor(cute.recast_ptr(workspace.iterator, dtype=Int32), cute.make_layout(1))
