"""flash-attention's kernels for Hopper (FA3), as vLLM builds them: one operator, in a library that FA3_SO names.

It is a forward alone, of packed sequences alone: a batch of equal lengths is given as these. Arguments are given by
name, as versions have more or fewer of them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

ALONE = {"cp_world_size": 1}  # keys are one GPU's; 0 is refused


def is_there() -> bool:
    return "FA3_SO" in os.environ


@functools.cache
def operator() -> tuple[Any, dict[str, Any]]:
    """The operator, and what stands for each argument that has no default and is not given."""
    torch.ops.load_library(os.environ["FA3_SO"])
    loaded = torch.ops._vllm_fa3_C.fwd
    nothing: dict[str, Any] = {"int": 0, "SymInt": 0, "bool": False, "float": 0.0}  # all others: None
    arguments = loaded.default._schema.arguments
    return loaded, {
        a.name: a.default_value if a.has_default_value() else ALONE.get(a.name, nothing.get(str(a.type)))
        for a in arguments
    }


@functools.cache
def starts_of(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Where each of `batch` sequences of `length` tokens begins, and the end of the last: int32 (batch + 1)."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """Output (B, S, H, D), or packed (total, H, D) with `cu_seqlens_q` and the like. Raises `TypeError` for an unknown
    name."""
    call, defaults = operator()
    shape = (*q.shape[:-1], v.shape[-1])
    if q.dim() == 4:
        for name, x in (("q", q), ("k", k)):
            given |= {f"cu_seqlens_{name}": starts_of(*x.shape[:2], x.device), f"max_seqlen_{name}": x.shape[1]}
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    given = {"window_size_left": -1, "window_size_right": -1, "num_splits": 1, **given, "q": q, "k": k, "v": v}
    given.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    unknown = given.keys() - defaults.keys()
    if unknown:
        raise TypeError(f"this build has no argument {', '.join(sorted(unknown))}")
    out: torch.Tensor = call(**defaults | given)[0]
    return out.view(shape)
