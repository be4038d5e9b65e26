"""After the backward kernel: fp32 sums of the pieces of tiles of keys, added up and rounded to dK and dV."""

import abc
from typing import Any, Generic

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync

from ....primitives.register_chunks import THREADS, load_part
from ....primitives.seqlen import DenseRows
from ....primitives.swizzled_tiles import tile_layout
from ..architecture import Kernel
from ..arguments import GatherArguments
from ..plan_backward import AnyTiling, GatherPlan
from .backward import pieces_of
from .rounding import Exit, RowSums, Sums, is_first_warp


class BackwardGather(Kernel, Generic[AnyTiling]):
    """A block per `rows` keys of a cut tile, of dK or of dV: what one group of the main kernel has left of a piece.

    `across`: how many groups have columns of these keys side by side.

    Pieces are added in their order, so that a sum has the same bits in every run.
    """

    arguments = GatherArguments
    rows: int
    across: int = 1

    def __init__(self, plan: GatherPlan[AnyTiling]):
        self.plan, self.tiling = plan, plan.tiling

    def layout(self, columns: int) -> Any:
        """Of `rows` keys in shared memory."""
        return tile_layout(self.rows, columns)

    @abc.abstractmethod
    def sums(self, columns: int) -> Sums:
        """Of dK or dV, which has so many columns."""

    def part(self, shared: cute.Tensor) -> cute.Tensor:
        """What the sums are of, in the shared memory of `rows` keys."""
        return shared

    @cute.jit
    def __call__(self, stream, *arguments):
        given, tiling = self.arguments(*arguments), self.tiling
        self.dtype = given.dk.element_type
        outputs = []
        for tensor, columns in ((given.dk, tiling.d), (given.dv, tiling.dv)):
            box = (self.rows, columns // self.across)
            outputs.append(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileS2GOp(), DenseRows.for_copies(tensor), self.layout(box[1]), box
                )
            )
        made = pieces_of(tiling, given.pieces)
        tmas, tensors = tuple(o[0] for o in outputs), tuple(o[1] for o in outputs)
        self.kernel(tmas, tensors, made.sums, made.places, given.pieces.pieces).launch(
            grid=(given.pieces.cut, tiling.tile_n // self.rows * self.across, 2),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tmas, tensors, sums, places, count):
        cute.arch.griddepcontrol_wait()  # for the main kernel's sums
        _, _, number = cute.arch.block_idx()
        if number == 0:
            self.gather(tmas[0], tensors[0], sums[0], places, count, self.tiling.d // self.across)
        else:
            self.gather(tmas[1], tensors[1], sums[1], places, count, self.tiling.dv // self.across)

    @cute.jit
    def gather(self, tma, tensor, pieces, places, count, columns: cutlass.Constexpr):
        tile, group, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        sums = self.sums(columns)
        total = sums.registers()
        load_part(pieces[tile * count, None], total, group, thread)
        for piece in cutlass.range(1, count, unroll=1):
            more = cute.make_rmem_tensor_like(total, Float32)
            load_part(pieces[tile * count + piece, None], more, group, thread)
            _add(total, more)

        def outputs(shared):
            b, head, n = places[tile, 0], places[tile, 1], places[tile, 2]
            row, column = (group, 0) if self.across == 1 else (group // self.across, group % self.across)
            tiles = cute.local_tile(tensor[None, None, head, b], (self.rows, columns), (None, column))
            yield is_first_warp(), tma, shared, tiles, n * (self.tiling.tile_n // self.rows) + row

        Exit(self.layout(columns), self.dtype).leave(sums, total, self.part, thread, outputs)


class RowGather(BackwardGather[AnyTiling]):
    """Of sums that lie one row per thread: whole rows of a tile of keys."""

    def __init__(self, plan: GatherPlan[AnyTiling]):
        super().__init__(plan)
        self.rows = plan.tiling.block_keys

    def sums(self, columns: int) -> Sums:
        return RowSums(columns)


def _add(total: cute.Tensor, more: cute.Tensor) -> None:
    for i in range(cute.size(total)):
        total[i] = total[i] + more[i]
