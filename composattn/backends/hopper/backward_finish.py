"""After the backward kernel on Hopper: the fp32 sums of dQ, scaled and rounded, into the tensor."""

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from ...plan_backward import BackwardPlan
from ...primitives.values import narrow
from .backward import _dq_part, dq_columns, dq_product, element_type, fake_tensor, store_if, wait_if
from .forward import WARPGROUP, _partition, _permuted, tile_layout


class BackwardFinish:
    """A block a query tile, a warpgroup a part of it: registers as the product left them, through shared memory."""

    def __init__(self, plan: BackwardPlan):
        self.plan, self.tiling = plan, plan.tiling

    def __repr__(self):
        return "backward_finish"  # becomes part of the kernel's name

    @cute.jit
    def __call__(
        self,
        dq_sum: cute.Tensor,  # (B, Hq, tiles, tile_m * d) fp32, in the order of the product's registers
        dq: cute.Tensor,  # (B, Hq, Sq, D)
        scale: Float32,
        stream,
    ):
        tiling = self.tiling
        self.dtype = dq.element_type
        layout = tile_layout(self.dtype, tiling.tile_m, tiling.d, slice_columns=dq_columns(tiling))
        tma, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), _permuted(dq, (2, 3, 1, 0)), layout, (tiling.tile_m, tiling.d)
        )
        self.kernel(tma, tensor, layout, dq_sum, scale).launch(
            grid=(cute.ceil_div(dq.shape[2], tiling.tile_m), dq.shape[1], dq.shape[0]),
            block=(tiling.warpgroups * WARPGROUP, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tma, tensor, layout, dq_sum, scale):
        tiling, dtype = self.tiling, self.dtype
        tile, head, batch = cute.arch.block_idx()
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        shared = SmemAllocator().allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
        mma, part = dq_product(tiling, dtype)
        registers = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C(part), Float32)
        self.load(dq_sum[batch, head, tile, None], registers, warpgroup, thread)
        for i in range(cute.size(registers)):
            registers[i] = registers[i] * scale
        rounded = cute.make_rmem_tensor_like(registers, dtype)
        narrow(rounded, registers)
        transposed = tiling.dq_split == "transposed"
        to_shared = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(transposed, 4), dtype)
        copy = cute.make_tiled_copy_C(to_shared, mma).get_slice(thread)
        cute.copy(copy, copy.retile(rounded), copy.partition_D(_dq_part(tiling, shared, warpgroup, part)))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        target = cute.local_tile(tensor[None, None, head, batch], (tiling.tile_m, tiling.d), (tile, 0))
        source, target = _partition(tma, shared, target)
        is_first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        store_if(is_first, tma, source, target)
        wait_if(is_first)

    def load(self, source: cute.Tensor, registers: cute.Tensor, warpgroup: Int32, thread: Int32) -> None:
        """The twin of `Consumer.add_dq`."""
        count = cute.size(registers)
        start = source.iterator + (warpgroup * (count * WARPGROUP) + thread * 4)
        for j in range(count // 4):
            four = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(cute.make_tensor(start + j * 4 * WARPGROUP, cute.make_layout(4)), four)
            for e in range(4):
                registers[4 * j + e] = four[e]


def kernel(plan: BackwardPlan) -> tuple:
    """(function to compile, arguments to compile it with)."""
    size, tiling = cute.sym_int, plan.tiling
    batch, heads, q_len, tiles = size(), size(), size(), size()
    arguments = (
        fake_tensor(Float32, (batch, heads, tiles, tiling.tile_m * tiling.d), divisibility=4),
        fake_tensor(element_type(plan), (batch, heads, q_len, plan.head_dim)),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return BackwardFinish(plan), arguments
