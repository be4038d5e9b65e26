"""The kernels of a call's form of inputs, planned now and made when they are first launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from ....analysis.derived import Derived, sources_behind
from ....analysis.program import Program
from ....call.autograd import BackwardInputs, Gradients, Grads, Results
from ....call.problem import Problem
from ....call.sequences import NO_SEQUENCES, Sequences
from ....graph.borrowed import Borrowed, TensorsOf, borrowed_again
from ....graph.expr import Capture
from ..compiling.compile import compile_plan
from ..planning.plan import forward_of
from ..rewrites import rewritten
from ..rewrites.posed import Posed
from ..tiles.architecture import architecture_of
from ..tiles.target import Target
from .gradient import FusedGradient
from .launch import ForwardLauncher


class FusedKernels:
    """One form of inputs: its kernels, with and without LSE, made by `kernel_of` when first launched.

    Raises: `UnsupportedDType`, `UnsupportedHeadDim`, `UnsupportedCapture`, `UnsupportedLayout`.
    """

    launches: ClassVar[type[ForwardLauncher]] = ForwardLauncher

    def __init__(
        self,
        problem: Problem,
        program: Program,
        scale: float,
        target: Target,
        kernel_of: Callable[[Any], Any] = compile_plan,
    ) -> None:
        self.problem, self.program, self.scale, self.target = problem, program, scale, target
        self.kernel_of, self.architecture = kernel_of, architecture_of(target)
        # refuses what it can't do now, not at the first call
        self.forward = rewritten(Posed(problem, program, target))
        self._forward = forward_of(self.forward.posed, positive_scale=scale > 0)
        self._is_dense, self._reads = problem.layout.is_dense, (program.captures, program.scalars)
        self.captured = TensorsOf(program.captures)  # as the mods hold them now
        self._sources = [c for c in sources_behind(program.captures) if not isinstance(c, Derived)]
        self.launchers: dict[tuple[bool, bool], ForwardLauncher] = {}
        self.known_gradient: FusedGradient | None = None

    @property
    def captures(self) -> Sequence[torch.Tensor]:
        """The captured tensors as the mods hold them now."""
        return self.captured()

    def sources(self, borrowed: Borrowed | None) -> Sequence[torch.Tensor]:
        """What captured tensors are made of, the borrowed ones if there are any."""
        if not self._sources:
            return ()
        return [c.tensor for c in self._sources] if borrowed is None else borrowed.tensors

    def launcher(self, return_lse: bool, return_max_scores: bool = False) -> ForwardLauncher:
        """The forward that returns these; whoever gets the largest scores gets LSE too."""
        returned = (return_lse or return_max_scores, return_max_scores)
        found = self.launchers.get(returned)
        if found is None:
            lse, scores = returned
            plan = dataclasses.replace(self._forward, return_lse=lse, return_max_scores=scores)
            found = self.launchers[returned] = self.launches(plan, self.kernel_of)
        return found

    def begun(
        self, captured: Sequence[torch.Tensor], scalars: Sequence[float | int], borrowed: Borrowed | None
    ) -> FusedAttend:
        """A dense call of before, for its backward."""
        found = FusedAttend(self, captured, scalars, NO_SEQUENCES, False)
        found.borrowed = borrowed
        return found

    @cached_property
    def checks_gradient(self) -> None:
        """Raises: `GradientUnsupported` where there is no backward."""
        self.architecture.check_gradient(self.problem)

    @property
    def gradient(self) -> FusedGradient:
        """The backward, made when it is first asked for."""
        if self.known_gradient is None:
            self.known_gradient = FusedGradient(self.problem, self.program, self.scale, self.target, self.kernel_of)
        return self.known_gradient


class FusedAttend:
    """One differentiable call, with the tensors, run-time numbers and sequences of its moment: a `Differentiable`."""

    __slots__ = ("borrowed", "call", "captures", "return_max_scores", "scalars", "sequences")

    differentiable_twice = False

    def __init__(
        self,
        call: FusedKernels,
        captures: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences,
        return_max_scores: bool,
    ) -> None:
        self.call, self.captures, self.scalars, self.sequences = call, captures, scalars, sequences
        self.return_max_scores = return_max_scores
        self.borrowed: Borrowed | None = None

    @property
    def sources(self) -> Sequence[torch.Tensor]:
        """What captured tensors are made of."""
        return self.call.sources(self.borrowed)

    def read(self, replaced: Mapping[Capture, torch.Tensor]) -> Sequence[torch.Tensor]:
        # what is derived is brought up to date where a kernel reads it, which not all kernels do
        found = [(c, replaced.get(c)) for c in self.call.program.captures]
        return [c.kept if t is None else t for c, t in found]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        captured: Sequence[torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> Results:
        """`into`: memory for out."""
        call, asked = self.call, (True, self.return_max_scores)
        launcher = call.launchers.get(asked) or call.launcher(*asked)
        out, lse, max_scores = launcher(q, k, v, call.scale, captured, self.scalars, self.sequences, into)
        assert lse is not None
        return out, lse, max_scores

    def backward(self, known: BackwardInputs, into: Gradients | None = None) -> Grads:
        """`into`: memory for dq, dk and dv."""
        with borrowed_again(self.borrowed):
            return self.call.gradient(known, self.scalars, self.sequences, into)
