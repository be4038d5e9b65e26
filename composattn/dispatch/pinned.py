"""Mods that are traced once: what compiled code knows them by, how they are pickled, how their tensors are watched."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from .. import errors
from ..analysis.cuda_graphs import refuse_outdated
from ..analysis.program import Program
from ..call.inputs import Asked, Inputs
from ..graph import copies
from ..graph.borrowed import Borrowed
from ..mods.mask import Mask
from . import operators
from .captured import refuse_flattened
from .planned import Planned
from .plans import Options
from .serialized import Mods, Serialized, serialize


class Pinned(Planned):
    """What `ca.Attention` is behind its front; `number`: what compiled code knows this object by."""

    serialized: Serialized

    def __init__(self, mods: Mods, options: tuple[Any, ...]) -> None:
        """`options`: those of `plans.Options`."""
        self._state = mods, options
        program = Program(*(None if mod is None else mod.expr for mod in mods))
        program.forms = [None if mod is None else mod.form for mod in mods]
        super().__init__(program, Options(*options))
        self.scale, self.backend, self.deterministic, self.schedule = options[:4]
        self.serialized = serialize(mods, options)
        self.number = operators.register(self)
        self._seen = [_look(t) for t in self.serialized.tensors]
        if not any(map(is_functorch_wrapped_tensor, self.serialized.tensors)):
            program.captures  # noqa: B018  tables are made now: a first call may come when memory belongs to a CUDA graph

    def __getstate__(self) -> tuple[Any, ...]:
        return self._state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        Pinned.__init__(self, *state)

    @property
    def names(self) -> tuple[str, str]:
        """What the score mod and the mask are called."""
        score, mask, *_ = self._state[0]
        return "identity" if score is None else score.name, "all" if mask is None else mask.name

    @property
    def current_mask(self) -> Mask | None:
        """The mask, None where all is seen."""
        return self._state[0][1]  # type: ignore[no-any-return]

    def __call__(self, inputs: Inputs, asked: Asked, borrowed: Borrowed | None = None) -> Any:
        if self._seen:
            self._watch()
        return super().__call__(inputs, asked, borrowed)

    def _watch(self) -> None:
        """Raises `CapturedTensorChanged` where a captured tensor is not what the plan was made for."""
        refuse_flattened(self.serialized.tensors)
        if copies.made:
            refuse_outdated(self.serialized.tensors)
        for tensor, seen in zip(self.serialized.tensors, self._seen, strict=True):
            if _look(tensor) != seen:
                then, now = (f"{tuple(shape)} {dtype} on {device}" for shape, dtype, device in (seen, _look(tensor)))
                raise errors.CapturedTensorChanged(
                    f"a captured tensor was {then} when this ca.Attention was made, and is {now}; make it again, or "
                    "use ca.attention or ca.nn.Attention, which look at the mods at each call"
                )


def _look(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
