"""Whether tensors that a gradient needs still lie where its call read them: `t.data = other` counts as no write.

Torch gives the gradient of what an operation saved, and refuses what was written to since. It does not see a tensor
that was given other memory, whose gradient would be computed of numbers that the call did not read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor | None]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Another one for other memory: of a storage that ended the reference equals no other. 0.4 µs; holds nothing."""
    return weakref.ref(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride(), tensor.shape


class Addresses:
    """Where tensors lie at a call; it holds them, and not their memory."""

    __slots__ = ("_of",)

    def __init__(self, tensors: Tensors) -> None:
        self._of = [None if t is None else (t, _place(t)) for t in tensors]

    def refuse_moved(self, read: Sequence[Any]) -> None:
        """Raises `RuntimeError`, as torch does of a write, where one lies elsewhere by now and is `read` there.

        What hooks of saved tensors give back may be a copy of what was saved, which stands.
        """
        for then, now in zip(self._of, read, strict=True):
            if then is not None and _place(then[0]) != then[1] and (now is then[0] or now.is_set_to(then[0])):
                raise refused(then[1][-1])


class Unchanged:
    """What tensors were at a call below transforms, where torch counts no writes to what was saved."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._places = tensors, Addresses(tensors)
        self._versions = [_version(t) for t in tensors]

    def refuse_changed(self) -> None:
        """Raises `RuntimeError` where one was written to, or given other memory."""
        self._places.refuse_moved(self._tensors)
        for tensor, version in zip(self._tensors, self._versions, strict=True):
            if tensor is not None and _version(tensor) != version:
                raise RuntimeError(
                    f"a captured tensor or a tensor of lengths, of shape {tuple(tensor.shape)}, that a gradient needs "
                    f"has been modified by an inplace operation: it is at version {tensor._version}, the call read "
                    f"version {version}"
                )


def _version(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


class Lay:
    """Where tensors lay at a call of compiled code, which may compute some of them again: it holds none of them."""

    def __init__(self, tensors: Tensors) -> None:
        self._of = [None if t is None else (weakref.ref(t), _place(t)) for t in tensors]

    def refuse_moved(self, read: Tensors) -> None:
        """Raises `RuntimeError` where one of those that are read again lies elsewhere."""
        for then, now in zip(self._of, read, strict=True):
            if then is not None and now is not None and then[0]() is now and then[1] != _place(now):
                raise refused(now.shape)


def refused(shape: Sequence[int]) -> RuntimeError:
    """The refusal of a tensor of this shape."""
    return RuntimeError(
        f"a captured tensor or a tensor of lengths, of shape {tuple(shape)}, that a gradient needs has been given "
        "other memory since the call (t.data = ...); compute the gradient first, or copy into the tensor after it"
    )
