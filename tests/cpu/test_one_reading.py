"""Every form and every refusal of `test_tracing` in code that torch compiles: what eager code makes of it, word by word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import composattn as ca
from composattn import errors
from composattn.dispatch.spoken import heard
from composattn.graph.expr import content_key
from composattn.graph.form import graphs_of
from composattn.graph.trace import trace_mask, trace_score
from tests.cpu.test_tracing import MASK_REFUSED, MASKS, REFUSED, SCORES

Q = torch.randn(2, 4, 12, 8, generator=torch.Generator().manual_seed(5))
Call = Callable[[torch.Tensor], Any]


class Module(torch.nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x)


def compiled(call: Call, backend: Any = "eager") -> Call:
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend=backend)


def exported(call: Call, strict: bool) -> Call:
    return torch.export.export(Module(call), (Q,), strict=strict).module()


READINGS: dict[str, Callable[..., Call]] = {
    "compiled": compiled,
    "below a checkpoint": lambda call, *how: compiled(lambda x: checkpoint(call, x, use_reentrant=False), *how),
    "in a branch": lambda call, *how: compiled(lambda x: torch.cond(x.sum() < 1e9, call, call, (x,)), *how),
    "exported": lambda call: exported(call, strict=False),
    "exported by Dynamo": lambda call: exported(call, strict=True),
}


def calls(mods: dict[str, dict[str, Any]]) -> Call:
    return lambda x: [ca.attention(x, x, x, **kwargs) for kwargs in mods.values()]


FORMS = {f"mask: {n}": {"mask_mod": m} for n, m in MASKS.items()} | {
    f"score: {n}": {"score_mod": m} for n, m in SCORES.items()
}
UNSAID = {f"mask: {n}": {"mask_mod": m} for n, (_, m, _) in MASK_REFUSED.items()} | {
    f"score: {n}": {"score_mod": m} for n, (_, m, _) in REFUSED.items()
}


def said_in_eager_code(kwargs: dict[str, Any]) -> tuple[type[Exception], str]:
    with pytest.raises(errors.ComposattnError) as caught:
        ca.attention(Q, Q, Q, **kwargs)
    return type(caught.value), str(caught.value)
