"""Sinks: a number per query head whose exponential is in each row's sum of exponentials, and in nothing else."""

from __future__ import annotations

from typing import Any

import torch

from .. import errors
from ..graph.expr import refuse_lazy
from .mod import Mod

_FORM = repr(("steps", 1, (("op:read", "t0", "h"),), "x0"))


class Sink(Mod):
    """A logit beside those of the keys, with no value: out = sum exp(s) v / (exp(sink[h]) + sum exp(s)).

    Source: OpenAI 2025, gpt-oss model card, section 2.1; Xiao et al. 2023, StreamingLLM.
    """

    __slots__ = ()
    _kind = "sinks"

    @staticmethod
    def of(given: Any, name: str | None = None) -> Sink:
        """(Hq,) floats as a sink of each head.

        Raises: `NotATensor`, `UnsupportedLayout`, `WrongRank`, `UnsupportedDType`.
        """
        if isinstance(given, Sink):
            return given
        if not isinstance(given, torch.Tensor):
            raise errors.NotATensor(f"sinks is a {type(given).__name__}; pass a float tensor (Hq,), a number per head")
        refuse_lazy("sinks", given)
        if given.ndim != 1:
            raise errors.WrongRank(f"sinks has shape {tuple(given.shape)}; it must be (Hq,), a number per query head")
        if not given.is_floating_point():
            raise errors.UnsupportedDType(f"sinks is {given.dtype}; pass floats: sinks.float()")
        return Sink.formed(_FORM, (given,), name or "sinks")
