"""Classes of torch's whose elements are not what a tensor of them means, so that reading them would be wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

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


def is_computed(tensor: torch.Tensor) -> bool:
    """Whether its class computes what a read of it gives, so that its own memory, if it has any, says something else.

    Such are weights of 8 bits that look like wide ones, and what a collective of torch.distributed gives before anybody
    waited for it. Those that stand for shapes alone are not meant.
    """
    if tensor.__class__ in _WITH_MEMORY or isinstance(tensor, (FakeTensor, FunctionalTensor)):
        return False
    return torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python)


def is_heard(tensor: torch.Tensor) -> bool:
    """Whether its class has a `__torch_function__` of its own, which may change what a read gives."""
    if tensor.__class__ in _WITH_MEMORY:
        return False
    told = type(tensor).__torch_function__
    return getattr(told, "__func__", told) not in _SAY_NOTHING


_SAY_NOTHING = (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, with its numbers in memory as they read; its class may still give one that `is_computed`.

    Views of imaginary parts are negated by torch when they are read.
    """
    tensor = tensor.resolve_neg()
    return tensor.clone() if is_computed(tensor) else tensor


def is_fake(tensor: object) -> bool:
    """Whether there are no elements: torch asks for shapes alone."""
    return isinstance(tensor, FakeTensor)


def mode_of(tensors: Iterable[torch.Tensor]) -> FakeTensorMode:
    """That of the FakeTensors among these."""
    return next(tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor))
