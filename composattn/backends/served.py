"""What `backend=None` means where generated kernels serve some calls alone: those, and PyTorch for the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .. import errors
from ..analysis.program import Program
from ..call.autograd import Differentiable
from ..call.inputs import Asked, Inputs, Outputs
from ..call.prepared import FastPath, Prepare, PreparedCall
from ..call.problem import Problem
from ..call.sequences import NO_SEQUENCES, Sequences
from . import streaming

NOT_SERVED = errors.UnsupportedDType, errors.UnsupportedHeadDim, errors.UnsupportedCapture


def where_served(prepare: Prepare) -> Prepare:
    """Calls by generated kernels that have no backward; streaming where they refuse one or autograd records it."""

    def prepared(problem: Problem, program: Program, scale: float) -> PreparedCall:
        in_torch = streaming.prepare(problem, program, scale)
        try:
            generated = prepare(problem, program, scale)
        except NOT_SERVED:
            return in_torch
        return ForwardAlone(generated, in_torch, program)

    return prepared


@dataclasses.dataclass(frozen=True)
class ForwardAlone:
    """A prepared call: `generated` unless autograd records it, which is for `recorded`."""

    generated: PreparedCall
    recorded: PreparedCall
    program: Program

    @property
    def plan(self) -> str:
        return f"{self.generated.plan}\nwith gradients: in PyTorch, as backend='streaming'"

    @property
    def rewrites(self) -> str:
        return self.generated.rewrites

    @property
    def captured_sums(self) -> str:
        return self.recorded.captured_sums

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        records = torch.is_grad_enabled() and self._learns(inputs)
        return (self.recorded if records else self.generated)(inputs, asked)

    def _learns(self, inputs: Inputs) -> bool:
        q, k, v, _, _ = inputs
        captured = (c.tensor for c in self.program.captures)
        return any(t.requires_grad for t in (q, k, v, *captured))

    def fast_path(self, inputs: Inputs) -> FastPath | None:
        return None if self._learns(inputs) else self.generated.fast_path(inputs)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> Differentiable:
        return self.recorded.begin(scalars, sequences, return_max_scores)
