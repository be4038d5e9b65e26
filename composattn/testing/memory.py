"""Memory that shows what was never written: new tensors are full of NaN."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.deterministic


@contextlib.contextmanager
def poisoned(device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, memory that `torch.empty` and its like return is NaN until written (integers: the largest).

    Kernels write into such tensors, so an element that they leave out shows as NaN. On a GPU this fills what the
    allocator hands out next, about 300 MiB of large and small blocks, once; on a CPU every new tensor.
    """
    if torch.device(device).type == "cuda":
        large = [torch.full((64 << 20,), float("nan"), device=device)]
        small = [torch.full((64 << 10,), float("nan"), device=device) for _ in range(128)]
        del large, small
        yield
        return
    strict = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        try:
            # torch fills new memory in deterministic mode only; operations that have no such mode just warn
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
            yield
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=only_warns)
            memory.fill_uninitialized_memory = fills
