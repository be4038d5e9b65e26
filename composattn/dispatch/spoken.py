"""A call in words: what operators and exported programs take in place of mods and options."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..call.schedule import Schedule
from ..graph.scalar import Scalar
from ..mods.mask import Mask
from ..mods.score import Score

pytree.register_constant(Schedule)  # torch before 2.13 takes no other objects as constants


class Spoken(NamedTuple):
    """The mods and options of a call as operators take them: a form, and the tensors and numbers it speaks of.

    A number is a `ca.scalar`, or an int that compiled code keeps symbolic.
    """

    form: str
    tensors: tuple[torch.Tensor, ...]
    scalars: tuple[Scalar | int, ...]


def spoken(score: Score | None, mask: Mask | None, options: tuple[Any, ...]) -> Spoken:
    """A call with these mods and options (scale, backend, deterministic, schedule)."""
    leaves = (() if score is None else score.leaves) + (() if mask is None else mask.leaves)
    scale, backend, deterministic, schedule = options
    if isinstance(scale, float):
        scale = float(scale)  # numpy's floats, too, are written as Python's
    if schedule is not None:
        schedule = (
            schedule.order, schedule.persistent, schedule.heads_together, schedule.split_kv, schedule.pack_gqa
        )  # fmt: skip
    kinds = "".join([_kind(leaf) for leaf in leaves])
    lines = [
        "-" if score is None else score.form,
        "-" if mask is None else mask.form,
        f"({scale!r}, {backend!r}, {deterministic!r}, {schedule!r}, {kinds!r})",
    ]
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return Spoken("\n".join(lines), tensors, tuple([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return "t"
    return "s" if isinstance(leaf, Scalar) else "n"


@functools.lru_cache(maxsize=512)
def heard(form: str) -> tuple[tuple[str | None, str | None], tuple[Any, ...], str]:
    """What `spoken` put into a form: (forms of the score mod and of the mask, options, kinds of the leaves)."""
    score, mask, last = form.split("\n")
    scale, backend, deterministic, schedule, kinds = ast.literal_eval(last)
    options = (scale, backend, deterministic, None if schedule is None else Schedule(*schedule))
    return (None if score == "-" else score, None if mask == "-" else mask), options, kinds
