"""Plans kept between calls of `ca.attention`, for as long as the tensors that their mods read are alive.

A plan is known by what the call asks for: the forms of its mods, its options, and the memory of the captured tensors.
It holds none of them (see `graph.lent`); when one of them ends, the plan waits for another of its form.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from ..analysis.program import Program
from ..analysis.refreshed import memory_is_ours
from ..graph import copies
from ..graph.form import graphs_of
from ..graph.lent import Lending, Lent, lend
from .planned import Options, Planned, refuse_flattened
from .spoken import Mods

KEPT_LIMIT = 1024  # plans; the oldest go first
_plans: dict[Hashable, tuple[Planned, tuple[Lent, ...], list[int]]] = {}  # with what they read, and its epochs
_lock = threading.Lock()


def planned_for(mods: Mods, options: tuple[Any, ...]) -> tuple[Planned, Lending | None]:
    """The plan of a call with these mods and options (scale, backend, deterministic, schedule), and what to lend it.

    Raises: what `Attention` raises.
    """
    score, mask, sink, keep = mods
    forms: tuple[str | None, ...] = (None if score is None else score.form, None if mask is None else mask.form)
    leaves = (() if score is None else score.leaves) + (() if mask is None else mask.leaves)
    if sink is not None or keep is not None:
        for mod in (sink, keep):
            forms = (*forms, None if mod is None else mod.form)
            leaves += () if mod is None else mod.leaves
    if copies.made and leaves:
        copies.refuse_outdated(leaves)
    return planned_of(forms, leaves, options)


def planned_of(
    forms: tuple[str | None, ...], leaves: Sequence[Any], options: tuple[Any, ...], user: str = "eager"
) -> tuple[Planned, Lending | None]:
    """The same of forms: of the mods in the order of `Program`; None, of none.

    user: whose plan it is. Those of operators are their own: they compute what is derived from captured tensors in
    every call, in place, under the eyes of an eager backward that may still need it.
    """
    # `transforms.active`: their backward comes when nothing is lent any more
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _made(forms, leaves, options), None
    scale, backend, deterministic, schedule = options
    key: Hashable = forms
    if not (scale is None and backend is None and deterministic is None and schedule is None):
        key = (forms, options, *map(type, options))  # the types too, as True is 1
    lending: Lending | None = None
    captures: Sequence[Lent] = ()
    if leaves:
        tensors = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                if getattr(leaf, "_fsdp_flattened", False):
                    refuse_flattened(tensors)
        lending = lend(tensors, user, key)
        if lending is None:
            return _made(forms, leaves, options), None
        captures = lending.captures
        key = (key, captures)
        if len(tensors) < len(leaves):
            key = (key, *[leaf.number for leaf in leaves if not isinstance(leaf, torch.Tensor)])
    try:
        found = _plans.get(key)
    except TypeError:  # an option that can't be hashed is none: refused by name
        return _made(forms, leaves, options), None
    if found is not None:
        planned, _, seen = found
        if captures and seen != [capture.epoch for capture in captures]:
            planned.check_again()  # other contents: what a mask hides of a short tensor may be visible now
            seen[:] = [capture.epoch for capture in captures]
        return planned, lending
    if lending is None:
        planned = _made(forms, leaves, options)
    else:
        with lending:
            planned = _made(forms, leaves, options)
    if memory_is_ours():
        _keep(key, planned, captures)
    return planned, lending


def _made(forms: tuple[str | None, ...], leaves: Sequence[Any], options: tuple[Any, ...]) -> Planned:
    checked = Options(*options)
    return Planned(Program(*graphs_of(forms, leaves)), checked)


def _keep(key: Hashable, planned: Planned, captures: Sequence[Lent]) -> None:
    with _lock:
        while len(_plans) >= KEPT_LIMIT:
            forget(next(iter(_plans)))
        _plans[key] = planned, tuple(captures), [capture.epoch for capture in captures]
        for capture in captures:
            capture.dependents[key] = forget


def forget(key: Hashable) -> None:
    """Drop a plan."""
    found = _plans.pop(key, None)
    for capture in () if found is None else found[1]:
        capture.dependents.pop(key, None)
