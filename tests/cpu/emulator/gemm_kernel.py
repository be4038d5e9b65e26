"""A small warp-specialised Hopper GEMM (TMA ring, wgmma, TMA store), written to be a subject of the emulator."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as hopper
from cutlass.cute.nvgpu import cpasync, warpgroup


class Gemm:
    """C (M, N) = A (M, K) @ B (N, K)^T: one producer warp, `consumers` warpgroups of 64 rows each.

    promoted: the sums of each tile of K begin with 0 and are added to others in fp32.
    """

    def __init__(
        self, dtype: Any, consumers: int = 2, n: int = 64, k: int = 64, stages: int = 2, promoted: bool = False
    ) -> None:
        self.promoted = promoted
        self.dtype, self.consumers, self.stages = dtype, consumers, stages
        self.tile = (64 * consumers, n, k)
        self.threads = 128 * (consumers + 1)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: cuda.CUstream):
        major = utils.LayoutEnum.ROW_MAJOR
        mma = hopper.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            major.sm90_mma_major_mode(),
            major.sm90_mma_major_mode(),
            cutlass.Float32,
            (self.consumers, 1, 1),
            tiler_mn=(64, self.tile[1]),
        )
        sA = hopper.make_smem_layout_a(major, self.tile, self.dtype, self.stages)
        sB = hopper.make_smem_layout_b(major, self.tile, self.dtype, self.stages)
        sC = hopper.make_smem_layout_epi(cutlass.BFloat16, major, self.tile[:2], 1)
        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        one = cute.slice_(sA, (None, None, 0))
        tma_a, gA = cpasync.make_tiled_tma_atom(load, a, one, (self.tile[0], self.tile[2]))
        one = cute.slice_(sB, (None, None, 0))
        tma_b, gB = cpasync.make_tiled_tma_atom(load, b, one, (self.tile[1], self.tile[2]))
        one = cute.slice_(sC, (None, None, 0))
        tma_c, gC = cpasync.make_tiled_tma_atom(store, c, one, (self.tile[0], self.tile[1]))
        grid = (cute.ceil_div(a.shape[0], self.tile[0]), cute.ceil_div(b.shape[0], self.tile[1]), 1)
        self.kernel(tma_a, gA, tma_b, gB, tma_c, gC, mma, sA, sB, sC).launch(
            grid=grid, block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tma_a: cute.CopyAtom,
        gA: cute.Tensor,
        tma_b: cute.CopyAtom,
        gB: cute.Tensor,
        tma_c: cute.CopyAtom,
        gC: cute.Tensor,
        mma: cute.TiledMma,
        lA: cute.ComposedLayout,
        lB: cute.ComposedLayout,
        lC: cute.ComposedLayout,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        bm, bn, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tidx // 128)
        smem = utils.SmemAllocator()
        bars = smem.allocate_array(cutlass.Int64, 2 * self.stages)
        sA = smem.allocate_tensor(self.dtype, lA.outer, 1024, lA.inner)
        sB = smem.allocate_tensor(self.dtype, lB.outer, 1024, lB.inner)
        sC = smem.allocate_tensor(cutlass.BFloat16, lC.outer, 1024, lC.inner)
        tx = (self.tile[0] + self.tile[1]) * self.tile[2] * self.dtype.width // 8
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=bars,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * self.consumers),
            tx_count=tx,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        tA = cute.local_tile(gA, (self.tile[0], self.tile[2]), (bm, None))
        tB = cute.local_tile(gB, (self.tile[1], self.tile[2]), (bn, None))
        tC = cute.local_tile(gC, (self.tile[0], self.tile[1]), (bm, bn))
        one = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(tma_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(tA, 0, 2))
        tBsB, tBgB = cpasync.tma_partition(tma_b, 0, one, cute.group_modes(sB, 0, 2), cute.group_modes(tB, 0, 2))
        tCsC, tCgC = cpasync.tma_partition(tma_c, 0, one, cute.group_modes(sC, 0, 2), cute.group_modes(tC, 0, 2))
        k_tiles = cute.size(tA, mode=[2])
        if group == 0:
            cute.arch.setmaxregister_decrease(40)
            if warp == 0:
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
                for kt in range(k_tiles):
                    ring.producer_acquire(state)
                    bar = ring.producer_get_barrier(state)
                    cute.copy(tma_a, tAgA[(None, kt)], tAsA[(None, state.index)], tma_bar_ptr=bar)
                    cute.copy(tma_b, tBgB[(None, kt)], tBsB[(None, state.index)], tma_bar_ptr=bar)
                    ring.producer_commit(state)
                    state.advance()
                ring.producer_tail(state)
        else:
            cute.arch.setmaxregister_increase(232 if self.consumers < 3 else 152)
            thr = mma.get_slice(tidx - 128)
            rA = mma.make_fragment_A(thr.partition_A(sA))
            rB = mma.make_fragment_B(thr.partition_B(sB))
            acc = cute.make_rmem_tensor(thr.partition_shape_C(self.tile[:2]), cutlass.Float32)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
            total = cute.make_fragment_like(acc)
            if cutlass.const_expr(self.promoted):
                total.fill(0.0)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for _kt in range(k_tiles):
                ring.consumer_wait(state)
                if cutlass.const_expr(self.promoted):
                    mma.set(warpgroup.Field.ACCUMULATE, False)
                warpgroup.fence()
                for kb in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                    cute.gemm(mma, acc, rA[(None, None, kb, state.index)], rB[(None, None, kb, state.index)], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                if cutlass.const_expr(self.promoted):
                    total.store(total.load() + acc.load())
                ring.consumer_release(state)
                state.advance()
            if cutlass.const_expr(self.promoted):
                acc.store(total.load())
            out = cute.make_fragment_like(acc, cutlass.BFloat16)
            out.store(acc.load().to(cutlass.BFloat16))
            atom = cute.make_copy_atom(cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4), cutlass.BFloat16)
            r2s = cute.make_tiled_copy_C(atom, mma).get_slice(tidx - 128)
            cute.copy(atom, r2s.retile(out), r2s.partition_D(sC)[(None, None, None, 0)])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1, number_of_threads=128 * self.consumers)
            if warp == 4:
                cute.copy(tma_c, tCsC[(None, 0)], tCgC)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
