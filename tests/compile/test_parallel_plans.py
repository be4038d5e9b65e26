"""What the kernels of ranks that share a sequence are: those of one device, wherever their rows begin."""

from __future__ import annotations

import torch

from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.tiles.target import TARGETS
from composattn.call.problem import Problem
from composattn.graph.form import graphs_of
from composattn.mods import causal, sliding_window
from composattn.parallel.offset_mods import FIRST_KV, FIRST_Q, Graphs, OffsetMods


def test_a_run_of_a_rank_takes_the_tiles_of_the_whole_sequence() -> None:
    target = next(t for t in TARGETS.values() if t.backend == "hopper")
    for mask in (causal(), causal() & sliding_window(4096)):
        offset_mods = OffsetMods.of(Graphs.of(None, mask, None), [], [], 131072, runs=True)
        FIRST_Q.value, FIRST_KV.value = 32768, 28672
        share = Program(*graphs_of(offset_mods.forms, offset_mods.leaves_of([], {})))
        plans = []
        for program, rows, keys in ((Program(None, mask.expr), 131072, 131072), (share, 32768, 36864)):
            shape = Problem(1, 32, 8, rows, keys, 128, 128, torch.bfloat16, torch.device("cpu"))
            plans.append(plan_forward(shape, program, target, return_lse=True, positive_scale=True))
        whole, part = plans
        assert (part.tiling.tile_m, part.tiling.tile_n) == (whole.tiling.tile_m, whole.tiling.tile_n) == (128, 128)
