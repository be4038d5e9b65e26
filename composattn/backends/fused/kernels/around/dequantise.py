"""Keys and values of 8 bits to 16-bit numbers in memory, exactly: what a forward of many rows then reads."""

import functools
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .....primitives.dequantise import PIECE, Widening
from .....primitives.values import move, smaller
from ...planning.arguments import DequantiseArguments
from ...planning.plan_around import DequantisePlan
from ...tiles.architecture import Kernel

THREADS = 256
AT_ONCE = 4  # pieces of a thread on their way


class Dequantise(Kernel):
    """Each block has `THREADS * AT_ONCE` pieces of k or of v, as they lie in memory; neighbouring lanes neighbours."""

    arguments = DequantiseArguments

    def __init__(self, plan: DequantisePlan):
        self.plan = plan

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        blocks = self.blocks(given.k) + self.blocks(given.v)
        self.kernel(*given).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    def blocks(self, numbers):
        return Int32(cute.ceil_div(_pieces(numbers), THREADS * AT_ONCE))

    @cute.kernel
    def kernel(self, k, v, wide_k, wide_v):
        number, of_keys = cute.arch.block_idx()[0], self.blocks(k)
        if number < of_keys:
            self.dequantise(k, wide_k, number)
        else:
            self.dequantise(v, wide_v, number - of_keys)

    @cute.jit
    def dequantise(self, source, target, number):
        """The pieces of a block; behind the last one there are none, and the last is read again."""
        widened = Widening(source.element_type, target.element_type)
        pieces = _pieces(source)
        first = Int64(number) * (THREADS * AT_ONCE) + cute.arch.thread_idx()[0]
        held = [_words(source, smaller(first + i * THREADS, pieces - 1)) for i in range(AT_ONCE)]
        loaded = [cute.make_rmem_tensor(words.layout, Int32) for words in held]
        for words, into in zip(held, loaded, strict=True):
            move(words, into)
        for i in cutlass.range_constexpr(AT_ONCE):
            numbers = cute.make_rmem_tensor((4, 1), Int32)
            for half in cutlass.range_constexpr(2):
                numbers[2 * half], numbers[2 * half + 1] = widened(loaded[i][half])
            if first + i * THREADS < pieces:
                move(numbers, _words(target, first + i * THREADS))


def _pieces(numbers) -> Int64:
    """How many there are, also where their numbers are too many for 32 bits."""
    return functools.reduce(operator.mul, map(Int64, numbers.shape)) // PIECE


def _words(numbers, piece) -> cute.Tensor:
    """A piece of them as 32-bit words."""
    wide = PIECE * numbers.element_type.width // 8
    start = cute.make_ptr(Int32, numbers.iterator.toint() + piece * wide, cute.AddressSpace.gmem, assumed_align=wide)
    return cute.make_tensor(start, cute.make_layout((wide // 4, 1)))
