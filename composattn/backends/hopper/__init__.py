"""Numbers and kernels for Hopper GPUs; importing this imports no kernel language."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..fused.tiles.architecture import Architecture, Kernel
from ..fused.tiles.target import HOPPER
from .backward_choice import choose_backward
from .eight_bits import multiplies_eight_bits, refuses_eight_bits
from .forward_choice import choose_forward


def _kernels() -> Mapping[str, type[Kernel]]:
    from ..fused.kernels.around.combine import Combine
    from ..fused.kernels.around.dequantise import Dequantise
    from ..fused.kernels.around.preprocess import Preprocess
    from ..fused.kernels.around.quantise import Quantise
    from ..fused.kernels.around.units import Units
    from .backward import HopperBackward
    from .backward_exchange import HopperBackwardExchange
    from .backward_pair import HopperBackwardPair
    from .backward_wide import HopperBackwardWide
    from .forward import HopperForward, HopperForwardGuessing
    from .forward_fp8 import HopperForwardFp8
    from .forward_of_bytes import HopperForwardGuessingOfBytes, HopperForwardOfBytes
    from .forward_wide import HopperForwardWide
    from .forward_wide_of_bytes import HopperForwardWideOfBytes
    from .rounding import HopperGather, HopperPostprocess

    return {
        "forward": HopperForward,
        "forward_guessing": HopperForwardGuessing,
        "forward_of_bytes": HopperForwardOfBytes,
        "forward_guessing_of_bytes": HopperForwardGuessingOfBytes,
        "forward_wide": HopperForwardWide,
        "forward_wide_of_bytes": HopperForwardWideOfBytes,
        "forward_fp8": HopperForwardFp8,
        "combine": Combine,
        "units": Units,
        "preprocess": Preprocess,
        "backward": HopperBackward,
        "backward_wide": HopperBackwardWide,
        "backward_exchange": HopperBackwardExchange,
        "backward_pair": HopperBackwardPair,
        "postprocess": HopperPostprocess,
        "backward_gather": HopperGather,
        "quantise": Quantise,
        "dequantise": Dequantise,
    }


ARCHITECTURE = Architecture(
    name="hopper",
    chip="Hopper",
    target=HOPPER,
    ran=True,
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=576,
    max_value_dim=512,
    max_gradient_dim=512,
    forward=choose_forward,
    backward=choose_backward,
    kernels=_kernels,
    refuses_eight_bits=refuses_eight_bits,
    multiplies_eight_bits=multiplies_eight_bits,
)
