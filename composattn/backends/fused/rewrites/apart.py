"""A call that a rewrite took apart, as several: views of its tensors go in, results go into views of the whole ones.

Neither queries nor keys of the parts overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ....analysis.program import Program
from ....call.autograd import BackwardInputs, Gradients, Grads, Results, attend
from ....call.inputs import Asked, Inputs, Outputs
from ....call.prepared import PreparedCall
from ....call.problem import Problem
from ....call.sequences import NO_SEQUENCES, Sequences
from ....call.strides import ordered
from ....graph.borrowed import Borrowed
from ....graph.expr import Capture
from ..tiles.target import Target
from .posed import Apart, Part


class GeneratedCall(PreparedCall, Protocol):
    """A prepared call by generated kernels."""

    @property
    def checks_gradient(self) -> None:
        """Raises: `GradientUnsupported` where there is no backward."""

    def kernels(self, asked: Asked, gradient: bool) -> list[Any]:
        """What a call launches, made now: the forward for what it asks for; with `gradient` all that autograd needs.

        Raises: `GradientUnsupported`.
        """


Statistics = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]
Make = Callable[[Problem, Program, float, Target], GeneratedCall]
MakePart = Callable[[Problem, Program, float], GeneratedCall]


class CallApart(PreparedCall):
    """A prepared call of several launches, which no fast path has; its parts are calls of `make`. Raises as these."""

    def __init__(self, make: MakePart, problem: Problem, apart: Apart, name: str, scale: float) -> None:
        self.problem, self.apart, self.name = problem, apart, name
        self.calls = [make(*of_part, scale) for of_part in apart.calls]

    @property
    def plan(self) -> str:
        """The plans of the first call, for people to read."""
        return self.calls[0].plan

    @property
    def rewrites(self) -> str:
        """What took the call apart, and what became of the first of its parts."""
        return "\n".join(line for line in (f"{self.name}: {self.apart.words}", self.calls[0].rewrites) if line)

    @property
    def captured_sums(self) -> str:
        return self.calls[0].captured_sums

    @property
    def checks_gradient(self) -> None:
        return self.calls[0].checks_gradient

    def kernels(self, asked: Asked, gradient: bool) -> list[Any]:
        return [kernel for call in self.calls for kernel in call.kernels(asked, gradient)]

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        q, k, v, _, _ = inputs
        begun = self.begin((), return_max_scores=asked.max_scores)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            self.checks_gradient  # noqa: B018  raises where there is none
            return attend(begun, q, k, v)
        return begun.outputs(q, k, v, asked.lse)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> AttendApart:
        return AttendApart(self, return_max_scores)


class AttendApart:
    """One differentiable call: a `Differentiable`."""

    differentiable_twice = False
    captures: Sequence[torch.Tensor] = ()
    sources: Sequence[torch.Tensor] = ()
    sequences = NO_SEQUENCES

    def __init__(self, call: CallApart, return_max_scores: bool) -> None:
        self.call = call
        self.begun = [each.begin((), return_max_scores=return_max_scores) for each in call.calls]
        self.borrowed: Borrowed | None = None

    def read(self, replaced: Mapping[Capture, torch.Tensor]) -> Sequence[torch.Tensor]:
        return ()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        captured: Sequence[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> Results:
        whole = ordered(q, v.shape[-1]) if into is None else into
        lses, tops = self._launched(q, k, v, whole)
        lse = self._statistics(q, lses)
        assert lse is not None
        return whole, lse, self._statistics(q, tops)

    def outputs(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool) -> Outputs:
        """What a call without gradients gives: LSE, which is copied from that of each part, only where asked for."""
        whole = ordered(q, v.shape[-1])
        lses, tops = self._launched(q, k, v, whole)
        return whole, self._statistics(q, lses) if with_lse else None, self._statistics(q, tops)

    def _launched(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, whole: torch.Tensor) -> Statistics:
        """Outputs into the `whole`; LSE and largest scores of each part."""
        found = [
            begun.forward(p.queries.of(q), p.keys.of(k), p.keys.of(v), (), p.queries.of(whole))
            for p, begun in self._parts()
        ]
        _, lses, tops = zip(*found, strict=True)
        return lses, tops

    def _statistics(self, q: torch.Tensor, results: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """(B, H, S) of numbers that parts have of their queries; None of none."""
        there = [result for result in results if result is not None]
        if not there:
            return None
        whole = q.new_empty(q.shape[:-1], dtype=torch.float32)
        for part, result in zip(self.call.apart.parts, there, strict=True):
            part.queries.of(whole).copy_(result)
        return whole

    def backward(self, known: BackwardInputs, into: Gradients | None = None) -> Grads:
        q, k, v, out, lse, dout, dlse, _, _, _ = known
        dq, dk, dv = whole = into or (ordered(q, q.shape[-1]), ordered(k, k.shape[-1]), ordered(v, v.shape[-1]))
        for p, begun in self._parts():
            of_q, of_out, of_lse, of_dout = [p.queries.of(t) for t in (q, out, lse, dout)]
            of_dlse = None if dlse is None else p.queries.of(dlse)
            known = known._replace(q=of_q, k=p.keys.of(k), v=p.keys.of(v), out=of_out, lse=of_lse, dout=of_dout)
            known = known._replace(dlse=of_dlse)
            begun.backward(known, (p.queries.of(dq), p.keys.of(dk), p.keys.of(dv)))
        return whole

    def _parts(self) -> Iterator[tuple[Part, Any]]:
        return ((part, self.begun[part.call]) for part in self.call.apart.parts)
