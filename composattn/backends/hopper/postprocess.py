"""After the backward kernel on Hopper: the fp32 sums of dQ, scaled and rounded, into the tensor."""

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...primitives.padded_tiles import PaddedTiles, query_grid, query_tile
from ...primitives.seqlen import rows_of
from ..fused.arguments import PostprocessArguments
from ..fused.fake import fake_arguments
from ..fused.plan_backward import PostprocessPlan
from .backward_tiling import HopperBackwardTiling
from .dq import dq_columns, dq_part, dq_product
from .wgmma import WARPGROUP, load_part, narrowed, put, send, tile_layout, wait_read


class Postprocess:
    """A block a query tile, a warpgroup a part of it: registers as the product left them, through shared memory."""

    def __init__(self, plan: PostprocessPlan[HopperBackwardTiling]):
        self.plan, self.tiling = plan, plan.tiling

    def __repr__(self):
        return "postprocess"  # becomes part of the kernel's name

    @cute.jit
    def __call__(self, stream, *arguments):
        given, tiling = PostprocessArguments(*arguments), self.tiling
        self.dtype = given.dq.element_type
        layout = tile_layout(self.dtype, tiling.tile_m, tiling.d, slice_columns=dq_columns(tiling))
        queries, _ = rows_of(self.plan.layout, given.dq, given.dq, given.sequences)
        tma, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), queries.for_copies(given.dq), layout, (tiling.tile_m, tiling.d)
        )
        self.kernel(tma, tensor, layout, given.dq_accum, given.scale, queries, given.work).launch(
            grid=query_grid(given.dq_accum, given.work),
            block=(tiling.warpgroups * WARPGROUP, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tma, tensor, layout, dq_accum, scale, queries, work):
        cute.arch.griddepcontrol_wait()  # for the main kernel's sums
        tile, head, b = query_tile(work)
        if const_expr(work is None):
            self.finish(tma, tensor, layout, dq_accum, scale, queries, tile, head, b)
        else:
            if b >= 0:
                self.finish(tma, tensor, layout, dq_accum, scale, queries, tile, head, b)

    @cute.jit
    def finish(self, tma, tensor, layout, dq_accum, scale, queries, tile, head, b):
        tiling, dtype = self.tiling, self.dtype
        sequence = queries.sequence(b)
        padded = PaddedTiles.of(sequence, b, tiling.tile_m)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        shared = SmemAllocator().allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
        mma, part = dq_product(tiling, dtype)
        registers = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C(part), Float32)
        load_part(dq_accum[padded.b, head, padded.first + tile, None], registers, warpgroup, thread)
        for i in range(cute.size(registers)):
            registers[i] = registers[i] * scale
        part = dq_part(tiling, shared, warpgroup, part)
        put(mma, narrowed(registers, dtype), part, thread, transposed=tiling.dq_split == "transposed")

        def output():
            yield is_first_warp(), tma, shared, sequence.tiles(tensor, head, (tiling.tile_m, tiling.d)), tile

        send(output(), cute.arch.sync_threads)
        wait_read(is_first_warp())


def is_first_warp():
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0


def kernel(plan: PostprocessPlan) -> tuple:
    """(function to compile, arguments to compile it with)."""
    return Postprocess(plan), fake_arguments(PostprocessArguments.of(plan))
