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
from .values import Fixed, choose

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
    """8-bit floats of type `kind` as numbers of `dtype`, 16 bits, exactly where they are finite.

    `turned`: a word has two numbers of each of two pairs, first those of the even places.
    """

    kind: Any
    dtype: Any
    turned: bool = False

    def __call__(self, word: Any) -> tuple[Any, Any]:
        """Four numbers of 8 bits as two words of 16-bit ones, in their order, or first the even ones."""
        pairs = ((0, 2), (1, 3)) if self.turned else ((0, 1), (2, 3))
        if self.dtype is cutlass.BFloat16:  # each number below its sign eight times
            return tuple(self._as_bf16(word, b << 8 | a | (8 | b) << 12 | (8 | a) << 4) for a, b in pairs)  # type: ignore[return-value]
        if self.kind is cutlass.Float8E5M2:  # each above a byte of zeros
            return tuple(Int32(cute.arch.prmt(word, Int32(0), Int32(0x0404 | b << 12 | a << 4))) for a, b in pairs)  # type: ignore[return-value]
        if self.turned:
            word = Int32(cute.arch.prmt(word, Int32(0), Int32(0x3120)))
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

    `parts`: in so many parts, of equally many rows each.
    """

    kind: Any
    dtype: Any
    rows: int
    columns: int
    parts: int = 1

    @property
    def strips(self) -> int:
        """How many strips, of `STRIP` rows each, a part has."""
        return self.rows // self.parts // STRIP

    @property
    def part_of_bytes(self) -> int:
        """How long a part of the tile of bytes is, in bytes."""
        return self.strips * STRIP * self.columns

    @property
    def part_of_numbers(self) -> int:
        """How far a part of the 16-bit tile lies behind the one before it, in bytes."""
        return self.strips * STRIP * 2 * self.wide

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

    def first_strip(self, part: int, number: Any, warps: int) -> Any:
        """The first strip of a part that warp `number` converts: they take turns at those of all parts."""
        before = part * self.strips % warps
        return choose(number < before, number + (warps - before), number - before) if before else number

    @cute.jit  # type: ignore[untyped-decorator]
    def convert(
        self, source: Any, target: Any, offsets: cutlass.Constexpr, first: Any, warps: cutlass.Constexpr
    ) -> None:
        """A lane's share of every `warps`-th strip of a part from the `first` on, from `source` to 16 bits at `target`.

        The bytes of the next pieces are read before these are written: no compiler moves a read over a write.
        """
        groups, strips = self.groups(warps), self.strips
        held = [self.registers(group) for group in groups]
        for n in cutlass.range_constexpr(-1, len(groups)):
            if const_expr(n + 1 < len(groups)):
                if const_expr(groups[n + 1][-1].before + warps <= strips):
                    self.read(groups[n + 1], held[n + 1], source, offsets, first)
                else:
                    if first + groups[n + 1][-1].before < strips:
                        self.read(groups[n + 1], held[n + 1], source, offsets, first)
            if const_expr(n >= 0):
                if const_expr(groups[n][-1].before + warps <= strips):
                    self.write(groups[n], held[n], target, offsets, first)
                else:
                    if first + groups[n][-1].before < strips:
                        self.write(groups[n], held[n], target, offsets, first)

    def groups(self, warps: int) -> list[list[Piece]]:
        """A lane's pieces, `AT_ONCE` or fewer together; of the last round, which some warps may lack, alone."""
        whole = self.strips // warps
        rounds = [range(whole), range(whole, -(-self.strips // warps))]
        across = self.columns // (self.blocks * self.wide)
        places = list(itertools.product(range(STRIP // self.height), range(across)))
        parts = ([Piece(n, n * warps, *place) for n in some for place in places] for some in rounds)
        return [pieces[i : i + AT_ONCE] for pieces in parts for i in range(0, len(pieces), AT_ONCE)]

    def registers(self, pieces: list[Piece]) -> list[cute.Tensor]:
        """Two words for the bytes of each."""
        return [cute.make_rmem_tensor(2, Int32) for _ in pieces]

    def read(self, pieces: list[Piece], held: list[cute.Tensor], source: Any, offsets: Any, first: Any) -> None:
        """Their bytes."""
        for piece, words in zip(pieces, held, strict=True):
            inside = piece.down * self.height * self.columns + piece.across * self.blocks * self.wide
            _get(source + (first + piece.before) * (STRIP * self.columns) + offsets[0] + inside, words)

    def write(self, pieces: list[Piece], held: list[cute.Tensor], target: Any, offsets: Any, first: Any) -> None:
        """These as 16-bit numbers: all of them, then their stores, which else would wait for each other's registers."""
        widened, apart = Widening(self.kind, self.dtype), self.blocks * self.rows * self.wide * 2
        numbers = []
        for n in range(len(pieces)):
            words = cute.make_rmem_tensor(4, Int32)
            for half in range(2):
                words[2 * half], words[2 * half + 1] = widened(held[n][half])
            numbers.append(words)
        for piece, words in zip(pieces, numbers, strict=True):
            inside = (first + piece.before) * (STRIP * 2 * self.wide) + piece.across * apart
            put_words(target + offsets[1][piece.down] + inside + piece.down * self.height * 2 * self.wide, words)


def _of_both(half: int) -> Int32:
    """A word with the same 16 bits twice."""
    word = half << 16 | half
    return Int32(word - (1 << 32) if word >> 31 else word)


def _get(address: Any, words: cute.Tensor) -> None:
    """Two words from 8 bytes of shared memory."""
    place = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=8)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), words)
