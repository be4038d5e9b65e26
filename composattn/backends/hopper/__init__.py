"""Numbers and kernels for Hopper GPUs; importing this imports no kernel language."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..fused.architecture import Architecture, Kernel
from ..fused.target import HOPPER
from .backward_tiling import backward_tiling
from .tiling import forward_tiling


def _kernels() -> Mapping[str, Callable[[Any], Kernel]]:
    from ..fused.kernels import combine, preprocess
    from . import backward, backward_wide, forward, rounding

    return {
        "forward": forward.kernel,
        "combine": combine.kernel,
        "preprocess": preprocess.kernel,
        "backward": backward.kernel,
        "backward_wide": backward_wide.kernel,
        "postprocess": rounding.postprocess,
        "backward_gather": rounding.backward_gather,
    }


ARCHITECTURE = Architecture(
    name="hopper",
    chip="Hopper",
    target=HOPPER,
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    forward_tiling=forward_tiling,
    backward_tiling=backward_tiling,
    kernels=_kernels,
)
