"""Paths of operators, known by the text of a call and the forms of its tensors: what such a call does not ask again.

A path is had from a call that went the whole way (`dispatch.operators`), of a plan of `operator_plans`. It writes
nowhere but into memory of its calls, so that several may use it at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from ..analysis.refreshed import belongs_to_graph
from ..call import checks
from ..call.inputs import Inputs
from ..call.prepared import OperatorPath
from ..graph.tensor_forms import of_the_form
from .operator_plans import LIMIT, OperatorPlan
from .transforms import active

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
