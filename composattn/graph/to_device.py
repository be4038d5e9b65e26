"""What a mask or a layout holds, on another device: each tensor once, so that what is the same stays the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import InvalidArgument


def on_device(values: Iterable[Any], device: Any, non_blocking: bool = False) -> list[Any]:
    """`values` with their tensors there; others as they are. Raises: `InvalidArgument` for what names no device."""
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise InvalidArgument(f".to takes a device, as .to('cuda'), got {device!r}; dtypes stay as they are")
    try:
        torch.device(device)
    except (RuntimeError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise InvalidArgument(f".to takes a device, as .to('cuda'), got {device!r}: {said}") from None
    known: list[tuple[Any, Any]] = []
    found = []
    for value in values:
        moved = value
        if isinstance(value, torch.Tensor):
            before = [there for here, there in known if here is value]
            moved = before[0] if before else value.to(device, non_blocking=non_blocking)
            known.append((value, moved))
        found.append(moved)
    return found
