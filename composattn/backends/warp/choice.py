"""Which tiles a call has, forward and backward: of each a table, of which the first row that fits is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...analysis.captured_gradient import Pattern as Sums
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import CallClass, class_of
from ..fused.planning.tables import Table, rows_of, table
from ..fused.tiles.few_queries import packed_heads
from ..fused.tiles.scheduler import Scheduler
from ..fused.tiles.target import Target
from ..fused.tiles.tiling import Chosen
from ..fused.tiles.traits import sums_by
from .tiling import WarpBackwardTiling, WarpTiling

FEW = 64  # rows of the smallest tile
FILE = Path(__file__).with_name("tables.json")
FORWARD: Table[dict[str, Any]] = table(FILE, "forward")  # fields of the tiling
BACKWARD: Table[dict[str, Any]] = table(FILE, "backward")


def choose_forward(problem: Problem, program: Program, target: Target) -> Chosen:
    """Tiles of the forward kernel."""
    heads = packed_heads(problem, program, FEW)
    call = class_of(problem, program, target, "forward", rows=FEW, heads=heads)
    return _chosen(FORWARD, call, target, lambda said: forward_of(said, problem, call.dims, heads))


def choose_backward(problem: Problem, program: Program, target: Target, deterministic: bool) -> Chosen:
    """Tiles of the backward kernel."""
    call = class_of(problem, program, target, "backward", rows=FEW, deterministic=deterministic)
    return _chosen(BACKWARD, call, target, lambda said: backward_of(said, problem, call.dims, program))


def _chosen(rows: Table[Any], call: CallClass, target: Target, made: Callable[[Any], Any]) -> Chosen:
    """By the first row that is of such calls and fits."""
    found = (Chosen(made(row.says), f"{call}; {row.evidence}") for row in rows_of(rows, call))
    return next(chosen for chosen in found if chosen.tiling.fits(target))


def forward_of(said: dict[str, Any], problem: Problem, dims: tuple[int, int], heads: int = 1) -> WarpTiling:
    """A tiling with these fields, for D and Dv on chip and so many packed heads."""
    d, dv = dims
    scheduler, together = Scheduler.asked(problem.schedule.persistent), problem.schedule.heads_together
    return WarpTiling(**said, d=d, dv=dv, packed_heads=heads, heads_together=together, scheduler=scheduler)


def backward_of(said: dict[str, Any], problem: Problem, dims: tuple[int, int], program: Program) -> WarpBackwardTiling:
    """A tiling with these fields, for D and Dv on chip."""
    d, dv = dims
    tiling = WarpBackwardTiling(**said, d=d, dv=dv, heads_together=problem.schedule.heads_together)
    return tiling.with_distances() if sums_by(program, Sums.DISTANCE) else tiling
