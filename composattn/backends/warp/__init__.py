"""Numbers and kernels for GPUs whose tensor cores are a warp's (mma.sync): Ampere, Ada, and Blackwell of workstations.

Importing this imports no kernel language.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.tiles.architecture import Architecture, Kernel
from ..fused.tiles.target import AMPERE, Target
from .eight_bits import refuses_eight_bits
from .forward_table import forward_tiling, forward_words


def _kernels() -> Mapping[str, type[Kernel]]:
    from ..fused.kernels.around.combine import Combine
    from .forward import WarpForward

    return {"forward": WarpForward, "combine": Combine}


def _no_backward(problem: Problem, program: Program, target: Target, deterministic: bool) -> NoReturn:
    ARCHITECTURE.check_gradient(problem)
    raise AssertionError("no backward passes this check")


ARCHITECTURE = Architecture(
    name="warp",
    chip="Ampere, Ada or RTX Blackwell",
    target=AMPERE,
    ran=False,
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    max_value_dim=256,
    max_gradient_dim=0,
    forward_tiling=forward_tiling,
    backward_tiling=_no_backward,
    kernels=_kernels,
    forward_words=forward_words,
    refuses_eight_bits=refuses_eight_bits,
    reads_eight_bits=False,
    copies_boxes=False,
    elsewhere=AMPERE,
)
