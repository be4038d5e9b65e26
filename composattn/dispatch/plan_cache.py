"""Plans cached between calls of `ca.attention`, for as long as the tensors that their mods read are alive.

A plan is known by what the call asks for: the forms of its mods, its options, and the memory of the captured tensors.
It holds none of them (see `graph.borrowed`); when one of them ends, the plan waits for another of its form.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from ..analysis.cuda_graphs import refuse_outdated
from ..analysis.program import Program
from ..call.scales import Values
from ..errors import UnreadableProgram
from ..graph import copies
from ..graph.borrowed import Borrowed, BorrowedCapture, borrow, borrowed_before
from ..graph.dynamo import left_alone
from ..graph.expr import Dep, DType, Expr
from ..graph.fingerprint import Fingerprint, fingerprint
from ..graph.form import graphs_of
from ..graph.trace import trace_mask, trace_score
from ..mods.dropout import Dropout
from ..mods.mask import Mask
from ..mods.mod import known_form
from ..mods.score import Score
from ..mods.sink import Sink
from .captured import refuse_flattened
from .planned import Planned
from .plans import Options

LIMIT = 2048  # ways by which plans are known, most by their form and by what functions say; the oldest go first
CachedPlan = tuple[Planned, tuple[BorrowedCapture, ...], list[int]]  # with what it reads, and the sum of its epochs
_plans: dict[Hashable, CachedPlan] = {}  # by what the mods are: their forms, or what their functions say
_lock = threading.Lock()
_NOTHING_SAID: Fingerprint = None, ()
_SINKS = Sink.of(torch.zeros(1, device="cpu")).form


@left_alone  # compiled code calls an operator
def planned_for(
    score_mod: Any,
    mask_mod: Any,
    sinks: Any,
    keep: Dropout | None,
    options: tuple[Any, ...],
    masked: Fingerprint | None = _NOTHING_SAID,
    values: Values | None = None,
) -> tuple[Planned, Borrowed | None]:
    """The plan of a call with these mods and options (scale, backend, deterministic, schedule), and what it borrows.

    Functions that say what they said before, of borrowed tensors, are not made into a `Score` or a `Mask`.
    `masked`: what the mask says now, if whoever asks knows it.

    Raises: what `Attention` raises.
    """
    said: Fingerprint | None = _NOTHING_SAID
    are_of_form = sinks is None  # what functions say, a plan's key, tells the forms of the tensors that they read
    if score_mod is not None:
        if score_mod.__class__ is Score:
            said, are_of_form = (score_mod.form, score_mod.leaves), False
        else:
            said = fingerprint(score_mod, 5)
    if mask_mod is not None:
        if mask_mod.__class__ is Mask:
            masked, are_of_form = (mask_mod.form, mask_mod.leaves), False
        elif masked is _NOTHING_SAID:
            masked = fingerprint(mask_mod, 4)
    key: tuple[Any, ...] | None = None
    if (
        not (said is None or masked is None or keep is not None or values is not None)
        and not _are_functorch_transforms_active()
        and forward_ad._current_level < 0
    ):
        leaves = said[1] + masked[1] if sinks is None else (*said[1], *masked[1], sinks)
        if copies.made and leaves:
            refuse_outdated(leaves)
        borrowed = borrowed_before(leaves, are_of_form) if leaves else None
        if borrowed is not None or not leaves:
            key = _asked((said[0], masked[0]) if sinks is None else (said[0], masked[0], _SINKS, None, None), options)
        if key is not None:
            if borrowed is not None:
                key += borrowed.captures
            found = _plans.get(key)
            if found is not None and (borrowed is None or found[2][0] == borrowed.epoch):
                return found[0], borrowed
    of_score, of_mask = _formed(Score, trace_score, score_mod, said), _formed(Mask, trace_mask, mask_mod, masked)
    return _planned_by_form(of_score, of_mask, (sinks, keep, values), options, key)


def _formed(kind: type[Score] | type[Mask], trace: Any, mod: Any, mark: Fingerprint | None) -> Fingerprint:
    """Form and leaves. A function is not read again: what a parametrization computes is computed once."""
    if mark is not None:
        if mod is None or mod.__class__ is kind:
            return mark
        known = known_form(trace, mark)
        if known is not None:
            return known[:2]
    made = kind.of(mod)
    return made.form, made.leaves


def _asked(forms: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a plan is known by but the captured tensors; None where an option can't be hashed, which is none."""
    scale, backend, deterministic, schedule, *out_dtype = options
    if scale is None and backend is None and deterministic is None and schedule is None and not out_dtype:
        return forms
    try:
        hash(options)
    except TypeError:
        return None
    return forms, options, *map(type, options)  # the types too, as True is 1


def _planned_by_form(
    score: Fingerprint,
    mask: Fingerprint,
    others: tuple[Any, Dropout | None, Values | None],
    options: tuple[Any, ...],
    said: tuple[Any, ...] | None,
) -> tuple[Planned, Borrowed | None]:
    """The plan by the forms and leaves of the mods; from now on it is found by what functions `said` too."""
    sinks, keep, values = others
    sink = None if sinks is None else Sink.of(sinks)
    forms: tuple[Any, ...] = (score[0], mask[0])
    leaves = score[1] + mask[1]
    if sink is not None or keep is not None or values is not None:
        for mod in (sink, keep, values):
            forms = (*forms, None if mod is None else mod.form)
            leaves += () if mod is None else mod.leaves
    if copies.made and leaves:
        refuse_outdated(leaves)
    planned, borrowed = planned_of(forms, leaves, options)
    if said is not None and said not in _plans:
        captures, by_form = () if borrowed is None else borrowed.captures, _asked(forms, options)
        found = None if by_form is None else _plans.get(by_form + captures)
        if found is not None and said[len(said) - len(captures) :] == captures == found[1]:
            _cache(said, found)
    return planned, borrowed


def planned_of(
    forms: tuple[str | None, ...], leaves: Sequence[Any], options: tuple[Any, ...]
) -> tuple[Planned, Borrowed | None]:
    """The plan of a call by the forms of its mods, in the order of `Program` (None: no mod), and what it borrows."""
    # `transforms.active`: their backward comes when nothing is borrowed any more
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return made_plan(forms, leaves, options), None
    key = _asked(forms, options)
    if key is None:
        return made_plan(forms, leaves, options), None  # refused by name
    borrowed: Borrowed | None = None
    captures: tuple[BorrowedCapture, ...] = ()
    if leaves:
        tensors = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                if getattr(leaf, "_fsdp_flattened", False):
                    refuse_flattened(tensors)
        borrowed = borrow(tensors, key)
        if borrowed is None:
            return made_plan(forms, leaves, options), None
        captures = borrowed.captures
        key += captures
        if len(tensors) < len(leaves):
            key = (key, *[leaf.number for leaf in leaves if not isinstance(leaf, torch.Tensor)])
    found = _plans.get(key)
    if found is not None:
        planned, _, seen = found
        if borrowed is not None and seen[0] != borrowed.epoch:
            planned.check_again(borrowed.tensors)
            seen[0] = borrowed.epoch
        return planned, borrowed
    if borrowed is None:
        planned = made_plan(forms, leaves, options)
    else:
        with borrowed:
            planned = made_plan(forms, leaves, options)
    _cache(key, (planned, captures, [sum([capture.epoch for capture in captures])]))
    return planned, borrowed


def made_plan(forms: tuple[str | None, ...], leaves: Sequence[Any], options: tuple[Any, ...]) -> Planned:
    """A plan of these forms that nobody keeps. Raises: as `Options`; `UnreadableProgram`."""
    checked = Options(*options)
    graphs = graphs_of(forms, leaves)
    _refuse_misplaced(*graphs)
    program = Program(*graphs)
    program.forms = forms
    return Planned(program, checked)


def _refuse_misplaced(
    score: Expr | None = None,
    mask: Expr | None = None,
    sink: Expr | None = None,
    keep: Expr | None = None,
    values: Expr | None = None,
) -> None:
    """Raises `UnreadableProgram` for a mod in another one's place, where a direct call of an operator may put it."""
    of_pairs = Dep.Q | Dep.KV | Dep.SCORE
    if (
        (score is not None and score.dtype is DType.BOOL)
        or (mask is not None and (mask.dtype is not DType.BOOL or mask.deps & Dep.SCORE))
        or (sink is not None and (sink.dtype is not DType.FLOAT or sink.deps & of_pairs))
        or (keep is not None and keep.op != "kept")
        or (values is not None and (values.dtype is not DType.FLOAT or values.deps & (Dep.Q | Dep.SCORE)))
    ):
        raise UnreadableProgram(
            "the text of this call has a mod in the place of another; its lines are score mod, mask, sinks, dropout, "
            "scales of values ('-' for none) and options"
        )


def _cache(key: Hashable, found: CachedPlan) -> None:
    with _lock:
        while len(_plans) >= LIMIT:
            forget(next(iter(_plans)))
        _plans[key] = found
        for capture in found[1]:
            capture.dependents[key] = forget


def forget(key: Hashable) -> None:
    """Drop a plan."""
    found = _plans.pop(key, None)
    for capture in () if found is None else found[1]:
        capture.dependents.pop(key, None)
