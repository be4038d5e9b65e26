"""Ranks that share sequences, and what was asked of how they do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .. import errors
from .exchange import Ranks
from .traffic import METHODS

Method = Literal["auto", "exchange", "gather", "heads"]
CapturedGradients = Literal["whole", "partial"]


@dataclass(eq=False)
class Options:
    """What `ca.ContextParallel` is made with, which says what each option means."""

    ranks: Ranks
    method: Method
    parts: int | None
    keep_fetched: bool
    captured_gradients: CapturedGradients


def check_options(method: Any, parts: Any, keep: Any, gradients: Any, timeout: Any) -> None:
    """Raises `InvalidParallelOption` for a value that an option does not take."""
    whole = isinstance(parts, int) and not isinstance(parts, bool)
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    for name, value, good, takes in (
        ("method", method, method in METHODS, " or ".join(map(repr, METHODS))),
        ("parts", parts, parts is None or (whole and parts >= 1), "a number of parts from 1 on, or None"),
        ("keep_fetched", keep, isinstance(keep, bool), "True or False"),
        ("captured_gradients", gradients, gradients in ("whole", "partial"), "'whole' or 'partial'"),
        ("timeout", timeout, timeout is None or (number and timeout > 0), "seconds, or None"),
    ):
        if not good:
            raise errors.InvalidParallelOption(f"{name} is {value!r}; it must be {takes}")
