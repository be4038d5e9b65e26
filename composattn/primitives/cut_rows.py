"""Bulk copies of tiles, also of an image whose last row is cut: whole rows by one descriptor, the last one by another.

A descriptor bounds each of its dimensions for itself. Of an image whose last row has fewer columns, one descriptor
would bring what lies behind the tensor, or leave the row out. So copies see a tensor twice, as whole rows and as the
last row. That row begins a tile, whose number tells which of the two copies brings it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from .values import Fixed


class CutRows(NamedTuple):
    """A tensor as copies see it, or the copies' descriptors: for whole rows, and for the last one."""

    whole: Any
    last: Any

    @property
    def shape(self) -> Any:
        return self.whole.shape


@dataclasses.dataclass
class TilesOfCut(Fixed):
    """The tiles of both, of which number `at` is the last row's."""

    whole: cute.Tensor
    last: cute.Tensor
    at: int

    def each(self, do: Any) -> TilesOfCut:
        return TilesOfCut(do(self.whole), do(self.last), self.at)


def bulk_copy(op: Any, tensor: Any, layout: Any, box: Any) -> tuple[Any, Any]:
    """A bulk copy, and the tensor as it sees it; `layout`: of a box in shared memory. On the host."""
    if isinstance(tensor, CutRows):
        (whole, of_whole), (last, of_last) = [cpasync.make_tiled_tma_atom(op, t, layout, box) for t in tensor]
        return CutRows(whole, last), CutRows(of_whole, of_last)
    return cpasync.make_tiled_tma_atom(op, tensor, layout, box)  # type: ignore[no-any-return]


def descriptors(copies: Any) -> list[Any]:
    """All descriptors of bulk `copies`, of which None are there where nothing is copied."""
    parts = [descriptors(copy) if isinstance(copy, tuple) else [copy] for copy in copies if copy is not None]
    return [tma for part in parts for tma in part]


def partition(tma: Any, shared: cute.Tensor, tiles: Any, modes: int = 2) -> tuple[cute.Tensor, Any]:
    """(copy, stage or nothing) of shared memory and (copy, tile) of the tensor, for tiles of so many dimensions."""
    if isinstance(tma, CutRows):
        target, whole = partition(tma.whole, shared, tiles.whole, modes)
        return target, TilesOfCut(whole, partition(tma.last, shared, tiles.last, modes)[1], tiles.at)
    return cpasync.tma_partition(  # type: ignore[no-any-return]
        tma, 0, cute.make_layout(1), cute.group_modes(shared, 0, modes), cute.group_modes(tiles, 0, modes)
    )


def load(tma: Any, tiles: Any, number: Any, shared: cute.Tensor, bar: cute.Pointer, stage: Any = None) -> None:
    """Starts the copy of a tile of `partition` into a stage of shared memory, or all of it; it completes on `bar`."""
    if isinstance(tma, CutRows):
        _load_cut(tma, tiles, Int32(number), shared if stage is None else shared[None, stage], bar)
    else:
        source = tiles[None, number]
        cute.copy(tma, source, shared if stage is None else shared[None, stage], tma_bar_ptr=bar)


@cute.jit
def _load_cut(tma: cutlass.Constexpr, tiles: cutlass.Constexpr, number: Int32, target, bar):
    if number == tiles.at:
        cute.copy(tma.last, tiles.last[None, number], target, tma_bar_ptr=bar)
    else:
        cute.copy(tma.whole, tiles.whole[None, number], target, tma_bar_ptr=bar)


def store(mine: Any, tma: Any, source: cute.Tensor, tiles: Any, number: Any) -> None:
    """Starts the copy of shared memory to a tile of `partition`, where this warp is to."""
    if isinstance(tma, CutRows):
        _store_cut(mine, tma, source, tiles, number)
    else:
        _store_if(mine, tma, source, tiles[None, number])


@cute.jit
def _store_if(mine: Boolean, tma, source, target):
    if mine:
        cute.copy(tma, source, target)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store_cut(mine: Boolean, tma: cutlass.Constexpr, source, tiles: cutlass.Constexpr, number: Int32):
    if mine:
        if number == tiles.at:
            cute.copy(tma.last, source, tiles.last[None, number])
        else:
            cute.copy(tma.whole, source, tiles.whole[None, number])
        cute.arch.cp_async_bulk_commit_group()
