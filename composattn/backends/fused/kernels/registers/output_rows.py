"""A group's rows of one work tile with their output in registers, and how that leaves."""

import abc
from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from .....primitives.branches import when
from .....primitives.bulk_stores import send
from .....primitives.exponential_units import ExponentialUnits
from .....primitives.online_softmax import OnlineSoftmax, rescale_rows, rescale_rows_if_needed
from .....primitives.register_chunks import THREADS
from .....primitives.remembered import Remembered
from .....primitives.row_lines import LINES, store_lines
from .....primitives.values import Fixed, narrow, narrowed, smaller
from ...planning.plan import AnyForwardTiling
from ..forward_call import ForwardCall
from ..query_rows import QueryRows, of_part
from .groups import ThreadGroup


class OutputProducts(Fixed, abc.ABC):
    """S = Q Kᵀ and O += P V of a group, whose threads have two rows each, and of each 8 columns a pair."""

    output_shape: Any
    adds_probabilities = False  # whether the output's product does, in columns of its own, so that the softmax need not
    row_scales: cute.Tensor | None = None  # that the softmax multiplies its own by, known with the first scores

    @abc.abstractmethod
    def probabilities(self) -> cute.Tensor | None:
        """Registers for them, as the left operand of the output's product; None where they lie in shared memory."""

    @abc.abstractmethod
    def rows_of(self, sums: cute.Tensor) -> cute.Tensor:
        """A product's registers as (row, column)."""

    @abc.abstractmethod
    def remembered(self, sums: cute.Tensor) -> Remembered:
        """These sums, cached for who reads a number more than once."""

    @abc.abstractmethod
    def wait(self, running: int) -> None:
        """Until no more than so many of those issued last are running."""

    @abc.abstractmethod
    def put_output(self, rounded: cute.Tensor, shared: cute.Tensor, thread: Any) -> None:
        """The output's registers to its tile in shared memory."""


class RowGroup(ThreadGroup):
    """A group with `rows` of a kernel's query rows, which stays for all work tiles of its block."""

    def __init__(self, kernel: Any, block: Any, thread: Any, scale_log2: Float32) -> None:
        super().__init__(block, cute.arch.make_warp_uniform(thread // THREADS), thread % THREADS)
        self.plan, self.tiling, self.heads, self.shape = kernel.plan, kernel.tiling, kernel.heads, kernel.fragment
        self.rows, self.arithmetic, self.scale_log2 = kernel.rows, kernel.arithmetic, scale_log2
        self.products: Any = kernel.products(block, self.number)
        # row and column of this thread's first element in a tile of scores
        self.row = (self.thread // 32) * self.shape.warp_rows + self.shape.lane_row(self.lane)
        self.column = self.first_column() + self.shape.lane_column(self.lane)

    def first_column(self) -> Any:
        """The group's first column, where groups share the columns of a tile of scores."""
        return 0


class OutputRows(QueryRows[AnyForwardTiling]):
    """Output tOrO, probabilities tOrP if registers have them, and the softmax's statistics of the rows from `first` on.

    `me` is a `RowGroup`. It has all columns of the output, or as many as others that have the same rows; `beside` of
    these have the columns before.
    """

    beside: Any = 0
    tiles: Any  # how many of keys are summed in all, known with the first one

    def __init__(self, me: Any, mods: Any, work: Any, leaves: Any, first: Any) -> None:
        self.me, self.block, self.products = me, me.block, me.products
        super().__init__(me.tiling, me.shape, me.heads, mods, work, leaves, first, me.column)
        # fresh registers for each work tile: values carried from tile to tile would make ptxas wait for every
        # product (its warning C7510)
        self.tOrO = cute.make_rmem_tensor(me.products.output_shape, Float32)
        self.tOrP = me.products.probabilities()
        self.output = self.products.rows_of(self.tOrO)
        highest, units = me.plan.return_max_scores, self.units
        least, threshold, offset = mods.least_score, me.tiling.threshold, me.tiling.offset
        factors = self.block.dtype if self.block.dtype.width == 16 else None
        adds, row_scales = not me.products.adds_probabilities, me.products.row_scales
        of_rows = highest, units, me.arithmetic, least, threshold, factors, offset, adds, row_scales
        self.softmax = self.softmax_type(me.shape, self.mods.scaled(me.scale_log2), *of_rows)
        self.rescale = cute.make_rmem_tensor(self.shape.rows, Float32)
        # here, under the wait for Q: read at the end, a block waits 1.2 µs for them with nothing beside (H200)
        self.sink_of_row = self.sinks()
        self.nowhere = self.tile(None, Int32(0))
        self.value_of_row = [self.mods.value_factor(self.nowhere, r) for r in range(self.shape.rows)]
        self.softmax.reset()
        self.rescale.fill(1.0)
        self.summed = cute.make_rmem_tensor(1, Int32)  # how many of the tiles are
        self.summed.fill(0)

    def count_tile(self, first: bool) -> None:
        """One more of the tiles was summed; behind the first one it is known how large sums are."""
        self.summed[0] = self.summed[0] + 1
        if first and self.me.tiling.threshold.sums_read == "rescaled":
            self.note_sums()

    def rescale_output(self) -> None:
        threshold = self.me.tiling.threshold
        if threshold.most:
            rescale_rows_if_needed(
                self.output, self.rescale, self.note_sums if threshold.sums_read == "rescaled" else None
            )
        else:
            rescale_rows(self.output, self.rescale)

    def note_sums_if_doubled(self) -> None:
        if self.me.tiling.threshold.sums_read == "doubled":
            when((self.summed[0] & (self.summed[0] - 1)) == 0, self.note_sums)

    def note_sums(self) -> None:
        """Reads sums for the rescale threshold; half of a first tile with a mask is visible on average."""
        if self.me.tiling.threshold.share is not None:
            hidden = 0.0 if self.me.plan.program.mask is None else 0.5
            in_all, by_now = Float32(self.tiles) - hidden, Float32(self.summed[0]) - hidden
            self.softmax.note_sums(in_all * cute.arch.rcp_approx(by_now))

    @property
    def units(self) -> ExponentialUnits:
        """What computes exponentials."""
        return self.me.tiling.exponential

    @property
    def softmax_type(self) -> type[OnlineSoftmax]:
        return OnlineSoftmax

    @abc.abstractmethod
    def row_tile(self) -> Any:
        """Which of the output's tiles of rows these are."""

    def store(self, call: ForwardCall) -> cute.Tensor:
        """Rows, normalised, to the output; gives LSE of each."""
        row_lse = self.normalize()
        if self.me.plan.direct_store:
            self.store_rows(call)
        else:
            self.store_output(call)
        return row_lse

    def normalize(self) -> cute.Tensor:
        """The output's rows; gives LSE of each."""
        normalizer = cute.make_rmem_tensor(self.shape.rows, Float32)
        row_lse = cute.make_rmem_tensor(self.shape.rows, Float32)
        self.softmax.finish(normalizer, row_lse, self.sink_of_row, self.mods.kept_factor)
        self.multiply(normalizer)
        return row_lse

    def multiply(self, normalizer: cute.Tensor) -> None:
        """The output's rows by these numbers, and by what values of all keys are multiplied by."""
        for r, factor in enumerate(self.value_of_row):
            if factor is not None:
                normalizer[r] = normalizer[r] * factor
        rescale_rows(self.output, normalizer)
        if not self.mods.scales_channels:
            return
        there, first = self.me.plan.head_dim_v, self.beside * self.tiling.output_columns + self.me.lane % LINES * 2
        for r in range(self.shape.rows):
            for c in range(cute.size(self.output, mode=[1])):
                channel = smaller(first + (c // 2 * 8 + c % 2), there - 1)  # those behind are not stored
                self.output[r, c] = self.output[r, c] * self.mods.value_factor(self.nowhere, r, channel)

    def store_output(self, call: ForwardCall) -> None:
        """Through shared memory; the copy leaves out what is no query."""
        sO = self.block.sO[None, None, self.me.number]
        rounded = narrowed(self.tOrO, sO.element_type)
        self.wait_store_read()
        self.products.put_output(rounded, sO, self.me.thread)
        send(self.outputs(call, sO), self.me.sync_group)

    def outputs(self, call: ForwardCall, sO: cute.Tensor) -> Iterator[tuple[Any, ...]]:
        work: Any = self.work
        box = (self.me.heads.box(self.me.rows), self.tiling.output_columns)
        gO, tile = work.queries.stored(call.tensors.out, work.h, box, self.row_tile(), self.beside)
        yield self.me.is_first_warp(), call.tmas.out, sO, gO, tile

    def store_rows(self, call: ForwardCall) -> None:
        """From registers: few rows, or few parts, or where shared memory has no room."""
        part = of_part(call.tensors.out, self.work.part)
        columns, there = self.tiling.output_columns, self.me.plan.head_dim_v
        first = self.beside * columns
        blocks = smaller(columns, there - first) // 8 if there < self.tiling.dv else columns // 8
        for r in range(self.shape.rows):
            q, h, inside = self.row_place(r)
            row = self.work.queries.head(part, h)
            if self.tiling.output_direct and not self.me.plan.is_split:  # all columns, of 16 bits
                store_lines(row, q, self.output[r, None], self.me.lane, blocks, inside)
            else:
                _store_row(row, q, self.output[r, None], first // 2 + self.me.lane % 4, blocks, inside)

    def wait_store_read(self) -> None:
        """Before O's shared memory is written again: the last tile's store has read it."""
        if self.tiling.persistent:
            self.me.drain_stores()
            self.me.sync_group()


@cute.jit
def _store_row(target, q: Int32, values, pair: Int32, blocks: Any, inside: Boolean):
    """A thread's pairs of columns of row `q`, from `pair` on one of each 8 columns; `blocks` such are there."""
    if inside:
        for c in cutlass.range_constexpr(cute.size(values) // 2):
            if const_expr(not isinstance(blocks, int)):
                if c < blocks:
                    _store_pair(target, q, values, pair, c)
            elif const_expr(c < blocks):
                _store_pair(target, q, values, pair, c)


def _store_pair(target, q: Int32, values, pair: Int32, c: int) -> None:
    two = cute.make_rmem_tensor(2, Float32)
    two[0], two[1] = values[2 * c], values[2 * c + 1]
    if target.element_type is not Float32:
        rounded = cute.make_rmem_tensor(2, target.element_type)
        narrow(rounded, two)
        two = rounded
    cute.autovec_copy(two, cute.local_tile(target[q, None], (2,), (4 * c + pair,)))
