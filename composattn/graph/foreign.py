"""Classes of torch's whose elements are not what a tensor of them means, so that reading them would be wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# by the module that defines them: what to pass instead. CausalBias holds memory that nobody ever wrote to
_INSTEAD = {
    "torch.nn.attention.bias": "write mask_mod=composattn.mods.causal(), or causal(align='bottom_right') for "
    "causal_lower_right; composattn.integrations.sdpa takes it as attn_mask",
    "torch.masked.maskedtensor.core": "pass its data, and say in a mask_mod what it hides",
}


def reason_against(tensor: torch.Tensor) -> str | None:
    """Why the elements of a tensor are not to be read, and what to pass instead; None where they are."""
    if tensor.__class__ is torch.Tensor:
        return None
    for kind in type(tensor).__mro__:
        if kind.__module__ in _INSTEAD:
            return f"a {kind.__name__}, whose elements are not what it means; {_INSTEAD[kind.__module__]}"
    return None


def is_fake(tensor: object) -> bool:
    """Whether there are no elements: torch asks for shapes alone."""
    return isinstance(tensor, FakeTensor)


def mode_of(tensors: Iterable[torch.Tensor]) -> FakeTensorMode:
    """That of the FakeTensors among these."""
    return next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))
