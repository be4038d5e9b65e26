"""After the backward kernel: fp32 sums of the pieces of tiles of keys, added up and rounded to dK and dV."""

import abc
from typing import Any, Generic

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from .....primitives.register_chunks import THREADS, load_part
from .....primitives.seqlen import Stored, rows_of
from .....primitives.swizzled_tiles import tile_layout
from .....primitives.tile_scheduler import Segment
from ...planning.arguments import GatherArguments
from ...planning.plan_backward import AnyTiling, GatherPlan
from ...tiles.architecture import Kernel
from ..backward import pieces_of
from ..chain import overlaps, wait_for_former
from ..rounding import Exit, RowSums, Sums, is_first_warp


class BackwardGather(Kernel, Generic[AnyTiling]):
    """A block per `rows` keys of a cut tile, of dK or of dV: what one group of the main kernel has left of a piece.

    `across`: how many groups have columns of these keys side by side.

    Pieces are added in their order, so that a sum has the same bits in every run.
    """

    arguments = GatherArguments
    rows: int
    across: int = 1
    threads = THREADS  # of a block

    def __init__(self, plan: GatherPlan[AnyTiling]):
        self.plan, self.tiling = plan, plan.tiling

    def layout(self, columns: int) -> Any:
        """The layout of `rows` keys in shared memory."""
        return tile_layout(self.rows, columns)

    @abc.abstractmethod
    def sums(self, columns: int) -> Sums:
        """The sums of dK or dV, which has so many columns."""

    def output(self, tensor: cute.Tensor, keys: Any, columns: int) -> tuple[Any, cute.Tensor]:
        """The copy by which dK or dV leaves, and the tensor as that copy sees it."""
        box = (self.rows, columns // self.across)
        stored = keys.for_stores(tensor, box[0]) if self.plan.has_segments else keys.for_copies(tensor)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), stored, self.layout(box[1]), box)

    def part(self, shared: cute.Tensor) -> cute.Tensor:
        """What the sums are of, in the shared memory of `rows` keys."""
        return shared

    @cute.jit
    def __call__(self, stream, *arguments):
        given, tiling = self.arguments(*arguments), self.tiling
        self.dtype = given.dk.element_type
        _, keys = rows_of(self.plan.layout, given.dk, given.dk, given.sequences)
        outputs = [
            self.output(tensor, keys, columns) for tensor, columns in ((given.dk, tiling.d), (given.dv, tiling.dv))
        ]
        made = pieces_of(tiling, given.pieces)
        tmas, tensors = tuple(o[0] for o in outputs), tuple(o[1] for o in outputs)
        self.kernel(tmas, tensors, made.sums, made.places, given.pieces.pieces, keys).launch(
            grid=(given.pieces.cut, tiling.tile_n // self.rows * self.across, 2),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=overlaps(self.plan.target),
        )

    @cute.kernel
    def kernel(self, tmas, tensors, sums, places, count, keys):
        wait_for_former(self.plan.target)  # for the main kernel's sums
        tile, _, number = cute.arch.block_idx()
        place = places[tile, None]
        if number == 0:
            self.gather_if(self.exists(place), tmas[0], tensors[0], sums[0], place, count, keys, self.tiling.d)
        else:
            self.gather_if(self.exists(place), tmas[1], tensors[1], sums[1], place, count, keys, self.tiling.dv)

    def exists(self, place) -> Boolean | bool:
        """Whether the table, if there is one, has the tile."""
        return place[0] >= 0 if self.plan.has_order_table else True

    @cute.jit
    def gather_if(self, condition, *given):
        if condition:
            self.gather(*given)

    @cute.jit
    def gather(self, tma, tensor, pieces, place, count, keys, d: cutlass.Constexpr):
        tile, group, _ = cute.arch.block_idx()
        columns = d // self.across
        thread = cute.arch.thread_idx()[0]
        sums = self.sums(columns)
        total = sums.registers()
        load_part(pieces[tile * count, None], total, group, thread)
        for piece in cutlass.range(1, count, unroll=1):
            more = cute.make_rmem_tensor_like(total, Float32)
            load_part(pieces[tile * count + piece, None], more, group, thread)
            _add(total, more)

        def outputs(shared):
            yield is_first_warp(), tma, shared, *self.target(tensor, place, keys, group, columns)

        Exit(self.layout(columns), self.dtype).leave(sums, total, self.part, thread, outputs)

    def target(self, tensor, place, keys, group, columns: int) -> Stored:
        """Where the sums of one group of a tile go: the tensor's tiles, and which of them."""
        b, head, n, stop = [place[i] for i in range(4)]
        row, column = (group, 0) if self.across == 1 else (group // self.across, group % self.across)
        sequence = keys.sequence(b)
        if self.plan.has_segments:
            sequence = sequence.within(Segment(n, stop, Int32(0)))
        else:
            row = n * (self.tiling.tile_n // self.rows) + row
        return sequence.stored(tensor, head, (self.rows, columns), row, column)


class RowGather(BackwardGather[AnyTiling]):
    """Adds up sums that lie one row per thread: whole rows of a tile of keys."""

    def __init__(self, plan: GatherPlan[AnyTiling]):
        super().__init__(plan)
        self.rows = plan.tiling.block_keys

    def sums(self, columns: int) -> Sums:
        return RowSums(columns)


def _add(total: cute.Tensor, more: cute.Tensor) -> None:
    for i in range(cute.size(total)):
        total[i] = total[i] + more[i]
