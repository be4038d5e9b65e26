"""The cycle model of our own kernels, compiled with no GPU: counts that follow from the tile."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")

from benchmarks import limits
from benchmarks.cases import CASES as EVERY
from benchmarks.cases import causal, full
from benchmarks.implementations import OURS
from benchmarks.model import kernels
from benchmarks.model.costs import tile_cost
from benchmarks.tile_model import Counted, long_cases
from composattn.backends.fused.inspect import machine_code

CASES = {case.name: case for case in long_cases("forward")}


def kernel(name: str) -> kernels.Kernel:
    case = CASES[name]
    found = kernels.ours(case, case.pattern(case, torch.device("cpu")), "sm_90a")
    if not machine_code(found.cubin):
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    return found


@pytest.mark.parametrize(("name", "pattern", "sums"), [("D64 full", full, 8), ("D128 causal", causal, 8)])
def test_units_of_a_hopper_forward_are_those_of_its_tile(name: str, pattern: object, sums: int) -> None:
    """`sums`: columns of ones that the output's product has too."""
    found = kernel(name)
    assert CASES[name].pattern is pattern and found.spills == 0
    cost = tile_cost(found, "sm_90a", tested=False)
    pairs = found.rows * found.keys
    assert cost.clocks["matrix"] == 2 * pairs * (found.d + found.dv + sums) / 4096
    # an exponential for each pair, and two of each thread for its two rows' rescale, if there is one
    assert 1.0 <= cost.clocks["exp"] / (pairs / 16) < 1.05
    assert cost.bound == max(cost.clocks.values()) < cost.total


def test_a_causal_forward_has_a_loop_for_tiles_with_a_test_and_one_for_those_without() -> None:
    found = kernel("D192 causal")
    (working,) = found.roles["matrix and softmax"]
    plain, tested = working.path(tested=False), working.path(tested=True)
    assert len(working.loops) == 2 and len(plain) < len(tested)
    assert len(plain) < len(working.plain.body)  # the rescale is left out
    lines = list(Counted.of(found, "sm_90a").lines())
    assert lines[0] == "128 x 80 a block, 384 threads, 0 spills"
    assert f"{len(working.plain.body)} plain, {len(working.tested.body)} tested" in "\n".join(lines)


def test_the_limit_of_a_call_counts_rounds_and_pairs() -> None:
    """By hand: 64 tiles of 20 heads are 1280 pairs of blocks; the 26 behind 19 rounds of 66 are cut in two."""
    kernel("D192 full")
    case = next(case for case in EVERY if case.name == "backward D192 S8192 full")
    found = limits.limit(case, OURS)
    assert (found.tile, found.rounds) == ("64 x 64", (19 * 66 + 26 * 2) * 2 / 132)
    assert round(found.balance, 3) == round(1280 / 66 / (19 + 1 / 2), 3)
    assert found.pairs == 1 and found.tested == 0
    assert found.flop_clocks < found.clocks < 1.5 * found.flop_clocks
