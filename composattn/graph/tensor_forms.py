"""Whether tensors have the forms of others, asked of torch in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards


def of_the_form(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Whether tensors have the forms of these: torch looks at all in one call, where to read one of them takes six.

    That is class, dtype, device, shape, strides and whether a gradient is required, and what torch dispatches by here
    and now: never in inference mode where this was made outside of it, nor below another transform. No tensor that is
    given twice has it. Not to be asked of a nested tensor: torch throws where it can't be caught.
    """
    made: Any = TensorGuards  # torch annotates one without tensors
    return made(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


def of_these_forms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[..., bool]:
    """`of_the_form` for three tensors, some of which may be one: 0.7 of the time of three looks where none are."""
    if q is not k and q is not v and k is not v:
        return of_the_form(q, k, v)
    is_q, is_k, is_v = of_the_form(q), of_the_form(k), of_the_form(v)
    return lambda q, k, v: is_q(q) and is_k(k) and is_v(v)
