"""Numbers and kernels for Blackwell GPUs; importing this imports no kernel language."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..fused.tiles.architecture import Architecture, Kernel
from ..fused.tiles.target import BLACKWELL
from .backward_tiling import choose_backward
from .tiling import choose_forward


def _kernels() -> Mapping[str, type[Kernel]]:
    from ..fused.kernels.around.combine import Combine
    from ..fused.kernels.around.preprocess import Preprocess
    from ..fused.kernels.around.quantise import Quantise
    from ..fused.kernels.around.units import Units
    from .backward import BlackwellBackward
    from .backward_pair import BlackwellBackwardPair
    from .backward_query_pair import BlackwellBackwardQueryPair
    from .backward_wide import BlackwellBackwardWide
    from .backward_wide_pair import BlackwellBackwardWidePair
    from .forward import BlackwellForward
    from .rounding import BlackwellGather, BlackwellPostprocess

    return {
        "forward": BlackwellForward,
        "combine": Combine,
        "units": Units,
        "preprocess": Preprocess,
        "backward": BlackwellBackward,
        "backward_pair": BlackwellBackwardPair,
        "backward_query_pair": BlackwellBackwardQueryPair,
        "backward_wide": BlackwellBackwardWide,
        "backward_wide_pair": BlackwellBackwardWidePair,
        "postprocess": BlackwellPostprocess,
        "backward_gather": BlackwellGather,
        "quantise": Quantise,
    }


ARCHITECTURE = Architecture(
    name="blackwell",
    chip="Blackwell",
    target=BLACKWELL,
    ran=False,
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    max_value_dim=256,
    max_gradient_dim=256,
    forward=choose_forward,
    backward=choose_backward,
    kernels=_kernels,
)
