"""Kernels for several architectures, made in one process: each is what a process of its own would make."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline, content_hash
from composattn.backends.fused.compiling.generated import kernel_of
from composattn.backends.fused.planning.plan import CombinePlan, plan_forward
from composattn.backends.fused.tiles.architecture import ARCHITECTURES
from composattn.backends.fused.tiles.target import HOPPER, TARGETS
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.emulator.capture import Captured

# the kernel that combines parts has no tensor core: its code can be made for any GPU
ALONE = """
import sys
from pathlib import Path
from tests.compile.test_architectures import combine, compile_offline
print(compile_offline(combine(sys.argv[1]), Path(sys.argv[2])).ptx)
"""


def combine(arch: str) -> CombinePlan:
    problem = Problem(1, 8, 2, 1, 4096, 64, 64, torch.bfloat16, torch.device("cpu"), schedule=Schedule(split_kv=2))
    return plan_forward(problem, Program(), dataclasses.replace(HOPPER, arch=arch)).combine


@pytest.mark.slow
def test_two_architectures_in_one_process_get_the_code_of_two_processes(tmp_path: Path) -> None:
    for arch in ("sm_90a", "sm_100a"):
        made = compile_offline(combine(arch), tmp_path / "together").ptx
        command = [sys.executable, "-c", ALONE, arch, str(tmp_path / "alone")]
        alone = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f".target {arch}" in made
        assert made.strip() == alone.strip()


def test_kernels_for_several_architectures_are_made_and_emulated_in_one_process(tmp_path: Path) -> None:
    parts, part_lse = torch.zeros(2, 1, 8, 3, 64), torch.zeros(2, 1, 8, 3)
    out, lse = torch.zeros(1, 8, 3, 64, dtype=torch.bfloat16), torch.zeros(1, 8, 3)
    plans = [combine(target.arch) for target in TARGETS.values()]
    environment, keys = dict(os.environ), [content_hash(plan) for plan in plans]
    for plan in plans:
        made = compile_offline(plan, tmp_path)
        assert f".target {plan.target.arch}" in made.ptx
        kernel = Captured(*kernel_of(plan), plan.target.arch, made.ptx)
        assert kernel.launch(parts, part_lse, out, lse).grid == (3, 8, 1)
    # what a process compiled first decides nothing about what follows
    assert dict(os.environ) == environment
    assert [content_hash(plan) for plan in plans] == keys


def test_each_architecture_has_a_kernel_for_every_step_that_plans_name() -> None:
    steps = {"forward", "combine", "backward", "preprocess", "postprocess", "backward_gather"}
    for architecture in ARCHITECTURES.values():
        named = steps | {"quantise"} if architecture.copies_boxes else steps
        assert named <= set(architecture.kernels())
