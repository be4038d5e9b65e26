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
import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

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


class Piece(NamedTuple):
    """8 numbers of a lane: of which of its warp's strips, how many of all warps' strips come before that one, and
    after how many times `height` rows and `blocks` blocks of the strip."""

    round: int
    before: int
    down: int
    across: int


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

        The bytes of the next pieces are read before these are written: no compiler moves a read over a write.
        """
        groups, strips = self.groups(warps), self.rows // STRIP
        ahead = self.read(groups[0], source, offsets, first)
        for n in cutlass.range_constexpr(len(groups)):
            held = ahead
            if const_expr(n + 1 < len(groups)):
                ahead = self.read(groups[n + 1], source, offsets, first)
            group = groups[n]
            if const_expr(group[-1].round * warps + warps <= strips):
                self.write(group, held, target, offsets, first)
            else:
                if first + group[-1].before < strips:
                    self.write(group, held, target, offsets, first)

    def groups(self, warps: int) -> list[list[Piece]]:
        """A lane's pieces, `AT_ONCE` or fewer together; of the last round, which some warps may lack, alone."""
        strips = self.rows // STRIP
        whole = strips // warps
        rounds = [range(whole), range(whole, -(-strips // warps))]
        across = self.columns // (self.blocks * self.wide)
        places = list(itertools.product(range(STRIP // self.height), range(across)))
        parts = ([Piece(n, n * warps, *place) for n in some for place in places] for some in rounds)
        return [pieces[i : i + AT_ONCE] for pieces in parts for i in range(0, len(pieces), AT_ONCE)]

    def read(self, pieces: list[Piece], source: Any, offsets: Any, first: Any) -> list[Any]:
        """Their bytes, two words of each; behind the last strip those of that are read."""
        found: list[Any] = []
        for piece in pieces:
            strip = smaller(first + piece.before, self.rows // STRIP - 1)
            inside = piece.down * self.height * self.columns + piece.across * self.blocks * self.wide
            pair = _get(source + strip * (STRIP * self.columns) + offsets[0] + inside)
            found += [pair[0], pair[1]]
        return found

    def write(self, pieces: list[Piece], held: list[Any], target: Any, offsets: Any, first: Any) -> None:
        """These as 16-bit numbers: all of them, then their stores, which else would wait for each other's registers."""
        widened, apart = Widening(self.kind, self.dtype), self.blocks * self.rows * self.wide * 2
        numbers = []
        for n in range(len(pieces)):
            words = cute.make_rmem_tensor(4, Int32)
            for half in range(2):
                words[2 * half], words[2 * half + 1] = widened(held[2 * n + half])
            numbers.append(words)
        for piece, words in zip(pieces, numbers, strict=True):
            inside = (first + piece.before) * (STRIP * 2 * self.wide) + piece.across * apart
            put_words(target + offsets[1][piece.down] + inside + piece.down * self.height * 2 * self.wide, words)


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
