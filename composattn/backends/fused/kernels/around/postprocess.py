"""After the backward kernel: the fp32 sums of dQ, scaled and rounded, into the tensor."""

import abc
from typing import Any, Generic

import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from .....primitives.cut_rows import bulk_copy
from .....primitives.padded_tiles import PaddedTiles
from .....primitives.query_blocks import QueryBlocks
from .....primitives.register_chunks import THREADS, load_part
from .....primitives.strip_rows import in_copies, rows_of
from .....primitives.swizzled_tiles import tile_layout
from ...planning.arguments import PostprocessArguments
from ...planning.plan_backward import AnyTiling, PostprocessPlan
from ...tiles.architecture import Kernel
from ..chain import overlaps, wait_for_former
from ..rounding import Exit, RowSums, Sums, is_first_warp
from .sink_sums import SinkSums

COLUMNS = 32  # of dQ in a thread's registers


class Postprocess(Kernel, Generic[AnyTiling]):
    """A block per query tile, or part of one, `groups` of threads with a piece of it each."""

    arguments = PostprocessArguments
    groups: int
    parts = 1  # of a query tile, one behind the other, which have a block each

    def __init__(self, plan: PostprocessPlan[AnyTiling]):
        self.plan, self.tiling = plan, plan.tiling

    def layout(self) -> Any:
        """The layout of a tile of dQ in shared memory."""
        return tile_layout(self.rows, self.tiling.d)

    @property
    def rows(self) -> int:
        return self.tiling.tile_m // self.parts

    @property
    def threads(self) -> int:
        return self.groups * THREADS

    @abc.abstractmethod
    def sums(self) -> Sums:
        """The sums of dQ, as a group of the main kernel has left them."""

    @abc.abstractmethod
    def part(self, shared: cute.Tensor, group: Any) -> cute.Tensor:
        """A group's part of the tile, as its `sums` have it."""

    def blocks(self, dq_accum: cute.Tensor, work: cute.Tensor | None) -> QueryBlocks:
        return QueryBlocks(dq_accum, work, self.plan.in_one_row, self.parts)

    @cute.jit
    def __call__(self, stream, *arguments):
        given = self.arguments(*arguments)
        self.dtype = given.dq.element_type
        layout = self.layout()
        queries, _ = rows_of(self.plan.layout, given.dq, given.dq, given.sequences)
        tma, tensor = self.output(given.dq, queries, layout)
        sinks = SinkSums.of(self.plan, given)
        self.kernel(tma, tensor, layout, given.dq_accum, given.scale, queries, given.query_tiles, sinks).launch(
            grid=self.blocks(given.dq_accum, given.query_tiles).grid,
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=overlaps(self.plan.target),
        )

    def output(self, given: cute.Tensor, queries: Any, layout: Any) -> tuple[Any, cute.Tensor]:
        """The copy by which tiles of dQ leave, and dQ as that copy sees it."""
        dq = queries.for_stores(given, self.rows) if self.plan.has_segments else queries.for_copies(given)
        box = in_copies(queries, self.rows, self.tiling.d)
        return bulk_copy(cpasync.CopyBulkTensorTileS2GOp(), dq, layout, box)

    @cute.kernel
    def kernel(self, tma, tensor, layout, dq_accum, scale, queries, work, sinks):
        wait_for_former(self.plan.target)  # for the main kernel's sums
        if const_expr(sinks is not None):
            sinks.add_up(self.blocks(dq_accum, work))
        tile, head, b = self.blocks(dq_accum, work).tile()
        of_tiles = tma, tensor, layout, dq_accum, scale
        if const_expr(work is None):
            self.finish(*of_tiles, queries.sequence(b), tile, head, b)
        else:
            if b >= 0:
                sequence = queries.sequence(b).within(self.blocks(dq_accum, work).segment())
                self.finish(*of_tiles, sequence, tile, head, b)

    @cute.jit
    def finish(self, tma, tensor, layout, dq_accum, scale, sequence, tile, head, b):
        padded = PaddedTiles.of(sequence, b, self.tiling.tile_m)
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // THREADS)
        thread = cute.arch.thread_idx()[0] % THREADS
        way_out, sums = Exit(layout, self.dtype), self.sums()
        registers = sums.registers()
        load_part(self.sums_of(dq_accum, padded, head, tile), registers, group, thread)
        for i in range(cute.size(registers)):
            registers[i] = registers[i] * scale

        def outputs(shared):
            yield is_first_warp(), tma, shared, *sequence.stored(tensor, head, (self.rows, self.tiling.d), tile)

        way_out.leave(sums, registers, lambda shared: self.part(shared, group), thread, outputs)

    def sums_of(self, dq_accum: cute.Tensor, padded: PaddedTiles, head: Any, tile: Any) -> cute.Tensor:
        """The sums of a tile, or of a part of one."""
        if self.parts == 1:
            return dq_accum[padded.b, head, padded.first + tile, None]
        size = self.rows * self.tiling.d
        whole = dq_accum[padded.b, head, padded.first + tile // self.parts, None]
        return cute.make_tensor(whole.iterator + tile % self.parts * size, cute.make_layout(size))


class RowPostprocess(Postprocess[AnyTiling]):
    """Rounds sums that lie one row per thread, four columns together (`DqRows`): a group has `COLUMNS` of them."""

    def __init__(self, plan: PostprocessPlan[AnyTiling]):
        super().__init__(plan)
        self.groups = plan.tiling.d // COLUMNS

    def sums(self) -> RowSums:
        return RowSums(COLUMNS)

    def part(self, shared: cute.Tensor, group: Any) -> cute.Tensor:
        return cute.local_tile(shared, (self.rows, COLUMNS), (0, group))
