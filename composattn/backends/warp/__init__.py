"""Numbers and kernels for GPUs whose tensor cores are a warp's (mma.sync): Ampere, Ada, and Blackwell of workstations.

Importing this imports no kernel language.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..fused.tiles.architecture import Architecture, Kernel
from ..fused.tiles.target import AMPERE
from .eight_bits import refuses_eight_bits
from .tiling import choose_backward, choose_forward


def _kernels() -> Mapping[str, type[Kernel]]:
    from ..fused.kernels.around.combine import Combine
    from ..fused.kernels.around.preprocess import Preprocess
    from ..fused.kernels.around.units import Units
    from .backward import WarpBackward
    from .forward import WarpForward
    from .rounding import WarpGather, WarpPostprocess

    return {
        "forward": WarpForward,
        "combine": Combine,
        "units": Units,
        "preprocess": Preprocess,
        "backward": WarpBackward,
        "postprocess": WarpPostprocess,
        "backward_gather": WarpGather,
    }


ARCHITECTURE = Architecture(
    name="warp",
    chip="Ampere, Ada or RTX Blackwell",
    target=AMPERE,
    ran=False,
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    max_value_dim=256,
    max_gradient_dim=256,
    forward=choose_forward,
    backward=choose_backward,
    kernels=_kernels,
    refuses_eight_bits=refuses_eight_bits,
    reads_eight_bits=False,
    copies_boxes=False,
    overlaps_kernels=False,
    elsewhere=AMPERE,
)
