"""Row-major tiles of numbers in shared memory, swizzled so that neither rows nor columns meet in a bank."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

SWIZZLES = {128: 3, 64: 2, 32: 1}  # of so many bytes: bits of an address that are changed


def swizzled(columns: int, element_bytes: int = 2) -> int:
    """How many columns lie together in shared memory: the most, up to 128 bytes of them, that divide `columns`.

    Where none do, all: rows of an odd multiple of 16 bytes lie one after the other, and meet in no bank as they are.
    """
    return next((wide // element_bytes for wide in SWIZZLES if columns * element_bytes % wide == 0), columns)


def tile_layout(
    rows: int, columns: int, stages: int | None = None, together: int | None = None, element_bytes: int = 2
):
    """Shared-memory layout of row-major tiles: blocks of `swizzled` columns, one after the other.

    `together`: of so many columns, where those are read apart.
    """
    wide = swizzled(together or columns, element_bytes)
    pattern = cute.make_swizzle(SWIZZLES.get(wide * element_bytes, 0), 4, 3)
    atom = cute.make_composed_layout(pattern, 0, cute.make_layout((8, wide), stride=(wide, 1)))
    shape = (rows, columns) if stages is None else (rows, columns, stages)
    return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))


def tensor_of(start: cute.Pointer, layout, dtype, *modes: tuple[int, int]) -> cute.Tensor:
    """Shared memory from `start` on as tiles of a swizzled layout, in further modes (size, stride)."""
    outer = layout.outer
    for size, stride in modes:
        outer = cute.append(outer, cute.make_layout(size, stride=stride))
    return cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=dtype), outer)


def at_column(row: Any, column: Any, rows: int, columns: int) -> Any:
    """At which byte of such a tile `column` of `row` lies, a multiple of 8."""
    wide = swizzled(columns)
    line = row * (2 * wide)
    block, column = column // wide, column % wide
    return line + block * (rows * wide * 2) + (((line >> 7 & wide // 8 - 1) << 4) ^ column * 2)


def put_words(address: Int32, words) -> None:
    """Four words to 16 bytes of shared memory."""
    cute.autovec_copy(words, _words_at(address))


def get_words(address: Int32) -> cute.Tensor:
    """Four words from 16 bytes of shared memory."""
    words = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(_words_at(address), words)
    return words


def _words_at(address: Int32) -> cute.Tensor:
    place = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(place, cute.make_layout(4))
