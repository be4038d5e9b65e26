"""Tiles of 8-bit floats in shared memory as tiles of 16-bit ones, exactly, by warps that do nothing else.

A tile of bytes lies row by row, as copies with no swizzle bring it. A lane takes 8 of its numbers at a time: 16 lanes
read 128 bytes that lie together (or of rows whose banks differ), 8 lanes write what a swizzled row of 128 has, so that
neither reads nor writes meet in a bank.

To fp16 an instruction converts two e4m3, and e5m2 are the upper halves of fp16. To bf16 exponent and mantissa are moved
to their places, beside the sign, and a product with a power of two makes up for the other bias: a permutation of bytes,
which repeats the sign, a shift, a mask and the product, for two numbers. All finite codes come out exact, those below
the least normal number too. Codes of NaN and infinity have no such place in bf16 and come out as the numbers that
follow the largest: 480, 65536 and more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .swizzled_tiles import at_column, put_words, swizzled
from .values import Fixed, smaller

PIECE = 8  # numbers that a lane converts at a time
STRIP = 8  # rows that a warp converts at a time
LANES = 32
AT_ONCE = 4  # pieces of a lane on their way
MANTISSA = {cutlass.Float8E4M3FN: (3, 7), cutlass.Float8E5M2: (2, 15)}  # bits of it, and the bias of the exponent


def byte_layout(rows: int, columns: int, stages: int | None = None) -> cute.Layout:
    """A tile of bytes, row by row; of several one behind the other."""
    if stages is None:
        return cute.make_layout((rows, columns), stride=(columns, 1))
    return cute.make_layout((rows, columns, stages), stride=(columns, 1, rows * columns))


@dataclasses.dataclass(frozen=True)
class Widening(Fixed):
    """8-bit floats of type `kind` as numbers of `dtype`, 16 bits, exactly where they are finite."""

    kind: Any
    dtype: Any

    def __call__(self, word: Any) -> tuple[Any, Any]:
        """Four numbers of 8 bits as two words of 16-bit ones, in their order."""
        if self.dtype is cutlass.BFloat16:
            return self._as_bf16(word, 0x9180), self._as_bf16(word, 0xB3A2)
        if self.kind is cutlass.Float8E5M2:
            return tuple(Int32(cute.arch.prmt(word, Int32(0), Int32(order))) for order in (0x1404, 0x3424))  # type: ignore[return-value]
        return cute.arch.inline_ptx(  # type: ignore[no-any-return]
            "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\n"
            "cvt.rn.f16x2.e4m3x2 {$w0}, low;\ncvt.rn.f16x2.e4m3x2 {$w1}, high;\n}",
            write_only_types=[Int32, Int32],
            read_only_args=[word],
        )

    def _as_bf16(self, word: Any, order: int) -> Any:
        """Two numbers, `order`: which bytes, each behind its sign eight times over."""
        mantissa, bias = MANTISSA[self.kind]
        shift = 7 - mantissa
        spread = Int32(cute.arch.prmt(word, Int32(0), Int32(order)))
        bits = (spread << shift) & _of_both(0x8000 | 0x7F << shift)
        power = (127 + 127 - bias) << 7
        return cute.arch.inline_ptx(
            f"{{\n.reg .b32 power;\nmov.b32 power, {power << 16 | power};\nmul.rn.bf16x2 {{$w0}}, {{$r0}}, power;\n}}",
            write_only_types=[Int32],
            read_only_args=[bits],
        )


@dataclasses.dataclass(frozen=True)
class Bytes(Fixed):
    """How a tile of `rows` x `columns` numbers of type `kind` becomes one of `dtype`, 16 bits, as `tile_layout` has it.

    `together`: of so many columns that tile is swizzled, where it is wider.
    """

    kind: Any
    dtype: Any
    rows: int
    columns: int

    @property
    def wide(self) -> int:
        """Columns of a block of the 16-bit tile."""
        return swizzled(self.columns)

    @property
    def blocks(self) -> int:
        """Blocks that a warp converts side by side: two where rows of one alone would meet in a bank."""
        return 2 if self.columns % (2 * self.wide) == 0 else 1

    @property
    def across(self) -> int:
        """Lanes along a row."""
        return self.blocks * self.wide // PIECE

    @property
    def height(self) -> int:
        """Rows that a warp converts with one piece a lane."""
        return LANES // self.across

    def lane_offsets(self, lane: Any) -> tuple[Any, list[Any]]:
        """In bytes from the first of a strip: where a lane reads, and where it writes in each `height` rows."""
        row, column = lane // self.across, lane % self.across * PIECE
        target = at_column(row, column, self.rows, self.columns)
        phases = (i * self.height * 2 * self.wide >> 7 & self.wide // 8 - 1 for i in range(STRIP // self.height))
        return row * self.columns + column, [target ^ (phase << 4) if phase else target for phase in phases]

    @cute.jit  # type: ignore[untyped-decorator]
    def convert(
        self, source: Any, target: Any, offsets: cutlass.Constexpr, first: Any, warps: cutlass.Constexpr
    ) -> None:
        """A lane's part of every `warps`-th strip from the `first` on, bytes at `source` to 16 bits at `target`.

        The bytes of a strip are read before the one before it is written: no compiler moves a read over a write.
        """
        strips, step, places = self.rows // STRIP, STRIP * self.columns, self.places
        for part in cutlass.range_constexpr(0, len(places), AT_ONCE):
            some = places[part : part + AT_ONCE]
            held = cute.make_rmem_tensor(2 * len(some), Int32)
            self.read(source + first * step, offsets, some, held)
            for strip in cutlass.range(first, strips, warps, unroll=1):
                numbers = cute.make_rmem_tensor(2 * len(some), Int32)
                for i in cutlass.range_constexpr(2 * len(some)):
                    numbers[i] = held[i]
                self.read(source + smaller(strip + warps, strips - 1) * step, offsets, some, held)
                self.write(numbers, target + strip * (STRIP * 2 * self.wide), offsets, some)

    @property
    def places(self) -> list[tuple[int, int]]:
        """A strip's pieces of a lane: after how many times `height` rows, after how many times `blocks` blocks."""
        across = self.columns // (self.blocks * self.wide)
        return [(i, j) for i in range(STRIP // self.height) for j in range(across)]

    def read(self, source: Any, offsets: Any, places: list[tuple[int, int]], held: cute.Tensor) -> None:
        """The bytes of these pieces of a lane, two words of each."""
        for n, (i, j) in enumerate(places):
            pair = _get(source + offsets[0] + (i * self.height * self.columns + j * self.blocks * self.wide))
            held[2 * n], held[2 * n + 1] = pair[0], pair[1]

    def write(self, numbers: cute.Tensor, target: Any, offsets: Any, places: list[tuple[int, int]]) -> None:
        """These pieces as 16-bit numbers."""
        widened, apart = Widening(self.kind, self.dtype), self.blocks * self.rows * self.wide * 2
        for n, (i, j) in enumerate(places):
            words = cute.make_rmem_tensor(4, Int32)
            for half in range(2):
                words[2 * half], words[2 * half + 1] = widened(numbers[2 * n + half])
            put_words(target + offsets[1][i] + (i * self.height * 2 * self.wide + j * apart), words)


def _of_both(half: int) -> Int32:
    """A word with the same 16 bits twice."""
    word = half << 16 | half
    return Int32(word - (1 << 32) if word >> 31 else word)


def _get(address: Any) -> cute.Tensor:
    """Two words from 8 bytes of shared memory."""
    found = cute.make_rmem_tensor(2, Int32)
    place = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=8)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), found)
    return found
