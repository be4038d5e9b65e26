"""Which tensors torch counts writes for together: a view and its base share a counter, `x` and `x.data` do not.

Torch shows what a counter says and not which one it is. Two tensors share one if moving that of the first moves that
of the second.
"""

from __future__ import annotations

import torch

storage_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]
_set_version = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]
_NEVER = 2**32 - 1  # a count that no tensor reaches: whoever reads it meanwhile never sees it again


_alone = torch.empty(1, device="cpu")
OF_ONE_TENSOR: int = storage_uses(_alone.untyped_storage()._cdata)


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether more than one tensor lies in it."""
    return bool(storage_uses(storage._cdata) > OF_ONE_TENSOR)


class Counter:
    """The write counter of a tensor, held without the tensor and without its memory."""

    __slots__ = ("_witness",)

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch.inference_mode(False):  # where views count for themselves
            self._witness = tensor.detach()  # shares the counter
            self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @property
    def version(self) -> int:
        """What it says now."""
        return self._witness._version

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether this counter is `tensor`'s: 0.7 µs. It is moved and put back, so by one thread at a time."""
        now = self._witness._version
        if tensor._version != now:
            return False
        _set_version((self._witness,), (_NEVER,))
        try:
            return tensor._version == _NEVER
        finally:
            _set_version((self._witness,), (now,))
