"""How the Blackwell forward cuts the work: tile sizes and stages, from what shared and tensor memory hold."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import ClassVar

import torch

from ...analysis.program import Program
from ...call.problem import Problem
from ...primitives.exponential_units import HARDWARE, ExponentialUnits
from ..fused.planning.facts import FORWARD, Facts
from ..fused.planning.tables import first, tables_of
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import Chosen, ForwardTiling, fitting, whole_pages
from .roles import ONE_TILE, TWO_TILES, Roles
from .tensor_memory import COLUMNS, TensorMemory

ROWS = 128  # of one product: the lanes of tensor memory
STEP = 16  # keys that one product sums over
SMALL = 3072  # bytes: barriers, factors of rows, and what aligns the tiles
# Of 32 columns so many take their exponentials from multiply-adds, by what a score mod computes and by D + Dv: as many
# as leave the busiest unit the least, of what an element takes in the machine code of these kernels
# (benchmarks/log/2026-11.md#the-forward-for-blackwell-as-counted). Not timed
PERIOD = 32
UNTIMED = "not measured: no device has timed it"
TABLES = tables_of(Path(__file__).with_name("tables.json"))
# keys of a tile, stages of K and of V, by how much is on its way
STAGES = tuple(itertools.product((128, 96, 64), ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2), (2, 1))))
# Degree 3 errs by 8.8e-5, less than bf16 rounds; but LSE of an fp16 call was off by 6.6e-5, where 4.6e-5 are allowed.
# Degree 4 errs by 4e-6.
DEGREE = {torch.bfloat16: 3, torch.float16: 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackwellTiling(ForwardTiling):
    """`query_tiles` of 128 rows, a row a thread, each with `score_places` in tensor memory where scores are computed.

    K and V lie in rings of `k_stages` and `v_stages`. Two query tiles take turns: one's softmax runs under the other's
    products. One has two places for scores, and its next scores are computed under its softmax. The first `early_keys`
    probabilities of a row are stored, and multiplied, before the others are there. `maximum_by_load`: where scores are
    neither changed nor tested, their load says which is the largest.
    """

    l2: ClassVar[int] = 64 << 20

    query_tiles: int
    score_places: int
    k_stages: int
    v_stages: int
    early_keys: int = 0
    maximum_by_load: bool

    def __post_init__(self) -> None:
        _ = self.tensor_memory  # refuses a map that does not fit

    @property
    def roles(self) -> Roles:
        return ONE_TILE if self.query_tiles == 1 else TWO_TILES

    @property
    def tensor_memory(self) -> TensorMemory:
        return TensorMemory.of(self.query_tiles, self.score_places, self.tile_n, self.dv)

    @property
    def first_output(self) -> int:
        """The column of the unit's memory where the outputs of all query tiles begin, one after the other."""
        return self.tensor_memory.outputs[0].first

    @property
    def region(self) -> int:
        """Numbers of a row of the shared memory that a query tile has: Q's, and later O's."""
        return max(self.d, self.dv)

    def describe(self) -> dict[str, str]:
        return super().describe() | {"roles": str(self.roles), "columns": str(self.tensor_memory)}

    @property
    def shared_memory(self) -> int:
        keys = self.tile_n * (self.k_stages * self.d + self.v_stages * self.dv)
        return SMALL + 2 * (self.tile_m * self.region + keys)


def choose_forward(problem: Problem, program: Program, target: Target) -> Chosen:
    """Tiles of the forward kernel: they fill shared and tensor memory, most keys first."""
    call = Facts(FORWARD, problem, program, target, rows=ROWS, heads=packed_heads(problem, program, ROWS))
    tiles, (d, dv) = first(TABLES["query_tiles"], call), call.dims
    polynomial = first(TABLES["by_polynomial"], call, width=d + dv)
    most = min(first(TABLES["most_keys"], call), (COLUMNS - dv) // 2)
    made = functools.partial(
        BlackwellTiling,
        tile_m=ROWS * tiles,
        d=d,
        dv=dv,
        query_tiles=tiles,
        score_places=2 // tiles,
        maximum_by_load=target.maximum_by_load,
        exponential=ExponentialUnits(polynomial, PERIOD, DEGREE[problem.dtype]) if polynomial else HARDWARE,
        packed_heads=call.heads,
        heads_together=call.heads_together,
        scheduler=Scheduler.asked(call.persistent),
    )
    tiling = fitting((made(tile_n=n, k_stages=k, v_stages=v) for n, (k, v) in STAGES if n <= most), target)
    keys = whole_pages(problem, tiling.tile_n)
    tiling = dataclasses.replace(tiling, tile_n=keys, early_keys=keys * 3 // 4 // 32 * 32)
    return Chosen(tiling, f"{call}; {UNTIMED}")
