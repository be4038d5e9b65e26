"""A call that a rewrite took apart, as several: views of its tensors go in, results come together in memory of its own.

Queries of the parts never overlap. Keys may, and then their gradients are sums: those of later parts are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ....analysis.program import Program
from ....call.autograd import BackwardInputs, Grads, Results, attend
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


Make = Callable[[Problem, Program, float, Target], GeneratedCall]
MakePart = Callable[[Problem, Program, float], GeneratedCall]


class CallApart:
    """A prepared call; its parts are calls of `make`. Raises as these."""

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

    def fast_path(self, inputs: Inputs) -> None:
        """None: what a fast path knows is of one launch."""

    def kernels(self, asked: Asked, gradient: bool) -> list[Any]:
        return [kernel for call in self.calls for kernel in call.kernels(asked, gradient)]

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        q, k, v, _, _ = inputs
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            self.checks_gradient  # noqa: B018  raises where there is none
            return attend(self.begin((), return_max_scores=asked.max_scores), q, k, v)
        found = [
            self.calls[part.call](Inputs(part.queries.of(q), part.keys.of(k), part.keys.of(v)), asked)
            for part in self.apart.parts
        ]
        return self.whole(q, v.shape[-1], found)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> AttendApart:
        return AttendApart(self, return_max_scores)

    def whole(self, q: torch.Tensor, width: int, found: Sequence[Outputs]) -> Outputs:
        """Results of the parts as those of all."""
        outs, lses, tops = zip(*found, strict=True)
        return self.of_queries(q, width, outs), self.statistics(q, lses), self.statistics(q, tops)

    def of_queries(self, like: torch.Tensor, width: int, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """(B, H, S, width) of what parts have of their queries, in the order of `like`; of one part not copied."""
        if len(results) == 1:
            return _as_they_lie(results[0])
        return self._filled(ordered(like, width), results)

    def of_keys(self, like: torch.Tensor, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """(B, H, S, D) of what parts have of their keys, in the order of `like`; of one part not copied."""
        if len(results) == 1:
            return _as_they_lie(results[0])
        whole = ordered(like, like.shape[-1])
        for part, result in zip(self.apart.parts, results, strict=True):
            place, shared = part.keys.of(whole), part.shared
            if shared:
                place[:, :, :shared] += result[:, :, :shared]
            place[:, :, shared:] = result[:, :, shared:]
        return whole

    def statistics(self, q: torch.Tensor, results: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """(B, H, S) of numbers that parts have of their queries; None of none."""
        there = [result for result in results if result is not None]
        return self._filled(q.new_empty(q.shape[:-1], dtype=torch.float32), there) if there else None

    def _filled(self, whole: torch.Tensor, results: Sequence[torch.Tensor]) -> torch.Tensor:
        for part, result in zip(self.apart.parts, results, strict=True):
            part.queries.of(whole).copy_(result)
        return whole


def _as_they_lie(result: torch.Tensor) -> torch.Tensor:
    """(1, H, S, ...) of (sequences, H, length, ...), whose places come in turns."""
    return result.permute(1, 2, 0, 3).reshape(1, result.shape[1], -1, result.shape[-1])


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

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> Results:
        found = [begun.forward(p.queries.of(q), p.keys.of(k), p.keys.of(v), ()) for p, begun in self._parts()]
        out, lse, top = self.call.whole(q, v.shape[-1], found)
        assert lse is not None
        return out, lse, top

    def backward(self, known: BackwardInputs) -> Grads:
        q, k, v, out, lse, dout, dlse, _, _, _ = known
        found = []
        for p, begun in self._parts():
            of_q, of_out, of_lse, of_dout = [p.queries.of(t) for t in (q, out, lse, dout)]
            known = known._replace(q=of_q, k=p.keys.of(k), v=p.keys.of(v), out=of_out, lse=of_lse, dout=of_dout)
            found.append(begun.backward(known._replace(dlse=None if dlse is None else p.queries.of(dlse))))
        dq, dk, dv = zip(*found, strict=True)
        return (
            None if dq[0] is None else self.call.of_queries(q, q.shape[-1], dq),
            None if dk[0] is None else self.call.of_keys(k, dk),
            None if dv[0] is None else self.call.of_keys(v, dv),
        )

    def _parts(self) -> Iterator[tuple[Part, Any]]:
        return ((part, self.begun[part.call]) for part in self.call.apart.parts)
