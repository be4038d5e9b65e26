"""Products in one piece of assembly, by a small kernel in the emulator: blocks of rows, parts of columns, registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from composattn.backends.fused.tiles.written import Written
from composattn.backends.hopper.wgmma import MN, K, get, issue_in_parts, product
from composattn.emulator.capture import Captured
from composattn.emulator.launch import run
from composattn.primitives.swizzled_tiles import tile_layout
from composattn.primitives.values import permuted

THREADS, DEPTH = 128, 64


class Product:
    """C (rows, columns) = A (rows, DEPTH) B, whose columns are contiguous where `right` is MN; half, then the rest."""

    def __init__(
        self, dtype: Any, rows: int, columns: int, parts: int, written: Written, right: Any, resident: bool
    ) -> None:
        self.dtype, self.rows, self.columns, self.parts = dtype, rows, columns, parts
        self.written, self.right, self.resident = written, right, resident

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream):
        self.kernel(a, b, c).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, a, b, c):
        thread, _, _ = cute.arch.thread_idx()
        memory = SmemAllocator()
        shared = []
        for given in (a, b):
            layout = tile_layout(*given.shape)
            tile = memory.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
            count = given.shape[0] * given.shape[1] // THREADS
            for n in cutlass.range(count, unroll=1):
                place = n * THREADS + thread
                row, column = place // given.shape[1], place % given.shape[1]
                tile[row, column] = given[row, column]
            shared.append(tile)
        sA, sB = shared
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()
        mma = product(
            self.dtype,
            self.columns // self.parts,
            right=self.right,
            left_in_registers=self.resident,
            written=self.written,
        )
        mine = mma.get_slice(0)
        right = permuted(sB, 1, 0) if const_expr(self.right is MN) else sB
        rB = mine.make_fragment_B(mine.partition_B(right))
        rA = mine.make_fragment_A(mine.partition_A(sA))
        if const_expr(self.resident):
            rA = cute.make_rmem_tensor(mine.partition_shape_A((self.rows, DEPTH)), self.dtype)
            get(mma, rA, sA, thread)
        sums = cute.make_rmem_tensor(mine.partition_shape_C((self.rows, self.columns)), Float32)
        places = mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.rows, self.columns)))
        for n in cutlass.range_constexpr(cute.size(sums)):
            row, column = places[n]
            sums[n] = c[row, column]  # NaN, which a sum that begins does not add to
        steps = cute.size(rB, mode=[2])
        issue_in_parts(sums, [(mma, rA, range(steps // 2)), (mma, rA, range(steps // 2, steps))], rB)
        warpgroup.wait_group(0)
        for n in cutlass.range_constexpr(cute.size(sums)):
            row, column = places[n]
            c[row, column] = sums[n]


@pytest.mark.parametrize("written", ["by steps", "whole", "anew"])
@pytest.mark.parametrize(
    ("rows", "columns", "parts", "right", "resident", "dtype"),
    [
        pytest.param(64, 32, 1, K, False, BFloat16, id="both operands in shared memory"),
        pytest.param(128, 32, 1, K, False, Float16, id="two blocks of rows"),
        pytest.param(128, 64, 2, MN, False, BFloat16, id="two blocks of rows and parts of columns"),
        pytest.param(64, 64, 1, MN, True, BFloat16, id="the left one in registers"),
        pytest.param(64, 64, 2, MN, True, Float16, id="the left one in registers, parts of columns"),
    ],
)
def test_the_product_is_that_of_torch(
    rows: int,
    columns: int,
    parts: int,
    right: Any,
    resident: bool,
    dtype: Any,
    written: Written,
    generator: torch.Generator,
) -> None:
    kind = torch.bfloat16 if dtype is BFloat16 else torch.float16
    a = torch.randn(rows, DEPTH, generator=generator).to(kind)
    b = torch.randn(DEPTH, columns, generator=generator).to(kind)
    given = b if right is MN else b.t().contiguous()
    found = torch.full((rows, columns), torch.nan)
    fakes = [make_fake_tensor(dtype, t.shape, t.stride(), assumed_align=16) for t in (a, given)]
    fakes.append(make_fake_tensor(Float32, found.shape, found.stride(), assumed_align=16))
    kernel = Captured(Product(dtype, rows, columns, parts, written, right, resident), [*fakes, make_fake_stream()])
    run(kernel.program, kernel.launch(a, given, found, dynamic_shared=64 << 10))
    torch.testing.assert_close(found.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-5)


def test_a_left_operand_in_registers_has_one_block_of_rows() -> None:
    shapes = (128, DEPTH), (DEPTH, 32), (128, 32)
    kinds = BFloat16, BFloat16, Float32
    fakes = [make_fake_tensor(k, s, (s[1], 1), assumed_align=16) for k, s in zip(kinds, shapes, strict=True)]
    with pytest.raises(AssertionError, match="rows of one block"):
        Captured(Product(BFloat16, 128, 32, 1, "whole", MN, True), [*fakes, make_fake_stream()])
