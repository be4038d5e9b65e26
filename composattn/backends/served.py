"""What `backend=None` means where generated kernels have no backward: their forward, with gradients in PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch

from .. import errors
from ..analysis.graphs import numbers_now
from ..analysis.program import Program
from ..call.autograd import BackwardInputs, Differentiable, Grads, Results, attend
from ..call.inputs import Asked, Inputs, Outputs
from ..call.prepared import FastPath, Prepare, PreparedCall
from ..call.problem import Problem
from ..call.sequences import NO_SEQUENCES, Sequences
from ..graph.borrowed import Borrowed, BorrowedCapture
from ..graph.expr import Capture
from ..watched import LOG
from . import streaming

NOT_SERVED = errors.UnsupportedDType, errors.UnsupportedHeadDim, errors.UnsupportedCapture


def where_served(prepare: Prepare) -> Prepare:
    """Calls whose forward generated kernels compute and whose gradients PyTorch does, as it does what they refuse.

    What they refuse of a batch-invariant call stays refused.
    """

    def prepared(problem: Problem, program: Program, scale: float) -> PreparedCall:
        in_torch = streaming.prepare(problem, program, scale)
        try:
            generated = prepare(problem, program, scale)
        except NOT_SERVED as refused:
            if problem.schedule.batch_invariant:
                raise  # PyTorch's products have no order of sums that holds for all calls
            LOG.info("streaming instead of kernels: %s", refused)
            return InTorch(in_torch, str(refused))
        return ForwardGenerated(generated, in_torch, program)

    return prepared


@dataclasses.dataclass(frozen=True)
class InTorch:
    """A prepared call of PyTorch, with the reason why no kernel computes it."""

    call: PreparedCall
    why: str

    rewrites = ""

    @property
    def plan(self) -> str:
        return f"in PyTorch, as by backend='streaming': {self.why}"

    @property
    def captured_sums(self) -> str:
        return self.call.captured_sums

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        return self.call(inputs, asked)

    def fast_path(self, inputs: Inputs) -> FastPath | None:
        return self.call.fast_path(inputs)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> Differentiable:
        return self.call.begin(scalars, sequences, return_max_scores)


class Halves:
    """One differentiable call: `first` has the forward, `second` the backward, which makes P again by LSE."""

    differentiable_twice = True

    def __init__(self, first: Differentiable, second: Differentiable) -> None:
        self.first, self.second = first, second

    @property
    def borrowed(self) -> Borrowed | None:
        return self.second.borrowed

    @borrowed.setter
    def borrowed(self, given: Borrowed | None) -> None:
        self.first.borrowed = self.second.borrowed = given

    @property
    def captures(self) -> Sequence[torch.Tensor]:
        return self.second.captures

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        return self.second.sources

    @property
    def sequences(self) -> Sequences:
        return self.second.sequences

    def read(self, replaced: Mapping[Capture, torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.second.read(replaced)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> Results:
        return self.first.forward(q, k, v, captured)

    def backward(self, known: BackwardInputs) -> Grads:
        return self.second.backward(known)


@dataclasses.dataclass(frozen=True)
class ForwardGenerated:
    """A prepared call, with the forward of one and the gradients of another."""

    generated: PreparedCall
    in_torch: PreparedCall
    program: Program

    @property
    def plan(self) -> str:
        return f"{self.generated.plan}\ngradients: in PyTorch, as by backend='streaming'"

    @property
    def rewrites(self) -> str:
        return self.generated.rewrites

    @property
    def captured_sums(self) -> str:
        return self.in_torch.captured_sums

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        if not (torch.is_grad_enabled() and self._learns(inputs)):
            return self.generated(inputs, asked)
        begun = self.begin(numbers_now(self.program.scalars), inputs.sequences, asked.max_scores)
        return attend(begun, *inputs[:3])

    def _learns(self, inputs: Inputs) -> bool:
        captured = (c.tensor for c in self.program.captures)
        return any(t.requires_grad for t in (*inputs[:3], *captured))

    def fast_path(self, inputs: Inputs) -> FastPath | None:
        found = None if self._learns(inputs) else self.generated.fast_path(inputs)
        if found is None or not self.program.captures:
            return found
        return functools.partial(self._unless_captured_learns, found)

    def _unless_captured_learns(
        self, path: FastPath, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borrowed: Borrowed | None
    ) -> torch.Tensor | None:
        """The fast path of kernels, while no captured tensor has begun to ask for a gradient."""
        held = [c.tensor for c in self.program.captures if not isinstance(c, BorrowedCapture)]
        captured = held if borrowed is None else (*held, *borrowed.tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in captured):
            return None
        return path(q, k, v, borrowed)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> Halves:
        halves = (call.begin(scalars, sequences, return_max_scores) for call in (self.generated, self.in_torch))
        return Halves(*halves)
