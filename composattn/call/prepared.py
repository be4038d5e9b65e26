"""A prepared call, as every backend makes one: everything decided but the tensors' contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..analysis.program import Program
from ..analysis.refreshed import Moment
from ..graph.borrowed import Borrowed, BorrowedCapture
from .autograd import Differentiable, Gradients
from .inputs import Asked, Inputs, Outputs
from .problem import Problem
from .sequences import NO_SEQUENCES, Sequences

T = torch.Tensor
FastPath = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Borrowed | None], torch.Tensor | None]
"""(q, k, v, what the call borrows) → out, of inputs of one form; None where the call has to go its whole way."""


class OperatorPath(Protocol):
    """A dense call of operators, of tensors of one form each, known by that.

    `moment` stands for the forward, which trusts nothing that was derived before; its backward reads what it derived.
    """

    def forward(
        self, q: T, k: T, v: T, captured: Sequence[T], moment: Moment
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(out, lse); None where the call has to go its whole way."""

    def backward(
        self, q: T, k: T, v: T, out: T, lse: T, dout: T, captured: Sequence[T], moment: Moment
    ) -> Gradients | None:
        """(dq, dk, dv); None where the backward has to go its whole way."""

    def learn_backward(self, q: T, k: T, v: T, out: T, dout: T, captured: Sequence[T]) -> None:
        """From now on such backwards, of which one just went its whole way, go this one, if they can."""


class PreparedCall(Protocol):
    """A prepared call: everything decided but the tensors' contents."""

    @property
    def plan(self) -> str:
        """The plans of its kernels, for people to read; empty where there are none."""
        return ""

    @property
    def rewrites(self) -> str:
        """What each rewrite made of the call, or why it left it as it is, for people to read; empty where none did."""
        return ""

    @property
    def captured_sums(self) -> str:
        """Who sums the gradients of captured tensors, for people to read; empty where torch does."""
        return ""

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        """(out, lse, max_scores) of inputs of the problem's layout; the latter two may be None where not asked for."""

    def fast_path(self, inputs: Inputs) -> FastPath | None:
        """A fast path for inputs of the form of these, which gives the output alone; None where there is none."""
        return None

    def operator_path(self, inputs: Inputs, captures: tuple[BorrowedCapture, ...]) -> OperatorPath | None:
        """A path for operators that are given inputs of the form of these, and captured tensors for these captures."""
        return None

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> Differentiable:
        """One differentiable call with these run-time numbers and sequences, for a caller that records it."""


class Prepare(Protocol):
    """How a backend turns the facts of a call into a prepared one, or refuses by a named error."""

    def __call__(self, problem: Problem, program: Program, scale: float) -> PreparedCall:
        """Plans for all inputs that pose this problem, `rounded`: of packed sequences there may be fewer rows."""
