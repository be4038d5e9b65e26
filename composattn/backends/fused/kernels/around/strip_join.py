"""After a backward by strips of an image: gradients of keys that two strips have, added and rounded once."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .....primitives.values import choose, narrow
from ...planning.arguments import StripJoinArguments
from ...planning.plan_backward import StripJoinPlan
from ...tiles.architecture import Kernel

THREADS = 256
WIDE = 8  # columns of D that a thread reads at once: 16 bytes


class StripJoin(Kernel):
    """A thread per `WIDE` columns of one key: it reads what one or two strips have of it.

    Keys of a strip are twice as wide as strips are apart, so a column of the image is in the first half of one strip
    and in the second half of the strip before it. By torch's views this took a host 0.25 ms for each of dK and dV.
    """

    arguments = StripJoinArguments

    def __init__(self, plan: StripJoinPlan):
        self.plan, self.strips = plan, plan.strips

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        batch, heads, length, _ = given.dk.shape
        widest = max(self.plan.head_dim, self.plan.head_dim_v) // WIDE
        blocks = cute.ceil_div(length * widest, THREADS)
        self.kernel((given.dk_parts, given.dk), (given.dv_parts, given.dv), blocks).launch(
            grid=(blocks * heads * batch, 2, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, of_keys, of_values, blocks: Int32):
        number, which, _ = cute.arch.block_idx()
        place = number % blocks * THREADS + cute.arch.thread_idx()[0]
        if which == 0:
            self.join(self.plan.head_dim // WIDE, of_keys, place, number // blocks)
        else:
            self.join(self.plan.head_dim_v // WIDE, of_values, place, number // blocks)

    @cute.jit
    def join(self, across: cutlass.Constexpr[int], tensors, place: Int32, sequence: Int32):
        """One thread's columns; `across`: threads of a key, `sequence`: counts heads of all batch entries."""
        (parts, whole), strips = tensors, self.strips
        _, heads, length, _ = whole.shape
        key, chunk = place // across, place % across
        b, h = sequence // heads, sequence % heads
        if key < length:
            row, column = self.row_of(key // strips.columns), key % strips.columns + strips.before
            strip, within = column // strips.apart, column % strips.apart
            first = b * strips.count + strip, h, row * strips.wide + within
            second = b * strips.count + strip - 1, h, row * strips.wide + within + strips.apart
            total = cute.make_rmem_tensor(WIDE, Float32)
            total.fill(0.0)
            self.add(total, strip < strips.count, parts, first, chunk)
            self.add(total, (strip > 0) & (strip <= strips.count), parts, second, chunk)
            rounded = cute.make_rmem_tensor(WIDE, whole.element_type)
            narrow(rounded, total)
            cute.autovec_copy(rounded, cute.local_tile(whole[b, h, key, None], (WIDE,), (chunk,)))

    def row_of(self, row: Int32) -> Int32:
        """The row of strips that a row of the image is."""
        cut, above = self.strips.cut, self.strips.above
        return row + above if cut is None else choose(row == cut.at, Int32(cut.kv_row), row + above)

    @cute.jit
    def add(self, total, is_there: Boolean, parts, at, chunk: Int32):
        """What a strip has of the key, where there is such a strip."""
        if is_there:
            entry, h, row = at
            part = cute.make_rmem_tensor(WIDE, parts.element_type)
            cute.autovec_copy(cute.local_tile(parts[entry, h, row, None], (WIDE,), (chunk,)), part)
            for i in cutlass.range_constexpr(WIDE):
                total[i] = total[i] + part[i].to(Float32)
