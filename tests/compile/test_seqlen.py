"""Packed rows by bulk copies, in the emulator: zeros beyond a sequence's end, nothing stored there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from composattn.emulator.capture import Captured
from composattn.emulator.launch import run
from composattn.primitives.cut_rows import partition
from composattn.primitives.seqlen import DenseRows, PackedRows, PagedRows, most_rows
from composattn.primitives.swizzled_tiles import tile_layout

TILE = 32


class CopySequences:
    """Block (tile, h, b): tile `tile` of head h of sequence b, from x to shared memory, and from there to y."""

    def __init__(self, columns: int) -> None:
        self.columns = columns

    @cute.jit
    def __call__(
        self, x: cute.Tensor, y: cute.Tensor, seen: cute.Tensor, starts: cute.Tensor, used: cute.Tensor | None, stream
    ):
        rows = PackedRows(starts, used)
        shape, self.dtype = (TILE, self.columns), x.element_type
        layout = tile_layout(*shape)
        tma_x, tX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), rows.for_copies(x), layout, shape)
        tma_y, tY = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), rows.for_copies(y), layout, shape)
        self.kernel(tma_x, tX, tma_y, tY, seen, rows, layout).launch(
            grid=(seen.shape[2], x.shape[1], starts.shape[0] - 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, tma_x, tX, tma_y, tY, seen, rows, layout):
        tile, h, b = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        smem = SmemAllocator()
        barrier = smem.allocate_array(Int64, 1)
        shared = smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        sequence = rows.sequence(b)
        source, target = (sequence.tiles(t, h, (TILE, self.columns)) for t in (tX, tY))
        into, loaded = partition(tma_x, shared, source)
        outof, stored = partition(tma_y, shared, target)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE * self.columns * 2)
        cute.copy(tma_x, loaded[None, tile], into, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        for c in cutlass.range_constexpr(self.columns):
            seen[b, h, tile, lane, c] = shared[lane, c].to(Float32)
        cute.copy(tma_y, outof, stored[None, tile])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


class CountRows:
    """How many rows a head can have, of packed tensors, of dense ones and of pages, as sections of heads count them."""

    @cute.jit
    def __call__(self, packed: cute.Tensor, dense: cute.Tensor, table: cute.Tensor, found: cute.Tensor, stream):
        rows = PackedRows(table[0, None]), DenseRows(dense.shape[2]), PagedRows(table, table[None, 0], 16)
        counts = [most_rows(r, t) for r, t in zip(rows, (packed, dense, dense), strict=True)]
        self.kernel(tuple(counts), found).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, counts: tuple, found: cute.Tensor):
        for i in cutlass.range_constexpr(3):
            found[i] = counts[i]


def fake(dtype: Any, rank: int, columns: int | None = None) -> Any:
    sizes = [cute.sym_int() for _ in range(rank)]
    strides: list[Any] = [cute.sym_int64(divisibility=8) for _ in range(rank - 1)] + [1]
    if columns:
        sizes[-1] = columns
    return make_fake_tensor(dtype, tuple(sizes), tuple(strides), assumed_align=16 if columns else 4)


@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("with_used", [False, True], ids=["whole", "used"])
def test_copies_end_where_a_sequence_ends(columns: int, with_used: bool, generator: torch.Generator) -> None:
    lengths, heads, spare = [70, 0, 1, 32, 45], 2, 7
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    used = torch.tensor([33, 0, 1, 0, 45], dtype=torch.int32)
    ends = used if with_used else torch.tensor(lengths)
    total = sum(lengths) + spare
    x = torch.randn(total, heads + 1, columns, generator=generator).to(torch.bfloat16)[:, 1:]  # strided rows
    y = torch.full((heads, total, columns), torch.nan).to(torch.bfloat16).transpose(0, 1)
    seen = torch.full((len(lengths), heads, 4, TILE, columns), torch.nan)
    i32, bf16 = Int32, cutlass.BFloat16
    function = CopySequences(columns)
    strides = tuple(cute.sym_int64() for _ in range(4))
    arguments = (
        fake(bf16, 3, columns),
        fake(bf16, 3, columns),
        make_fake_tensor(Float32, (*(cute.sym_int() for _ in range(4)), columns), (*strides, 1)),
        make_fake_tensor(i32, (cute.sym_int(),), (1,)),
        make_fake_tensor(i32, (cute.sym_int(),), (1,)) if with_used else None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    kernel = Captured(function, arguments)
    run(kernel.program, kernel.launch(x, y, seen, starts, used if with_used else None, dynamic_shared=64 << 10))

    expected = torch.full((total, heads, columns), torch.nan).to(torch.bfloat16)
    for b, length in enumerate(ends.tolist()):
        first = int(starts[b])
        mine = torch.zeros(4 * TILE, heads, columns)
        mine[:length] = x[first : first + length].float()
        assert torch.equal(seen[b].flatten(1, 2), mine.transpose(0, 1))
        expected[first : first + length] = x[first : first + length]
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())


def test_sections_count_the_rows_of_all_packed_sequences() -> None:
    """Not those that a copy's descriptor goes over, 2^30, with which a section never had more than one head."""
    packed, dense = torch.zeros(300, 2, 64).to(torch.bfloat16), torch.zeros(3, 2, 40, 64).to(torch.bfloat16)
    table, found = torch.zeros(4, 5, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    arguments = (
        fake(cutlass.BFloat16, 3, 64),
        fake(cutlass.BFloat16, 4, 64),
        make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1)),
        make_fake_tensor(Int32, (3,), (1,)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    kernel = Captured(CountRows(), arguments)
    run(kernel.program, kernel.launch(packed, dense, table, found))
    assert found.tolist() == [300, 40, 5 * 16]
