"""After the backward kernel on Hopper: fp32 sums of the pieces of tiles of keys, added up and rounded to dK and dV."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...primitives.seqlen import DenseRows
from ...primitives.values import permuted
from ..fused.arguments import GatherArguments
from ..fused.fake import fake_arguments
from ..fused.plan_backward import GatherPlan
from .backward import pieces_of
from .backward_tiling import HopperBackwardTiling
from .wgmma import MN, ROWS, WARPGROUP, load_part, narrowed, product, put, send, tile_layout, wait_read


class BackwardGather:
    """A block 64 keys of a cut tile, of dK or of dV: registers as the product left them, through shared memory.

    Or, where these are transposed, 64 columns of all keys.

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
            box = self.box(columns)
            layout = tile_layout(self.dtype, *box)
            outputs.append(
                cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileS2GOp(), DenseRows.for_copies(tensor), layout, box
                )
            )
        made = pieces_of(tiling, given.pieces)
        tmas, tensors = tuple(o[0] for o in outputs), tuple(o[1] for o in outputs)
        self.kernel(tmas, tensors, made.sums, made.places, given.pieces.pieces).launch(
            grid=(given.pieces.cut, self.parts(), 2), block=(WARPGROUP, 1, 1), stream=stream, use_pdl=True
        )

    def box(self, columns: int) -> tuple[int, int]:
        """Keys and columns of one block, where all have so many."""
        return (self.tiling.tile_n, ROWS) if self.tiling.transposed else (ROWS, columns)

    def parts(self) -> int:
        """How many blocks a tile has, at most."""
        tiling = self.tiling
        return (max(tiling.d, tiling.dv) if tiling.transposed else tiling.tile_n) // ROWS

    @cute.kernel
    def kernel(self, tmas, tensors, sums, places, count):
        cute.arch.griddepcontrol_wait()  # for the main kernel's sums
        _, _, number = cute.arch.block_idx()
        if number == 0:
            self.gather_columns(tmas[0], tensors[0], sums[0], places, count, self.tiling.d)
        else:
            self.gather_columns(tmas[1], tensors[1], sums[1], places, count, self.tiling.dv)

    @cute.jit
    def gather_columns(self, tma, tensor, sums, places, count, columns: cutlass.Constexpr):
        """Where dK and dV have different numbers of columns, one has blocks too many."""
        if const_expr(self.tiling.transposed and columns < self.parts() * ROWS):
            if cute.arch.block_idx()[1] < columns // ROWS:
                self.gather(tma, tensor, sums, places, count, columns)
        else:
            self.gather(tma, tensor, sums, places, count, columns)

    @cute.jit
    def gather(self, tma, tensor, sums, places, count, columns: cutlass.Constexpr):
        tile, rows, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        transposed = self.tiling.transposed
        box = self.box(columns)
        width = box[0] if transposed else box[1]
        mma = product(self.dtype, width, right=MN)
        total = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((ROWS, width)), Float32)
        load_part(sums[tile * count, None], total, rows, thread)
        for piece in cutlass.range(1, count, unroll=1):
            more = cute.make_rmem_tensor_like(total, Float32)
            load_part(sums[tile * count + piece, None], more, rows, thread)
            _add(total, more)
        layout = tile_layout(self.dtype, *box)
        shared = SmemAllocator().allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
        target = permuted(shared, 1, 0) if transposed else shared
        put(mma, narrowed(total, self.dtype), target, thread, transposed=transposed)

        def output():
            b, head, n = places[tile, 0], places[tile, 1], places[tile, 2]
            tiles = cute.local_tile(tensor[None, None, head, b], box, (None, rows if transposed else 0))
            yield is_first_warp(), tma, shared, tiles, n if transposed else n * self.parts() + rows

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
