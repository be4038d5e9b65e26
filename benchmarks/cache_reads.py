"""What the bytes of a cache take to read, and products as many as a call's, with no attention: bounds of a decode.

`byte_caches --bounds` times them in turns with our kernels. Reads: each block has a run of K and V of its own, as parts
of keys have, which one thread brings into shared memory by bulk copies, a ring of stages on their way, and nobody looks
at. The fastest of several forms counts. Products: a GEMM of cuBLAS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from benchmarks.timing import Call

STAGE = 8192  # bytes of a copy
FORMS = [(1, 26), (2, 12), (4, 6)]  # blocks on an SM, and stages of each
GEMM = 4096  # rows and columns
_COPY = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{{$r0}}], [{{$r1}}], {STAGE}, [{{$r2}}];"


class Read:
    """Brings k and v, (stages, STAGE) bytes, into shared memory; with none of either it is an empty kernel."""

    def __init__(self, blocks: int, stages: int) -> None:
        self.blocks, self.stages = blocks, stages

    @cute.jit
    def __call__(self, stream: Any, k: cute.Tensor, v: cute.Tensor):
        self.kernel(k, v).launch(grid=(self.blocks, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, k: cute.Tensor, v: cute.Tensor):
        smem = SmemAllocator()
        full = smem.allocate_array(Int64, self.stages)
        ring = smem.allocate_array(Uint8, self.stages * STAGE, byte_alignment=128)
        if cute.arch.thread_idx()[0] == 0:
            for stage in range(self.stages):
                cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init_fence()
            self.read(k, v, full, ring)

    @cute.jit
    def read(self, k, v, full, ring):
        """This block's run of the stages of both."""
        of_k, number = cute.size(k, mode=[0]), cute.arch.block_idx()[0]
        count = of_k + cute.size(v, mode=[0])
        first, last = (Int32(Int64(count) * n // self.blocks) for n in (number, number + 1))
        for i in cutlass.range(self.stages, unroll=1):
            self.start(k, v, full, ring, first + i, last, i)
        stage, phase = Int32(0), Int32(0)
        for at in cutlass.range(first, last, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            self.start(k, v, full, ring, at + self.stages, last, stage)
            stage += 1
            if stage == self.stages:
                stage, phase = Int32(0), phase ^ 1

    @cute.jit
    def start(self, k, v, full, ring, at, last, stage):
        if at < last:
            of_k = cute.size(k, mode=[0])
            start = k.iterator.toint() + Int64(at) * STAGE
            if at >= of_k:
                start = v.iterator.toint() + Int64(at - of_k) * STAGE
            bar = full + stage
            cute.arch.mbarrier_arrive_and_expect_tx(bar, STAGE)
            cute.arch.inline_ptx(_COPY, read_only_args=[(ring + stage * STAGE).toint(), start, bar.toint()])


@functools.cache
def _kernel(blocks: int, stages: int) -> Callable[..., None]:
    k, v = (make_fake_tensor(Uint8, (cute.sym_int(), STAGE), stride=(STAGE, 1), assumed_align=16) for _ in range(2))
    options = cute.EnableTVMFFI(True), cute.GPUArch("sm_90a")
    return cute.compile[options](Read(blocks, stages), make_fake_stream(use_tvm_ffi_env_stream=True), k, v)  # type: ignore[no-any-return]


def reads(k: torch.Tensor, v: torch.Tensor, sms: int, then_nothing: bool = False) -> dict[str, Call]:
    """By name: all of k and v read once; `then_nothing`: and an empty kernel launched behind, as one combines parts."""
    rows = [t.view(torch.uint8).view(-1, STAGE) for t in (k, v)]
    nothing = [rows[0][:0], rows[1][:0]]

    def call(blocks: int, stages: int) -> Call:
        read, empty = _kernel(blocks * sms, stages), _kernel(1, 1)

        def run() -> None:
            read(*rows)
            if then_nothing:
                empty(*nothing)

        return run

    return {f"{blocks} blocks of {stages} stages": call(blocks, stages) for blocks, stages in FORMS}


def products(flops: int, device: torch.device) -> Call:
    """A GEMM in bf16 of as many operations."""
    inner = -(-flops // (2 * GEMM**2 * 64)) * 64
    a, b = (torch.randn(GEMM, inner, device=device, dtype=torch.bfloat16) for _ in range(2))
    return functools.partial(torch.mm, a, b.mT)
