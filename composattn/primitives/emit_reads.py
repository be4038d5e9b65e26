"""Numbers of captured tensors: one, or those of a thread's tile of scores ahead of the scores.

Of a tile the numbers' places differ by constants, so where all exist one address serves many: a load is one instruction
with an immediate, where one number takes fourteen.
"""

from __future__ import annotations

import abc
import functools
import itertools
import operator
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8

from ..graph.expr import DType
from .emit_ops import KIND, maximum, minimum
from .remembered import Remembered
from .values import Fixed, choose, move, plain

WORD = 32  # bits


def read_element(tensor: cute.Tensor, indices: list[Any], dtype: DType) -> Any:
    """One element of a captured tensor; negative positions count from the end, positions outside are clamped.

    Clamped, not trusted: padding rows and columns of a tile read too, and must stay inside the allocation.
    """
    return _typed(_element(tensor, indices), dtype)


def _typed(value: Any, dtype: DType) -> Any:
    """A tensor's number in the type that the graph has for it."""
    if dtype is DType.BOOL:
        return value != 0 if not isinstance(value, Boolean) else value
    return value.to(KIND[dtype])


def _element(tensor: cute.Tensor, indices: list[Any]) -> Any:
    where = _inside(tensor, indices)
    return tensor[tuple(where)] if where else tensor[0]


def _inside(tensor: cute.Tensor, indices: list[Any]) -> list[Any]:
    return [_clamped(i, tensor.shape[mode]) for mode, i in enumerate(indices)]


def _clamped(i: Any, size: Any) -> Any:
    if isinstance(i, int):
        return i if i >= 0 else size + i
    size = plain(Int64(size) if isinstance(i, Int64) else Int32(size))
    last = size - 1
    i = choose(i < 0, i + size, i)
    return Int32(minimum(maximum(i, 0), last))


class TileReads(Fixed, abc.ABC):
    """Numbers of a captured tensor at `indices`, moved along some modes by each of the sorted `offsets` of a mode.

    Whether all of them exist, and those along the last of these modes lie side by side, is asked at run time.
    """

    def __init__(self, tensor: cute.Tensor, indices: list[Any], offsets: dict[int, list[int]], dtype: DType) -> None:
        self.tensor, self.indices, self.offsets, self.dtype = tensor, indices, offsets, dtype
        self.places = {place: n for n, place in enumerate(itertools.product(*offsets.values()))}
        exist = []
        for mode, moved in offsets.items():
            exist += [indices[mode] + moved[0] >= 0, indices[mode] + moved[-1] < Int32(tensor.shape[mode])]
        self.side_by_side = functools.reduce(operator.and_, exist) & (tensor.stride[max(offsets)] == 1)

    @abc.abstractmethod
    def __getitem__(self, place: tuple[int, ...]) -> Any:
        """The number at an offset of each mode."""

    @abc.abstractmethod
    def read_from_one_address(self) -> None:
        """Where they lie side by side."""

    @abc.abstractmethod
    def read_one_by_one(self) -> None:
        """Wherever they lie."""

    def _moved(self, place: tuple[int, ...]) -> list[Any]:
        where = list(self.indices)
        for mode, offset in zip(self.offsets, place, strict=True):
            where[mode] = where[mode] + offset
        return where

    def _pointer(self, place: tuple[int, ...]) -> cute.Pointer:
        """To one of them, if it exists."""
        where, moved = _inside(self.tensor, self.indices), self._moved(place)
        for mode in self.offsets:
            where[mode] = moved[mode]
        return cute.domain_offset(tuple(where), self.tensor).iterator


class Neighbours(TileReads):
    """Reads along one mode of a tile, in the types of `read_element`."""

    def __init__(self, tensor: cute.Tensor, indices: list[Any], offsets: dict[int, list[int]], dtype: DType) -> None:
        super().__init__(tensor, indices, offsets, dtype)
        self.found = cute.make_rmem_tensor(len(self.places), KIND[dtype])
        _read_either(self, self.side_by_side)
        self._remembered = Remembered(self.found, lambda *place: self.places[place])

    def __getitem__(self, place: tuple[int, ...]) -> Any:
        return self._remembered[self.places[place]]

    def read_from_one_address(self) -> None:
        (offsets,) = self.offsets.values()
        first, last = offsets[0], offsets[-1]
        line = cute.make_tensor(self._pointer((first,)), cute.make_layout(last - first + 1))
        for n, offset in enumerate(offsets):
            self.found[n] = line[offset - first].to(KIND[self.dtype])

    def read_one_by_one(self) -> None:
        (mode,), where = self.offsets, _inside(self.tensor, self.indices)
        size = self.tensor.shape[mode]
        for (offset,), n in self.places.items():
            where[mode] = _clamped(self.indices[mode] + offset, size)
            self.found[n] = _typed(self.tensor[tuple(where)], self.dtype)


class Pairs(TileReads):
    """Reads along two modes of a tile, one address for each position of the first.

    Where offsets come in neighbours, as a thread's columns do, a load brings two numbers. They wait as they lie in
    memory, two of 16 bits a register: 48 of a bias at 128 x 96 pairs take 24.
    """

    def __init__(self, tensor: cute.Tensor, indices: list[Any], offsets: dict[int, list[int]], dtype: DType) -> None:
        super().__init__(tensor, indices, offsets, dtype)
        (self.first, self.rows), (_, self.columns) = offsets.items()
        by_twos = zip(self.columns[::2], self.columns[1::2], strict=False)
        self.together = 2 if len(self.columns) % 2 == 0 and all(b == a + 1 for a, b in by_twos) else 1
        kind = Uint8 if tensor.element_type is Boolean else tensor.element_type
        self.bytes_together = self.together * kind.width // 8
        self.found = cute.make_rmem_tensor((len(self.columns), len(self.rows)), kind)
        if self.together > 1:
            whole = self._pointer((self.rows[0], self.columns[0])).toint() % self.bytes_together == 0
            self.side_by_side = self.side_by_side & whole & (tensor.stride[self.first] % self.together == 0)
        _read_either(self, self.side_by_side)

    @staticmethod
    def registers(tensor: cute.Tensor, count: int) -> int:
        """What so many numbers take."""
        return -(-count * tensor.element_type.width // WORD)

    def __getitem__(self, place: tuple[int, ...]) -> Any:
        row, column = place
        value = self.found[self.columns.index(column), self.rows.index(row)]
        return value != 0 if self.dtype is DType.BOOL else value.to(KIND[self.dtype])

    def read_from_one_address(self) -> None:
        layout = cute.make_layout((self.together, 1))
        for r, row in enumerate(self.rows):
            start, found = self._pointer((row, self.columns[0])), self.found[None, r].iterator
            for c in range(0, len(self.columns), self.together):
                at = start + (self.columns[c] - self.columns[0])
                kind = self.found.element_type
                known = cute.make_ptr(kind, at.toint(), at.memspace, assumed_align=self.bytes_together)
                move(cute.make_tensor(known, layout), cute.make_tensor(found + c, layout))

    def read_one_by_one(self) -> None:
        for (r, row), (c, column) in itertools.product(enumerate(self.rows), enumerate(self.columns)):
            self.found[c, r] = _element(self.tensor, self._moved((row, column))).to(self.found.element_type)


@cute.jit
def _read_either(numbers: TileReads, side_by_side: Boolean):
    if side_by_side:
        numbers.read_from_one_address()
    else:
        numbers.read_one_by_one()
