"""A product's sums in fp32 memory in the order of their registers: no row or column has to be found.

The sums of a product lie with groups of `THREADS` threads, and each group has a part of the memory: its threads' chunks
of 16 bytes, chunk j of thread t at 4 * (j * THREADS + t) of the part. Whoever reads them must have registers of the
same product.
"""

import cutlass.cute as cute
from cutlass import Float32

from .branches import when
from .values import aligned, move

_ADD = "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}"
THREADS = 128  # four warps, whose sums a product of any tensor core so far leaves


def add_part(target: cute.Tensor, registers: cute.Tensor, group, thread) -> None:
    """Registers added to memory that other blocks add to as well."""
    count = cute.size(registers)
    start = target.iterator + first_number(count, group, thread)
    for j in range(count // 4):
        cute.arch.inline_ptx(
            f"{_ADD};", read_only_args=[start + j * 4 * THREADS, *(registers[4 * j + e] for e in range(4))]
        )


def add_chunks_if(condition, address, registers: cute.Tensor) -> None:
    """`add_part` from a thread's own address on, where a number is not 0.

    Also in a branch where that is known: beside additions under no predicate the compiler takes the block for one whose
    threads part, and waits for every mbarrier in place, asleep (3 to 8 % of a backward).
    """
    for j in range(cute.size(registers) // 4):
        cute.arch.inline_ptx(
            f"{{\n\t.reg .pred p;\n\tsetp.ne.s32 p, {{$r5}}, 0;\n\t@p {_ADD};\n\t}}",
            read_only_args=[address + j * 16 * THREADS, *(registers[4 * j + e] for e in range(4)), condition],
        )


def first_number(count: int, group, thread):
    """Where the first chunk of a thread with `count` numbers lies."""
    return group * (count * THREADS) + thread * 4


def store_part(target: cute.Tensor, registers: cute.Tensor, group, thread) -> None:
    """Registers to memory that nobody else writes."""
    move(_fours(registers.iterator, registers, 4), _of_thread(target, registers, group, thread))


def load_part(source: cute.Tensor, registers: cute.Tensor, group, thread) -> None:
    """What `add_part` and `store_part` have left."""
    move(_of_thread(source, registers, group, thread), _fours(registers.iterator, registers, 4))


def clear(memory: cute.Tensor, count: int, threads: int, thread) -> None:
    """Zeros in the first `count` numbers of memory, by so many `threads`."""
    zeros = cute.make_rmem_tensor(4, Float32)
    zeros.fill(0.0)
    chunks, rest = divmod(count, 4 * threads)
    assert rest % 4 == 0, "numbers that whole accesses do not clear"
    if chunks:
        place = cute.make_layout((4, chunks), stride=(1, 4 * threads))
        source = cute.make_tensor(zeros.iterator, cute.make_layout((4, chunks), stride=(1, 0)))
        move(source, cute.make_tensor(aligned(memory.iterator + thread * 4), place))
    if rest:
        four = cute.make_layout((4, 1), stride=(1, 0))
        behind = cute.make_tensor(aligned(memory.iterator + (chunks * 4 * threads + thread * 4)), four)
        when(thread < rest // 4, lambda: move(cute.make_tensor(zeros.iterator, four), behind))


def _of_thread(memory: cute.Tensor, registers: cute.Tensor, group, thread) -> cute.Tensor:
    start = memory.iterator + first_number(cute.size(registers), group, thread)
    return _fours(aligned(start), registers, 4 * THREADS)


def _fours(start: cute.Pointer, registers: cute.Tensor, apart: int) -> cute.Tensor:
    return cute.make_tensor(start, cute.make_layout((4, cute.size(registers) // 4), stride=(1, apart)))
