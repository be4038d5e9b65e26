"""Gradients of a call by generated kernels: dQ, dK, dV and captured tensors, and what is computed beside them.

dQ, dK and dV come from the fused backward, and so do gradients of captured tensors whose reads follow a pattern
(`composattn.analysis.captured_gradient`): 8 bytes an element of the tensor beside. Those of other reads come from the
tile-by-tile backward of `composattn.backends.streaming` on the same GPU: O(S) memory, not fused, and of packed
sequences it reads the lengths on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...analysis.captured_gradient import GradientProgram, fused_reads, in_numbers, unit_counts
from ...analysis.program import Program
from ...call.autograd import BackwardInputs, Grads
from ...call.problem import Problem
from ...call.sequences import Sequences, rows_in_use
from ...errors import GradientUnsupported
from ...graph.expr import Capture
from ...graph.gradient import partials
from ..streaming import Mods, Streaming
from .compile import compile_plan
from .launch_backward import BackwardLauncher
from .plan_backward import plan_backward
from .target import Target


class FusedGradient:
    """The backward of one form of inputs; its kernels are made by `kernel_of` when first needed."""

    def __init__(
        self,
        problem: Problem,
        program: Program,
        scale: float,
        target: Target,
        kernel_of: Callable[[Any], Any] = compile_plan,
    ) -> None:
        self.kernel_of = kernel_of
        self.problem, self.program, self.scale, self.target = problem, program, scale, target
        self._launchers: dict[Any, BackwardLauncher] = {}
        self._summing: dict[frozenset[Capture], Program] = {}
        self.fusable = fused_reads(program)

    def launcher(
        self, has_dlse: bool, deterministic: bool, summed: frozenset[Capture] = frozenset()
    ) -> BackwardLauncher:
        """The compiled kernels, with or without a gradient through LSE and a fixed order of dQ's parts.

        `summed`: of which captured tensors the kernel sums the gradient.
        """
        form = (has_dlse, deterministic, summed)
        if form not in self._launchers:
            plans = plan_backward(
                self.problem, self.summing(summed), self.target, has_dlse=has_dlse, deterministic=deterministic
            )
            self._launchers[form] = BackwardLauncher(plans, self.kernel_of, self.program)
        return self._launchers[form]

    def summing(self, summed: frozenset[Capture]) -> Program:
        """The program, with sums of these captured tensors."""
        if not summed:
            return self.program
        if summed not in self._summing:
            reads = {c: reads for c, reads in self.fusable.items() if c in summed}
            self._summing[summed] = GradientProgram(self.program, reads)
        return self._summing[summed]

    def describe(self) -> str:
        """Who sums the gradient of each captured tensor that the score mod is differentiable in, and in what memory."""
        if self.program.score is None:
            return ""
        lines = []
        for capture in dict.fromkeys(leaf.attr for leaf in partials(self.program.score) if leaf.op == "read"):
            tensor, reads = capture.tensor, self.fusable.get(capture)
            who = "tile by tile in PyTorch, O(S) memory"
            if reads:
                patterns = " and ".join(dict.fromkeys(r.pattern.value for r in reads))
                who = f"in the kernel, {patterns}, in 64-bit fixed point, {8 * tensor.numel()} bytes, repeatable"
            lines.append(f"{list(tensor.shape)}: {who}")
        return "\n".join(lines)

    def deterministic(self) -> bool:
        """Whether dQ has to be bitwise repeatable: as the problem says, or as torch is set now."""
        asked = self.problem.deterministic
        return torch.are_deterministic_algorithms_enabled() if asked is None else asked

    def __call__(self, known: BackwardInputs, scalars: Sequence[float | int], sequences: Sequences) -> Grads:
        """(dq, dk, dv, *d captured); captured tensors and `scalars` in the order of the program."""
        if torch.is_grad_enabled():
            raise GradientUnsupported(
                'the fused backward is not differentiable itself (create_graph=True); use backend="streaming", '
                "whose gradients are"
            )
        captures, wanted = self.program.captures, known.wanted
        asked = [c for c, want in zip(captures, wanted[3:], strict=True) if want]
        summed = frozenset(c for c in asked if c in self.fusable)
        found: dict[Capture, torch.Tensor | None] = {}
        grads: Grads = (None, None, None)
        if any(wanted[:3]) or summed:
            grads, found = self._fused(known, scalars, sequences, summed)
        if len(found) < len(asked):
            also = [want and c not in found for c, want in zip(captures, wanted[3:], strict=True)]
            streamed = self._streamed(known._replace(wanted=(False, False, False, *also)), scalars, sequences)
            found |= {c: g for c, g, want in zip(captures, streamed[3:], also, strict=True) if want}
        return (*grads, *(found.get(c) for c in captures))

    def _fused(
        self, known: BackwardInputs, scalars: Sequence[float | int], sequences: Sequences, summed: frozenset[Capture]
    ) -> tuple[Grads, dict[Capture, torch.Tensor | None]]:
        """(dq, dk, dv), and the gradients of `summed`."""
        q, k, v, out, lse, dout, dlse, captured, _ = known
        dout = dout.to(out.dtype)
        launcher = self.launcher(dlse is not None, self.deterministic(), summed)
        program = self.summing(summed)
        inputs = q, k, v, out, lse, dout, dlse, self.scale, captured, scalars, sequences
        if not isinstance(program, GradientProgram):
            return launcher(*inputs), {}
        at_call = dict(zip(self.program.captures, captured, strict=True))
        made = {program.units: self._units(program, known._replace(dout=dout), sequences)}
        for c, total in program.totals.items():
            made[total] = torch.zeros(max(1, at_call[c].numel()), dtype=torch.int64, device=q.device)
        grads = launcher(*inputs, made)
        units = made[program.units]
        return grads, {c: in_numbers(made[t], units[n], at_call[c]) for n, (c, t) in enumerate(program.totals.items())}

    def _units(self, program: GradientProgram, known: BackwardInputs, sequences: Sequences) -> torch.Tensor:
        """Units in 1 of each sum."""
        q, v, dout, dlse = known.q, known.v, known.dout, known.dlse
        reads = program.reads.values()
        if sequences.cu_q is None or sequences.cu_k is None:
            return unit_counts(reads, dout, v, dlse, q.shape[2], v.shape[2])
        totals = q.shape[0], v.shape[0]
        rows = rows_in_use(sequences.cu_q, sequences.used_q, totals[0])
        keys = rows_in_use(sequences.cu_k, sequences.used_k, totals[1])
        return unit_counts(reads, dout, v, dlse, *totals, rows, keys)

    def _streamed(self, known: BackwardInputs, scalars: Sequence[float | int], sequences: Sequences) -> Grads:
        streaming = Streaming(Mods(self.program, self.scale), scalars, sequences)
        # finds the tiles to visit; its output, from fp32 products, also serves better than the rounded one
        out, *_ = streaming.forward(known.q, known.k, known.v, known.captured)
        return streaming.backward(known._replace(out=out, dout=known.dout.to(out.dtype)))
