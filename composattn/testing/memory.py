"""Memory that shows what was never written: new tensors are full of NaN."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def poisoned(device: torch.device | str = "cpu") -> Iterator[None]:
    """Inside, memory that `torch.empty` and its like return is NaN until written (integers: the largest).

    Kernels write into such tensors, so an element that they leave out shows as NaN. On a GPU this fills what the
    allocator hands out next, about 300 MiB of large and small blocks, once; on a CPU every new tensor that Python asks
    for. Torch's settings stay as they are: its deterministic mode fills new memory too, but other kernels run in it.
    """
    if torch.device(device).type == "cuda":
        large = [torch.full((64 << 20,), float("nan"), device=device)]
        small = [torch.full((64 << 10,), float("nan"), device=device) for _ in range(128)]
        del large, small
        yield
        return
    # by name and not by a mode of torch: a function mode is off inside of `backward`, a dispatch mode keeps torch from
    # compiling
    with contextlib.ExitStack() as patched:
        for owner, names in _NEW.items():
            for name in names:
                patched.enter_context(mock.patch.object(owner, name, _filled(getattr(owner, name))))
        yield


_NEW: dict[Any, tuple[str, ...]] = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> torch.Tensor:
        new = make(*args, **options)
        kind = new.dtype
        most = torch.nan if kind.is_floating_point or kind.is_complex else kind is torch.bool or torch.iinfo(kind).max
        with torch.no_grad():
            return new.fill_(most)

    return made
