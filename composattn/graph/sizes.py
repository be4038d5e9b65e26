"""Sizes that only the run knows, as those of `nonzero` and `repeat_interleave`: what is asked of them before.

Where torch compiles or exports, a size may be symbolic. One that it has an example of is asked as any number is, and
guarded. One that depends on data has none: a question about it has no answer until the operator runs, which asks again.
"""

from __future__ import annotations

from typing import Any

import torch

from .dynamo import is_traced


def surely(said: Any) -> bool:
    """Whether a comparison of sizes is known to hold, whatever they will be: what is refused before the run."""
    if not is_traced() and not isinstance(said, torch.SymBool):
        return bool(said)  # torch.jit.trace, which calls refuse, has tensors here
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(said)


def differ(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be different."""
    return surely(a != b)


def is_known(size: Any) -> bool:
    """Whether a size is a number by now, at the price of a guard where it is symbolic."""
    return surely(size % 2 == 0) or surely(size % 2 == 1)
