"""Tensor memory and the unit that multiplies into it: operands, products, commits, loads, stores and fences.

An address of tensor memory is lane << 16 | column. A warp reaches the 32 lanes of its number in its warpgroup; thread t
of a warpgroup has lane t, a row of a product.
"""

import dataclasses
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64
from cutlass._mlir.dialects import llvm, nvvm

from ...primitives.score_tile import ROW_PER_LANE, FragmentShape
from ...primitives.swizzled_tiles import swizzled
from ...primitives.values import Fixed
from .tiling import ROWS, STEP

_BLOCKS = {1: nvvm.CTAGroupKind.CTA_1, 2: nvvm.CTAGroupKind.CTA_2}
_AT_ONCE = 32  # columns of an instruction that loads or stores


def fragment_shape(columns: int) -> FragmentShape:
    """One thread of a product: a row, all its columns."""
    return FragmentShape((0,), tuple(range(columns)), ROW_PER_LANE, block=STEP)


# --- operands in shared memory ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Operand(Fixed):
    """Stages of tiles (`rows`, `columns`) in shared memory at `start`, as descriptors: 64 bits that say how they lie.

    The product sums over the columns, or over the rows (`by_rows`), 16 at a step.
    """

    start: Int32
    rows: int
    columns: int
    by_rows: bool = False

    @property
    def steps(self) -> int:
        return (self.rows if self.by_rows else self.columns) // STEP

    def at(self, stage: Any) -> Int32:
        """The stage as `descriptor` wants it: the lower half of its first step's."""
        wide = swizzled(self.columns)
        # from one block of columns to the next, which only who sums over rows is told
        leading = self.rows * wide * 2 if self.by_rows else 16
        size = self.rows * self.columns * 2
        return ((self.start & 0x3FFFF) >> 4) + stage * (size >> 4) + ((leading >> 4) << 16)

    def beside(self, column: int) -> "Operand":
        """These rows from `column` on, a multiple of the columns that lie together; summed over rows."""
        assert self.by_rows and column % swizzled(self.columns) == 0
        return dataclasses.replace(self, start=self.start + column * self.rows * 2)

    def step(self, number: int) -> int:
        """What a step adds to `at`."""
        wide = swizzled(self.columns)
        if self.by_rows:
            return STEP * wide * 2 * number >> 4
        block, column = divmod(STEP * number, wide)
        return block * (self.rows * wide * 2) + column * 2 >> 4

    def descriptor(self, at: Int32, step: int) -> Int64:
        wide = swizzled(self.columns)
        pattern = 2 if wide == 64 else 4  # 128 or 64 bytes
        upper = (8 * wide * 2 >> 4) | 1 << 14 | pattern << 29
        return Int64((at + self.step(step)).to(cutlass.Uint32)) | (upper << 32)


# --- products ---------------------------------------------------------------------------------------------------


def instruction(dtype, columns: int, by_rows: bool = False, left_by_rows: bool = False, rows: int = ROWS) -> int:
    """The word that says what a product multiplies: `rows` by `columns`, 16-bit numbers, summed in fp32.

    Whether the right operand, or the left one, is summed over its rows.
    """
    kind = {cutlass.Float16: 0, cutlass.BFloat16: 1}[dtype]
    return 1 << 4 | kind << 7 | kind << 10 | left_by_rows << 15 | by_rows << 16 | columns >> 3 << 17 | rows >> 4 << 24


def multiply(target: Int32, a: Int32 | Int64, b: Int64, words: int, accumulate: Any, blocks: int = 1) -> None:
    """One step, by one thread: the sums at `target` get a (in tensor memory, or a descriptor) times b.

    By two blocks each has half of the rows of a and of the sums, and half of the columns of b.
    """
    left = a.ir_value() if isinstance(a, Int64) else _pointer(a)
    nvvm.tcgen05_mma(
        nvvm.Tcgen05MMAKind.F16,
        _BLOCKS[blocks],
        _pointer(target),
        left,
        b.ir_value(),
        Int32(words).ir_value(),
        Boolean(accumulate).ir_value(),
    )


@dataclasses.dataclass(frozen=True)
class Commits:
    """The thread that issues products: arrives when all of them that it has issued are done."""

    arrivals: ClassVar[int] = 1

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        with cute.arch.elect_one():
            nvvm.tcgen05_commit((barriers + stage).llvm_ptr, group=_BLOCKS[1])


@dataclasses.dataclass(frozen=True)
class PairCommits:
    """`Commits` of products of a pair of blocks: arrives in both."""

    arrivals: ClassVar[int] = 1

    def arrive(self, barriers: cute.Pointer, stage: Int32, lane: Any) -> None:
        with cute.arch.elect_one():
            both = Int16(3).ir_value()
            nvvm.tcgen05_commit((barriers + stage).llvm_ptr, multicast_mask=both, group=_BLOCKS[2])


# --- tensor memory ----------------------------------------------------------------------------------------------


def _pointer(address: Int32):
    return llvm.inttoptr(llvm.PointerType.get(6), Int32(address).ir_value())


def allocate(slot: cute.Pointer, columns: int, blocks: int = 1) -> None:
    """One warp: asks for so many columns and writes the address of the first one to `slot`; nobody may ask again.

    One warp of each, where `blocks` multiply together.
    """
    cute.arch.alloc_tmem(columns, slot, is_two_cta=blocks == 2)
    cute.arch.relinquish_tmem_alloc_permit(is_two_cta=blocks == 2)


def free(address: Int32, columns: int, blocks: int = 1) -> None:
    """The warp that has asked for them."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.tmem, assumed_align=16)
    cute.arch.dealloc_tmem(pointer, columns, is_two_cta=blocks == 2)


def after_wait() -> None:
    """Behind a wait for others: what follows of tensor memory and products stays behind it."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


class Lane(Fixed):
    """The lane of tensor memory of a thread of `warp`; see `fused.kernels.unit_memory.matrix_memory`."""

    def __init__(self, memory: Int32, warp: Int32) -> None:
        self.address = memory + ((warp & 3) << 21)

    def read(self, column: Any, count: int) -> tuple:
        return _load(self.address + column, count, "ld")

    def read_with_maxima(self, column: Any, count: int) -> tuple:
        return _load(self.address + column, count, "ld.red")

    def write(self, column: Any, words: Any) -> None:
        address = self.address + column
        for start, size in _pieces(cute.size(words)):
            names = ", ".join(f"{{$r{1 + i}}}" for i in range(size))
            cute.arch.inline_ptx(
                f"tcgen05.st.sync.aligned.32x32b.x{size}.b32 [{{$r0}}], {{{names}}};",
                read_only_args=[address + start, *(words[start + i] for i in range(size))],
            )

    def written(self) -> None:
        cute.arch.fence_view_async_tmem_store()
        self.have_read()

    def have_read(self) -> None:
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)

    def heard(self) -> None:
        after_wait()


def _load(address: Int32, count: int, kind: str) -> tuple:
    """This thread's `count` columns; "ld.red": then the largest of each piece of them, for targets that have it.

    Loads and the wait for them are one piece of assembly, so that no compiler moves a use between them.
    """
    starts = _pieces(count)
    lines = []
    for n, (start, size) in enumerate(starts):
        names = ", ".join(f"{{$w{start + i}}}" for i in range(size))
        form, largest = (".max.f32", f" {{$w{count + n}}},") if kind == "ld.red" else (".b32", "")
        lines.append(f"tcgen05.{kind}.sync.aligned.32x32b.x{size}{form} {{{names}}},{largest} [{{$r{n}}}];")
    lines.append("tcgen05.wait::ld.sync.aligned;")
    return cute.arch.inline_ptx(
        "\n".join(lines),
        write_only_types=[Float32] * (count + (len(starts) if kind == "ld.red" else 0)),
        read_only_args=[address + start for start, _ in starts],
    )


def _pieces(count: int) -> list[tuple[int, int]]:
    """(first, how many) of the instructions that move `count` columns: powers of two."""
    found, start = [], 0
    while start < count:
        size = min(_AT_ONCE, 1 << (count - start).bit_length() - 1)
        found.append((start, size))
        start += size
    return found
