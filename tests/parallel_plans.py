"""What a rank's calls are planned as for one H200, and how many tiles they execute: without a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from composattn.analysis.bands import exchanged
from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.fused.tiles.work import visits_now
from composattn.call.problem import Problem
from composattn.graph.form import graphs_of
from composattn.mods.mask import Mask
from composattn.parallel.movement import SubCall
from composattn.parallel.offset_mods import Graphs, OffsetMods
from composattn.parallel.part_call import Offsets


class PlannedTiles(NamedTuple):
    """Tilings of the forward and the backward, and how many tiles each executes, of all heads."""

    tilings: tuple[Any, Any]
    forward_tiles: int
    backward_tiles: int


def planned(mask: Mask, queries: int, keys: int) -> PlannedTiles:
    """The plan of 32 query and 8 key/value heads of 128, in bf16."""
    program = Program(None, mask.expr)
    problem = Problem(1, 32, 8, queries, keys, 128, 128, torch.bfloat16, torch.device("cpu"))
    forward, backward = plan_forward(problem, program, HOPPER), plan_backward(problem, program, HOPPER).main
    tiling = forward.tiling
    of_queries = visits_now(problem, program.intervals, tiling.queries, tiling.tile_n)
    of_keys = visits_now(
        problem.mirrored, exchanged(backward.intervals), backward.tiling.tile_n, backward.tiling.tile_m
    )
    assert of_queries is not None and of_keys is not None
    return PlannedTiles((tiling, backward.tiling), int(of_queries.sum()) * 32, int(of_keys.sum()) * 32)


def of_call(mask: Mask, seq_len: int, call: SubCall) -> PlannedTiles:
    """One call of a rank, whose rows are a run."""
    assert call.first is not None
    offset_mods = OffsetMods.of(Graphs.of(None, mask, None), [], [], seq_len, runs=True)
    Offsets(*call.first, seq_len, {}).enter()
    (_, graph) = graphs_of(offset_mods.forms, offset_mods.leaves_of([], {}))[:2]
    rows, keys = (part.stop - part.start for part in (call.rows, call.keys))
    return planned(Mask(graph), rows, keys)
