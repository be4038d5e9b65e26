"""Numbers and kernels for Blackwell GPUs; importing this imports no kernel language."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..fused.architecture import Architecture, Kernel
from ..fused.target import BLACKWELL
from .tiling import forward_tiling


def _kernels() -> Mapping[str, type[Kernel]]:
    from ..fused.kernels.combine import Combine
    from .forward import BlackwellForward

    return {"forward": BlackwellForward, "combine": Combine}


ARCHITECTURE = Architecture(
    name="blackwell",
    chip="Blackwell",
    target=BLACKWELL,
    ran=False,
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    forward_tiling=forward_tiling,
    backward_tiling=None,
    kernels=_kernels,
)
