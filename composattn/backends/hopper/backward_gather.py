"""After the backward kernel on Hopper: fp32 sums of the pieces of tiles of keys, added up and rounded to dK and dV."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...primitives.seqlen import DenseRows
from ..fused.arguments import GatherArguments
from ..fused.fake import fake_arguments
from ..fused.plan_backward import GatherPlan
from .backward import pieces_of
from .backward_tiling import HopperBackwardTiling
from .wgmma import MN, ROWS, WARPGROUP, load_part, narrowed, product, put, send, tile_layout, wait_read


class BackwardGather:
    """A block 64 keys of a cut tile, of dK or of dV: registers as the product left them, through shared memory.

    Pieces are added in their order, so that a sum has the same bits in every run.
    """

    def __init__(self, plan: GatherPlan[HopperBackwardTiling]):
        self.plan, self.tiling = plan, plan.tiling

    def __repr__(self):
        return "backward_gather"  # becomes part of the kernel's name

    @cute.jit
    def __call__(self, stream, *arguments):
        given, tiling = GatherArguments(*arguments), self.tiling
        self.dtype = given.dk.element_type
        outputs = []
        for tensor, columns in ((given.dk, tiling.d), (given.dv, tiling.dv)):
            layout = tile_layout(self.dtype, ROWS, columns)
            outputs.append(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileS2GOp(), DenseRows.for_copies(tensor), layout, (ROWS, columns)
                )
            )
        made = pieces_of(tiling, given.pieces)
        tmas, tensors = tuple(o[0] for o in outputs), tuple(o[1] for o in outputs)
        self.kernel(tmas, tensors, made.sums, made.places, given.pieces.pieces).launch(
            grid=(given.pieces.cut, tiling.tile_n // ROWS, 2), block=(WARPGROUP, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tmas, tensors, sums, places, count):
        cute.arch.griddepcontrol_wait()  # for the main kernel's sums
        _, _, number = cute.arch.block_idx()
        if number == 0:
            self.gather(tmas[0], tensors[0], sums[0], places, count, self.tiling.d)
        else:
            self.gather(tmas[1], tensors[1], sums[1], places, count, self.tiling.dv)

    @cute.jit
    def gather(self, tma, tensor, sums, places, count, columns: cutlass.Constexpr):
        tile, rows, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        mma = product(self.dtype, columns, right=MN)
        total = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((ROWS, columns)), Float32)
        load_part(sums[tile * count, None], total, rows, thread)
        for piece in cutlass.range(1, count, unroll=1):
            more = cute.make_rmem_tensor_like(total, Float32)
            load_part(sums[tile * count + piece, None], more, rows, thread)
            _add(total, more)
        layout = tile_layout(self.dtype, ROWS, columns)
        shared = SmemAllocator().allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
        put(mma, narrowed(total, self.dtype), shared, thread)

        def output():
            b, head, n = places[tile, 0], places[tile, 1], places[tile, 2]
            tiles = cute.local_tile(tensor[None, None, head, b], (ROWS, columns), (None, 0))
            yield is_first_warp(), tma, shared, tiles, n * (self.tiling.tile_n // ROWS) + rows

        send(output(), cute.arch.sync_threads)
        wait_read(is_first_warp())


def is_first_warp():
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0


def _add(total: cute.Tensor, more: cute.Tensor) -> None:
    for i in range(cute.size(total)):
        total[i] = total[i] + more[i]


def kernel(plan: GatherPlan) -> tuple:
    """(function to compile, arguments to compile it with)."""
    return BackwardGather(plan), fake_arguments(GatherArguments.of(plan))
