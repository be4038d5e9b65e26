"""A small GEMM on tensor memory, one block per tile, written to be a subject of the emulator."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.blackwell_helpers as blackwell
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05

COLUMNS = 256


class TensorGemm:
    """C (M, N) = A (M, K) @ B (N, K)^T in fp32. `major_a` and `major_b` are "k" or "mn": what lies together.

    A tile is that of so many `blocks`, one or a pair.
    """

    def __init__(
        self, dtype: Any, m: int, n: int, k: int, major_a: str = "k", major_b: str = "k", blocks: int = 1
    ) -> None:
        self.dtype, self.tile, self.blocks = dtype, (m, n, k), blocks
        self.majors = [getattr(tcgen05.OperandMajorMode, major.upper()) for major in (major_a, major_b)]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        m, n, _ = self.tile
        group, source = tcgen05.CtaGroup(self.blocks), tcgen05.OperandSource.SMEM
        op = tcgen05.MmaF16BF16Op(self.dtype, cutlass.Float32, (m, n, 16), group, source, *self.majors)
        mma = cute.make_tiled_mma(op)
        lA = blackwell.make_smem_layout_a(mma, self.tile, self.dtype, 1)
        lB = blackwell.make_smem_layout_b(mma, self.tile, self.dtype, 1)
        load = cpasync.CopyBulkTensorTileG2SOp(group)
        cluster = cute.tiled_divide(cute.make_layout((self.blocks, 1, 1)), (mma.thr_id.shape,)).shape
        flat = [cute.slice_(layout, (None, None, None, 0)) for layout in (lA, lB)]
        tma_a, gA = make_tiled_tma_atom_A(load, a, flat[0], self.tile, mma, cluster)
        tma_b, gB = make_tiled_tma_atom_B(load, b, flat[1], self.tile, mma, cluster)
        grid = (cute.ceil_div(c.shape[0], m) * self.blocks, cute.ceil_div(c.shape[1], n), 1)
        self.kernel(mma, tma_a, gA, tma_b, gB, c, lA, lB).launch(
            grid=grid, block=[128, 1, 1], cluster=[self.blocks, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        gA: cute.Tensor,
        tma_b: cute.CopyAtom,
        gB: cute.Tensor,
        c: cute.Tensor,
        lA: cute.ComposedLayout,
        lB: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        bm, bn, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m, n, k = self.tile
        rank, bm, pair = bm % self.blocks, bm // self.blocks, self.blocks == 2
        memory = utils.SmemAllocator()
        bars = memory.allocate_array(cutlass.Int64, 2)
        columns = memory.allocate_array(cutlass.Int32, 1)
        sA = memory.allocate_tensor(self.dtype, lA.outer, 1024, lA.inner)
        sB = memory.allocate_tensor(self.dtype, lB.outer, 1024, lB.inner)
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, columns, is_two_cta=pair)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(bars + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, columns)
        slices = mma.get_slice(rank)
        tA = slices.partition_A(cute.local_tile(gA, (m, k), (bm, None)))
        tB = slices.partition_B(cute.local_tile(gB, (n, k), (bn, None)))
        rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        shape = mma.partition_shape_C((m, n))
        acc = cute.make_tensor(pointer, mma.make_fragment_C(shape).layout)
        one = cute.make_layout(1)
        toA, fromA = cpasync.tma_partition(tma_a, 0, one, cute.group_modes(sA, 0, 3), cute.group_modes(tA, 0, 3))
        toB, fromB = cpasync.tma_partition(tma_b, 0, one, cute.group_modes(sB, 0, 3), cute.group_modes(tB, 0, 3))
        if warp == 0:
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for kt in range(cute.size(tA, mode=[3])):
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(bars, (m + n) * k * self.dtype.width // 8)
                cute.copy(tma_a, fromA[None, kt], toA[None, 0], tma_bar_ptr=bars)
                cute.copy(tma_b, fromB[None, kt], toB[None, 0], tma_bar_ptr=bars)
                if rank == 0:
                    cute.arch.mbarrier_wait(bars, kt % 2)
                    for step in cutlass.range_constexpr(k // 16):
                        cute.gemm(mma, acc, rA[None, None, step, 0], rB[None, None, step, 0], acc)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    with cute.arch.elect_one():
                        if cutlass.const_expr(pair):
                            tcgen05.commit(bars + 1, 3, tcgen05.CtaGroup.TWO)
                        else:
                            tcgen05.commit(bars + 1)
                cute.arch.mbarrier_wait(bars + 1, kt % 2)
        cute.arch.sync_threads()
        nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(8)), cutlass.Float32)
        if cutlass.const_expr(m == 64):
            atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(1)), cutlass.Float32)
        flat = acc[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(atom, flat).get_slice(thread)
        tC = slices.partition_C(cute.local_tile(c, (m, n), (bm, bn)))
        source, target = copy.partition_S(flat), copy.partition_D(tC[(None, None), 0, 0])
        out = cute.make_rmem_tensor(target.shape, cutlass.Float32)
        cute.copy(copy, source, out)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(out, target)
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)
            cute.arch.dealloc_tmem(pointer, COLUMNS, is_two_cta=pair)
