"""What follows from how a tile is spread over lanes: rows' statistics and captured sums, in the emulator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from composattn.analysis.captured_gradient import GradientProgram, Pattern, fused_reads
from composattn.analysis.program import Program
from composattn.backends.hopper.wgmma import fragment_shape
from composattn.emulator.capture import Captured
from composattn.emulator.launch import run
from composattn.mods.score import Score
from composattn.primitives.diagonals import Diagonals
from composattn.primitives.emit import Evaluator, Leaves, Mods
from composattn.primitives.emit_captured import CapturedSums
from composattn.primitives.lane_diagonals import LaneDiagonals
from composattn.primitives.online_softmax import OnlineSoftmax
from composattn.primitives.rescale_threshold import RescaleThreshold
from composattn.primitives.score_tile import ROW_PER_LANE, FragmentShape, ScoreTile

# of one warp; one row per lane is how a tensor core with a memory of its own hands out its accumulator
SHAPES = {
    "four lanes per row": fragment_shape(48),
    "four lanes per column": fragment_shape(48).transposed,
    "one row per lane": FragmentShape((0,), tuple(range(40)), ROW_PER_LANE),
    "one column per lane": FragmentShape((0,), tuple(range(40)), ROW_PER_LANE).transposed,
}
TILES = 3


def fake(dtype: Any, *shape: int) -> Any:
    strides = tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
    return make_fake_tensor(dtype, shape, strides, assumed_align=4)


def own_elements(shape: FragmentShape, tile: cute.Tensor, lane: Any) -> cute.Tensor:
    """What a lane has of a warp's tile (rows, columns), (row, column) of its fragment."""
    values = cute.make_rmem_tensor((shape.rows, shape.columns), Float32)
    for r, row in enumerate(shape.row_offsets):
        for c, column in enumerate(shape.column_offsets):
            values[r, c] = tile[shape.lane_row(lane) + row, shape.lane_column(lane) + column]
    return values


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lanes_share_the_tile_out(shape: FragmentShape) -> None:
    places = [
        (shape.lane_row(lane) + row, shape.lane_column(lane) + column)
        for lane in range(32)
        for row in shape.row_offsets
        for column in shape.column_offsets
    ]
    assert sorted(places) == [(r, c) for r in range(shape.warp_rows) for c in range(shape.warp_columns)]
    firsts = [shape.lane_row(lane) for lane in range(32) if shape.first_in_row(lane)]
    assert sorted(row + first for first in firsts for row in shape.row_offsets) == list(range(shape.warp_rows))
    firsts = [shape.lane_column(lane) for lane in range(32) if shape.first_in_column(lane)]
    assert sorted(c + first for first in firsts for c in shape.column_offsets) == list(range(shape.warp_columns))


class Softmax:
    """A warp's rows along `TILES` tiles: scores to probabilities in place, the rows' sums, logarithms and factors.

    Where a maximum's lag is by sums, they are read behind each tile, as what they will be.
    """

    def __init__(self, shape: FragmentShape, in_parts: bool, threshold: RescaleThreshold) -> None:
        self.shape, self.in_parts, self.threshold = shape, in_parts, threshold

    @cute.jit
    def __call__(self, scores: cute.Tensor, normalizer: cute.Tensor, lse: cute.Tensor, factors: cute.Tensor, stream):
        self.kernel(scores, normalizer, lse, factors).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, scores, normalizer, lse, factors):
        shape, lane = self.shape, cute.arch.lane_idx()
        softmax = OnlineSoftmax(shape, Float32(1.5), keeps_highest=True, threshold=self.threshold)
        softmax.reset()
        rescale = cute.make_rmem_tensor(shape.rows, Float32)
        rescale.fill(1.0)
        for n in cutlass.range_constexpr(TILES):
            tile = ScoreTile(shape, own_elements(shape, scores[n, None, None], lane), *(Int32(0) for _ in range(4)))
            if const_expr(self.in_parts):
                self.step(softmax, tile, rescale, n == 0)
            else:
                softmax.step(tile, rescale, n == 0)
            if const_expr(self.threshold.share is not None):
                softmax.note_sums(Float32(1.0))
            for r, row in enumerate(shape.row_offsets):
                factors[n, shape.lane_row(lane) + row] = rescale[r]
                for c, column in enumerate(shape.column_offsets):
                    scores[n, shape.lane_row(lane) + row, shape.lane_column(lane) + column] = tile.values[r, c]
        found = [cute.make_rmem_tensor(shape.rows, Float32) for _ in range(2)]
        softmax.finish(*found, [None] * shape.rows)
        for r, row in enumerate(shape.row_offsets):
            normalizer[shape.lane_row(lane) + row] = found[0][r]
            lse[shape.lane_row(lane) + row] = found[1][r]

    def step(self, softmax: OnlineSoftmax, tile: ScoreTile, rescale: cute.Tensor, first: bool) -> None:
        """A step of a kernel that has the tile's maximum from elsewhere, and hands out probabilities in parts."""
        for r in range(tile.rows):
            largest = tile.values[r, 0]
            for c in range(1, tile.columns):
                largest = cute.arch.fmax(largest, tile.values[r, c])
            factor = softmax.raise_maximum(r, [largest], first)
            if factor is not None:
                rescale[r] = factor
            most = tile.columns * 3 // 4
            softmax.exponentials(tile, r, range(most))
            softmax.exponentials(tile, r, range(most, tile.columns))
            softmax.add(tile, r, factor)


def softmax_of(scores: torch.Tensor, softmax: Softmax) -> list[torch.Tensor]:
    """Probabilities, normalizers, LSE and factors."""
    rows = softmax.shape.warp_rows
    found = [scores.clone(), torch.zeros(rows), torch.zeros(rows), torch.zeros(TILES, rows)]
    kernel = Captured(softmax, [*(fake(Float32, *t.shape) for t in found), make_fake_stream()])
    run(kernel.program, kernel.launch(*found))
    return found


@pytest.mark.parametrize(
    "threshold", [RescaleThreshold(2.0), RescaleThreshold(4.0, share=1 / 8)], ids=["threshold", "threshold by sums"]
)
@pytest.mark.parametrize("in_parts", [False, True], ids=["step", "in parts"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_statistics_of_rows_are_those_of_fp64(
    shape: FragmentShape, in_parts: bool, threshold: RescaleThreshold, generator: torch.Generator
) -> None:
    rows, columns = shape.warp_rows, shape.warp_columns
    scores = 3 * torch.randn(TILES, rows, columns, generator=generator)
    scores[1, 3], scores[:, 5] = 40.0, -torch.inf  # a maximum that rises at once; a row with nothing visible
    scores[0, 7] = -torch.inf
    given, normalizer, lse, factors = softmax_of(scores, Softmax(shape, in_parts, threshold))

    natural = 1.5 * math.log(2.0) * scores.double()
    wanted = torch.logsumexp(natural.transpose(0, 1).flatten(1), 1)
    assert torch.equal(lse == -torch.inf, wanted == -torch.inf) and lse[5] == -torch.inf
    torch.testing.assert_close(lse.double(), wanted, atol=2e-6, rtol=2e-6)
    # what was summed before times the factor of each tile after it
    later = torch.stack([factors[n + 1 :].double().prod(0) for n in range(TILES)])
    probabilities = given.double() * (later * normalizer.double())[..., None]
    wanted = torch.exp(natural - torch.where(wanted == -torch.inf, 0.0, wanted)[:, None])
    torch.testing.assert_close(probabilities, wanted, atol=2e-6, rtol=2e-6)


def test_a_maximum_lags_where_the_probability_above_it_is_a_small_share_of_the_sum(generator: torch.Generator) -> None:
    """An eighth at most, and no more than 2^4: a row of one large score, of some, and of a warp's all columns alike."""
    shape, threshold = next(iter(SHAPES.values())), RescaleThreshold(4.0, share=1 / 8)
    scores = torch.full((TILES, shape.warp_rows, shape.warp_columns), -60.0)
    scores[0, :, 0] = 0.0
    scores[0, 1, :12] = 0.0  # a sum of 12
    scores[0, 2] = 0.0
    rise = torch.tensor([0.1, 0.5, 1.0])[:, None]
    scores[1, :3, 1:2] = rise / 1.5  # in log2 units, by the scale
    _, _, _, factors = softmax_of(scores, Softmax(shape, False, threshold))
    sums = torch.tensor([1.0, 12.0, float(shape.warp_columns)])
    stays = 2 ** rise[:, 0] <= (sums / 8).clamp(max=2**4)
    assert stays.tolist() == [False, True, True]
    torch.testing.assert_close(factors[1, :3], torch.where(stays, 1.0, 2 ** -rise[:, 0]))
    scores[1, :3, 1:2] = torch.tensor([5.0, 0.7, 4.5])[:, None] / 1.5
    far = softmax_of(scores, Softmax(shape, False, threshold))[3][1, :3]
    torch.testing.assert_close(far, 2 ** -torch.tensor([5.0, 0.7, 4.5]))


LENGTH = 80
TABLES = {
    Pattern.HEAD: (lambda t: lambda s, b, h, q, kv: s + t[h], (2,)),
    Pattern.ROW: (lambda t: lambda s, b, h, q, kv: s + t[h, q], (2, LENGTH)),
    Pattern.COLUMN: (lambda t: lambda s, b, h, q, kv: s + t[kv], (LENGTH,)),
    Pattern.DISTANCE: (lambda t: lambda s, b, h, q, kv: s + t[q - kv + LENGTH], (2 * LENGTH,)),
    Pattern.PAIR: (lambda t: lambda s, b, h, q, kv: s + t[q, kv], (LENGTH, LENGTH)),
}
FLOATS = 32 * 160
FIRST_Q, FIRST_KV, HEAD = 17, 5, 1


class Sums:
    """A warp's dS of one tile, its rows and columns from `FIRST_Q` and `FIRST_KV`, to the sums of a captured tensor.

    `moving`: along diagonals they go from lane to lane.
    """

    def __init__(self, shape: FragmentShape, program: GradientProgram, moving: bool) -> None:
        self.shape, self.mods, self.moving = shape, Mods(program), moving
        self.sums = CapturedSums(program, self.mods.capture_slot)
        self.by_distance = any(read.pattern is Pattern.DISTANCE for read, *_ in self.sums.reads)

    @cute.jit
    def __call__(self, ds: cute.Tensor, table: cute.Tensor, totals: cute.Tensor, units: cute.Tensor, stream):
        self.kernel(ds, (table, totals, units)).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, ds, captured):
        shape, lane = self.shape, cute.arch.lane_idx()
        leaves = Leaves(Int32(0), Int32(HEAD), Int32(LENGTH), Int32(LENGTH), Float32(1.0), captured, None)
        first = FIRST_Q + shape.lane_row(lane), FIRST_KV + shape.lane_column(lane)
        values = own_elements(shape, ds, lane)
        at = Evaluator(self.mods, leaves, ScoreTile(shape, values, leaves.b, leaves.h, *map(Int32, first)))
        diagonals: Any = None
        if const_expr(self.by_distance):
            lines = SmemAllocator().allocate_array(Float32, FLOATS, byte_alignment=128)
            for n in cutlass.range(FLOATS // 32, unroll=1):
                cute.make_tensor(lines + (n * 32 + lane), cute.make_layout(1))[0] = -Float32.inf  # not to be summed
            if const_expr(self.moving):
                diagonals = LaneDiagonals(shape, lines, FLOATS, 0, 1)
                diagonals.clear()
            else:
                diagonals = Diagonals(shape, lines, FLOATS, 0, 1)
        self.sums.add(at, values, diagonals)()


@pytest.mark.parametrize("pattern", TABLES, ids=lambda p: p.name)
@pytest.mark.parametrize("lanes", ["four lanes per column", "one column per lane"])
def test_captured_sums_follow_the_lanes(lanes: str, pattern: Pattern, generator: torch.Generator) -> None:
    check_sums(SHAPES[lanes], pattern, False, generator)


@pytest.mark.parametrize("rows", [16, 64])
def test_sums_by_distance_may_go_from_lane_to_lane(rows: int, generator: torch.Generator) -> None:
    shape = FragmentShape((0,), tuple(range(rows)), ROW_PER_LANE).transposed
    check_sums(shape, Pattern.DISTANCE, True, generator)


def check_sums(shape: FragmentShape, pattern: Pattern, moving: bool, generator: torch.Generator) -> None:
    make, size = TABLES[pattern]
    table = torch.zeros(size, requires_grad=True)
    score = make(table)
    bare = Program(Score.of(score).expr)
    program = GradientProgram(bare, fused_reads(bare))
    assert [read.pattern for reads in program.reads.values() for read in reads] == [pattern]
    # quarters add up exactly, whatever the order
    ds = torch.randint(-8, 9, (shape.warp_rows, shape.warp_columns), generator=generator) / 4
    totals, units = torch.zeros(table.numel(), dtype=torch.int64), torch.tensor([4.0])
    declared = [fake(Float32, *ds.shape), fake(Float32, *size), fake(Int64, *totals.shape), fake(Float32, 1)]
    kernel = Captured(Sums(shape, program, moving), [*declared, make_fake_stream()])
    run(kernel.program, kernel.launch(ds, table.detach(), totals, units, dynamic_shared=4 * FLOATS))

    rows = FIRST_Q + torch.arange(shape.warp_rows)[:, None]
    columns = FIRST_KV + torch.arange(shape.warp_columns)
    rows, columns = torch.broadcast_tensors(rows, columns)
    heads = torch.full_like(rows, HEAD)
    added = score(torch.zeros(ds.shape), torch.zeros_like(rows), heads, rows, columns)
    (wanted,) = torch.autograd.grad(added, table, ds)
    assert torch.equal(totals.view(size) / 4.0, wanted)
    assert wanted.abs().sum() > 0
