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
from benchmarks.tilings import changes_of
from composattn.backends.fused.compiling.inspect import assembly
from composattn.backends.fused.tiles.target import HOPPER
from composattn.primitives.exponential_units import ExponentialUnits
from composattn.primitives.rescale_threshold import RescaleThreshold

BY_SUMS = RescaleThreshold(8.0, share=1 / 32)

CASES = {case.name: case for case in long_cases("forward")}


def kernel(name: str) -> kernels.Kernel:
    case = CASES[name]
    found = kernels.ours(case, case.pattern(case, torch.device("cpu")), "sm_90a")
    if not assembly(found.cubin):
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


def test_a_variant_is_fields_of_a_tiling_with_what_makes_their_objects() -> None:
    found = changes_of("tile_n=96 threshold=(8.0, 0.0625) exponential=(1, 8)")
    assert found == {"tile_n": 96, "threshold": RescaleThreshold(8.0, 1 / 16), "exponential": ExponentialUnits(1, 8)}


def test_a_decoding_case_is_planned_for_its_keys() -> None:
    case = next(case for case in EVERY if case.name == "decode B1 q1 kv131072 GQA 32/8 D128")
    plan = kernels.plan_of(case, case.pattern(case, torch.device("cpu")), HOPPER)
    assert plan.is_split and plan.tiling.threshold == BY_SUMS
