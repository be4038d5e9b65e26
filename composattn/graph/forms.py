"""Whether a tensor has the form of another one, asked of torch in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards


def of_the_form(tensor: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor has the form of this one: torch looks at all of it in one call, where to read it takes six.

    That is class, dtype, device, shape, strides and whether a gradient is required, and what torch dispatches by here
    and now: never in inference mode where this was made outside of it, nor below another transform. Not to be asked of
    a nested tensor: torch throws where it can't be caught.
    """
    made: Any = TensorGuards  # torch annotates one without tensors
    return made(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]
