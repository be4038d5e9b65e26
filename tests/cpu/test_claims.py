"""Hopper tilings where whoever comes first at dQ writes it: none that leaves it unwritten, or waits in a circle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from composattn.analysis.program import Program
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.backward_tiling import HopperBackwardTiling
from composattn.call.problem import Problem
from composattn.mods import causal


def tiling(length: int, *, is_causal: bool = False, deterministic: bool = False) -> HopperBackwardTiling:
    problem = Problem(1, 16, 16, length, length, 128, 128, torch.bfloat16, torch.device("cpu"))
    program = Program(None, causal().expr if is_causal else None)
    found = plan_backward(problem, program, HOPPER, deterministic=deterministic).main.tiling
    assert isinstance(found, HopperBackwardTiling)
    return found


def test_causal_calls_of_2k_claim_dq_and_a_fixed_order_of_all_writes_it_first() -> None:
    assert tiling(2048, is_causal=True).claimed_parts == 2 and tiling(3000).claimed_parts == 0
    assert tiling(4096, deterministic=True).first_writes


def test_whoever_claims_dq_writes_it_in_bulk() -> None:
    with pytest.raises(AssertionError, match="only copies from shared memory do"):
        dataclasses.replace(tiling(2048, is_causal=True), dq_leaves="later")


def test_whoever_writes_first_in_a_fixed_order_does_so_in_bulk() -> None:
    with pytest.raises(AssertionError, match="only copies from shared memory do"):
        dataclasses.replace(tiling(4096, deterministic=True), dq_leaves="later")
