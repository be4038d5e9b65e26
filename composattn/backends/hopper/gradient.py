"""Gradients of an attention call on Hopper: the fused kernels where they serve, and what is computed beside them.

dQ, dK and dV come from the fused backward. Gradients of captured tensors come from the tile-by-tile backward of
`composattn.backends.streaming` on the same GPU: by index pattern, in a fixed order, O(S) memory, not fused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...autograd import Grads
from ...errors import GradientUnsupported, UnsupportedHeadDim
from ...graph.derived import refresh
from ...graph.program import Program
from ...launch_backward import BackwardLauncher
from ...plan_backward import plan_backward
from ...problem import Problem
from ...target import Target
from ..streaming import Mods, Streaming


class HopperGradient:
    """The backward of one form of inputs; its kernels are compiled when first needed."""

    def __init__(self, problem: Problem, program: Program, scale: float, target: Target) -> None:
        self.problem, self.program, self.scale, self.target = problem, program, scale, target
        self._launchers: dict[tuple[bool, bool], BackwardLauncher] = {}
        self.fused = True
        try:
            plan_backward(problem, program, target)
        except UnsupportedHeadDim:
            self.fused = False

    def launcher(self, has_dlse: bool, deterministic: bool) -> BackwardLauncher:
        """The compiled kernels, with or without a gradient through LSE and a fixed order of dQ's parts."""
        form = (has_dlse, deterministic)
        if form not in self._launchers:
            plans = plan_backward(
                self.problem, self.program, self.target, has_dlse=has_dlse, deterministic=deterministic
            )
            self._launchers[form] = BackwardLauncher(plans)
        return self._launchers[form]

    def deterministic(self) -> bool:
        """Whether dQ has to be bitwise repeatable: as the problem says, or as torch is set now."""
        asked = self.problem.deterministic
        return torch.are_deterministic_algorithms_enabled() if asked is None else asked

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        wanted: Sequence[bool],
    ) -> Grads:
        """(dq, dk, dv, *d captured); `captured` and `scalars` in the order of the program."""
        if torch.is_grad_enabled():
            raise GradientUnsupported(
                'the fused backward is not differentiable itself (create_graph=True); use backend="streaming", '
                "whose gradients are"
            )
        if not self.fused:
            return self._streamed(q, k, v, captured, lse, dout, dlse, wanted)
        grads: Grads = (None, None, None)
        if any(wanted[:3]):
            launcher = self.launcher(dlse is not None, self.deterministic())
            reads = launcher.plans.main.captured
            refresh(reads)
            given = dict(zip((id(c.tensor) for c in self.program.captures), captured, strict=True))
            tensors = [given.get(id(c.tensor), c.tensor) for c in reads]
            dout = torch.zeros_like(out) if dout is None else dout.to(out.dtype)
            grads = launcher(q, k, v, out, lse, dout, dlse, self.scale, tensors, scalars)
        asked = tuple(wanted[3:])
        if not any(asked):
            return (*grads, *(None for _ in asked))
        streamed = self._streamed(q, k, v, captured, lse, dout, dlse, (False, False, False, *asked))
        return (*grads, *streamed[3:])

    def _streamed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        captured: Sequence[torch.Tensor],
        lse: torch.Tensor,
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
        wanted: Sequence[bool],
    ) -> Grads:
        streaming = Streaming(Mods(self.program, self.scale))
        # finds the tiles to visit; its output, from fp32 products, also serves better than the rounded one
        out, _ = streaming.forward(q, k, v, captured)
        return streaming.backward(
            q, k, v, captured, out, lse, None if dout is None else dout.to(out.dtype), dlse, wanted
        )
