"""A call by generated kernels: one form of inputs, planned; its kernels are compiled when first launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....analysis.cuda_graphs import numbers_now
from ....call.autograd import attend
from ....call.inputs import Asked, Inputs, Outputs
from ....call.sequences import NO_SEQUENCES, Sequences
from ....graph.borrowed import BorrowedCapture
from ..planning.plan_backward import backward_of
from .bound_call import BoundCall, is_bindable
from .bound_operator import BoundOperator, bound_operator
from .kernels import FusedAttend, FusedKernels


class FusedCall(FusedKernels):
    """One form of inputs, planned. Raises: as `FusedKernels`; `GradientUnsupported` when called."""

    def fast_path(self, inputs: Inputs) -> BoundCall | None:
        """The call of inputs of the form of these alone, of which all is known that can be."""
        q, k, v, _, _ = inputs
        return BoundCall(self, q, k, v) if self._is_dense and is_bindable(q, k, v) else None

    def operator_path(self, inputs: Inputs, captures: tuple[BorrowedCapture, ...]) -> BoundOperator | None:
        """The call by operators of inputs of the form of these, of which all is known that can be."""
        return bound_operator(self, *inputs[:3], captures) if self._is_dense else None

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        q, k, v, _, _ = inputs
        captures, numbers = self._reads
        # a comprehension is a function of its own before Python 3.12
        captured: Sequence[torch.Tensor] = self.captured() if captures else ()
        scalars: Sequence[float | int] = numbers_now(numbers) if numbers else ()
        sequences = NO_SEQUENCES if self._is_dense else inputs.sequences
        if torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or True in [t.requires_grad for t in captured]
        ):
            self.checks_gradient  # noqa: B018  raises where there is none
            return attend(FusedAttend(self, captured, scalars, sequences, asked.max_scores), q, k, v)
        launcher = self.launchers.get(asked) or self.launcher(*asked)
        return launcher(q, k, v, self.scale, captured, scalars, sequences)

    def kernels(self, asked: Asked, gradient: bool) -> list[Any]:
        """What a call launches, made now: the forward for what it asks for; with `gradient` all that autograd needs.

        Raises: `GradientUnsupported`.
        """
        if not gradient:
            return self.launcher(*asked).kernels()
        self.checks_gradient  # noqa: B018  raises where there is none
        made, known = self.launcher(True, asked.max_scores).kernels(), self.gradient
        summed = frozenset(c for c in self._reads[0] if c.tensor.requires_grad and c in known.fusable)
        made += known.launcher(asked.lse, known.deterministic(), summed).kernels()
        return [*made, known.summing(summed).kernel(asked.lse)] if summed else made

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> FusedAttend:
        """One differentiable call with these run-time numbers and sequences."""
        return FusedAttend(self, self.captures, scalars, sequences, return_max_scores)

    def scalars(self) -> list[float | int]:
        """The values of now of the mods' run-time numbers."""
        return [s.value for s in self._reads[1]]

    @property
    def has_backward(self) -> bool:
        """Whether there is one: not where keys lie in pages, nor for head dimensions that it leaves out."""
        return self.problem.layout.kv != "paged" and self.architecture.has_gradient(self.problem)

    @property
    def plan(self) -> str:
        """The plans of the kernels, forward and backward, for people to read."""
        if not self.has_backward:
            return str(self._forward)
        gradient = self.gradient
        return f"{self._forward}\n{backward_of(gradient.rewriting.posed, deterministic=gradient.deterministic())}"

    @property
    def rewrites(self) -> str:
        """What each rewrite made of the call, or why it left it as it is; of the backward, what it did otherwise."""
        forward = self.forward.said
        lines = [f"{name}: {words}" for name, words in forward.items()]
        if self.has_backward:
            backward = self.gradient.rewriting.said
            names = [name for name in {**forward, **backward} if forward.get(name) != backward.get(name)]
            lines += [f"{name}, backward: {backward.get(name, 'nothing')}" for name in names]
        return "\n".join(lines)

    @property
    def captured_sums(self) -> str:
        """Who sums the gradients of captured tensors, for people to read; nobody where there is no backward."""
        return self.gradient.describe() if self.has_backward else ""
