"""Plans of operators, known by the text of a call and by the forms of the tensors that it reads, in whatever memory.

An operator trusts nothing that was derived before: compiled code writes to memory with no one counting. So nothing is
gained by knowing a tensor, and other ids in each step, or in each layer, take one plan. What a plan derives it writes
where it did before, so it serves one call at a time: of several threads each gets its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

from ..analysis.refreshed import belongs_to_graph
from ..call import checks
from ..call.inputs import Inputs
from ..call.prepared import OperatorPath
from ..graph.borrowed import Borrowed, FormCapture
from ..graph.tensor_forms import of_the_form
from .captured import refuse_flattened
from .planned import Planned
from .transforms import active

LIMIT = 64  # forms of calls, of which each may hold tables and graphs; those that were not used for longest go first
_plans: OrderedDict[Hashable, list[OperatorPlan]] = OrderedDict()
_lock = threading.Lock()


class OperatorPlan:
    """A plan, and what it reads the tensors of a call by, one capture for each; the same where two are one tensor."""

    __slots__ = ("_in_use", "captures", "planned")

    def __init__(self, tensors: Sequence[torch.Tensor], make: Callable[[], Planned]) -> None:
        """`make`: plans with these tensors, borrowed."""
        by_tensor = {t._cdata: FormCapture(t) for t in tensors}
        self.captures = tuple([by_tensor[t._cdata] for t in tensors])
        self._in_use = threading.Lock()
        with Borrowed(self.captures, tensors):
            self.planned = make()

    def begin(self) -> bool:
        """Whether no other call uses it; then it is in use until `end`."""
        return self._in_use.acquire(blocking=False)

    def end(self) -> None:
        """The call is over."""
        self._in_use.release()

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these may stand where those of its form do."""
        return len(tensors) == len(self.captures) and all(
            capture.lies_as(tensor) for capture, tensor in zip(self.captures, tensors, strict=True)
        )

    def borrow(self, tensors: Sequence[torch.Tensor]) -> Borrowed:
        """The tensors for a call that uses it."""
        for capture, tensor in zip(self.captures, tensors, strict=True):
            capture.follow(tensor)
        return Borrowed(self.captures, tensors)


def plan_in_use(
    form: str, tensors: Sequence[torch.Tensor], numbers: Sequence[Hashable], make: Callable[[], Planned]
) -> OperatorPlan:
    """A plan for a call of this text, of tensors and `numbers` of these forms, that no other call uses; it has begun.

    make: plans. Raises: what that raises; `CapturedTensorChanged`.
    """
    firsts: dict[int, int] = {}
    told: list[Hashable] = [form, *numbers]
    for n, t in enumerate(tensors):
        if firsts.setdefault(t._cdata, n) == n:
            told.append((t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_neg(), t.__class__))
            if t.__class__ is not torch.Tensor:
                refuse_flattened([t])
        else:
            told.append(firsts[t._cdata])
    key = tuple(told)
    with _lock:
        known = _plans.get(key)
        if known is not None:
            _plans.move_to_end(key)
            for plan in known:
                if plan.begin():
                    return plan
    made = OperatorPlan(tensors, make)
    made.begin()
    with _lock:
        _plans.setdefault(key, []).append(made)
        while len(_plans) > LIMIT:
            _plans.popitem(last=False)
    return made


_KINDS = 4  # of forms that one text is known for, the latest
_Known = tuple[Callable[..., bool], OperatorPath | None]
_paths: OrderedDict[str, tuple[_Known, ...]] = OrderedDict()


def path_of(
    form: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]
) -> OperatorPath | None:
    """The path of a call of this text, where one is known for its forms and may be taken now."""
    known = _paths.get(form)
    # torch throws where forms of a nested tensor are asked for
    if known is None or True in [t.is_nested for t in (q, k, v, *captured)] or not may_be_taken():
        return None
    for are_of_forms, path in known:
        if are_of_forms(q, k, v, *captured):
            return path
    return None


def may_be_taken() -> bool:
    """Whether nothing asks for more here: debug checks, autocast, a transform, a CUDA graph."""
    return not (checks.are_on or torch._C._is_any_autocast_enabled() or active() or belongs_to_graph())


def learn(form: str, plan: OperatorPlan, inputs: Inputs, captured: Sequence[torch.Tensor]) -> None:
    """From now on calls of this text, and of these forms, take the path of this plan, if it has one."""
    tensors = *inputs[:3], *captured
    planned = plan.planned
    if (
        planned.hangs_on_contents
        or planned.options.out_dtype is not None
        or len({t._cdata for t in tensors}) < len(tensors)
        or not may_be_taken()
    ):
        return
    path = planned.prepared(inputs).operator_path(inputs, plan.captures)
    if path is not None:
        known = _paths.pop(form, ())
        _paths[form] = ((of_the_form(*tensors), path), *known[: _KINDS - 1])
        while len(_paths) > LIMIT:
            _paths.popitem(last=False)
