"""Sums of gradients of captured tensors at a call: empty ones with their units before a backward, numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....analysis.captured_gradient import GradientProgram, in_numbers
from ....analysis.program import Program
from ....call.autograd import Grads
from ....call.problem import Problem
from ....call.sequences import NO_SEQUENCES, Sequences
from ..planning.plan_around import UnitsPlan
from ..tiles.target import Target

FOUND = 2  # numbers of 64 bits before the sums, for the kernel that finds units


class FixedPointSums:
    """What `program` sums in calls of one form of `calls`; kernels are made by `kernel_of` when first launched.

    `lengths`: what positions of queries and keys of dense calls are below.
    """

    def __init__(
        self,
        program: GradientProgram,
        calls: Program,
        problem: Problem,
        lengths: tuple[int, int],
        target: Target,
        kernel_of: Callable[[Any], Any],
    ) -> None:
        self.program, self.problem, self.lengths = program, problem, lengths
        self.target, self.kernel_of = target, kernel_of
        at_call = {c: n for n, c in enumerate(calls.captures)}
        self._places = [at_call[c] for c in program.totals]
        self._kernels: dict[bool, Any] = {}

    def begun(
        self,
        dout: torch.Tensor,
        v: torch.Tensor,
        dlse: torch.Tensor | None,
        captured: Sequence[torch.Tensor],
        sequences: Sequences = NO_SEQUENCES,
    ) -> tuple[torch.Tensor, ...]:
        """What the main kernel adds to, and behind it their units; bulk copies can read dO and V.

        Two operations on their device, the current one, which nobody waits for.
        """
        sizes = [FOUND, *[max(1, captured[n].numel()) for n in self._places]]
        found, *totals = torch.zeros(sum(sizes), dtype=torch.int64, device=v.device).split_with_sizes(sizes)
        units = torch.empty(len(totals), dtype=torch.float32, device=v.device)
        if dout.numel() and v.numel():
            self._find(units, found.view(torch.int32), dout, v, dlse, sequences)
        else:
            units.fill_(1.0)
        return *totals, units

    def _find(
        self,
        units: torch.Tensor,
        found: torch.Tensor,
        dout: torch.Tensor,
        v: torch.Tensor,
        dlse: torch.Tensor | None,
        sequences: Sequences,
    ) -> None:
        lengths = self.lengths if self.problem.layout.is_dense else (dout.shape[0], v.shape[0])
        bounds = self.program.bounds(dout.numel() // dout.shape[-1], *lengths)
        rows_in_use = None if sequences.used_q is None else sequences.queries
        keys_in_use = None if sequences.used_k is None else sequences.keys
        find_units = self._kernels.get(dlse is not None) or self.kernel(dlse is not None)
        find_units(dout, v, dlse, rows_in_use, keys_in_use, found, bounds, units)

    def kernel(self, has_dlse: bool) -> Any:
        """The one that finds units, made anew; `has_dlse`: of a gradient through LSE too."""
        layout = self.problem.layout
        plan = UnitsPlan(
            target=self.target, dtype=self.problem.dtype, head_dim_v=self.problem.head_dim_v,
            is_dense=layout.is_dense, used_q=layout.used_q, used_kv=layout.used_kv, has_dlse=has_dlse,
            sums=len(self._places),
        )  # fmt: skip
        self._kernels[has_dlse] = found = self.kernel_of(plan)
        return found

    def gradients(self, made: Sequence[torch.Tensor], captured: Sequence[torch.Tensor]) -> Grads:
        """Gradients of the captured tensors of a call, from what was `begun` and is full; None of others.

        An operation on the device for each.
        """
        *totals, units = made
        grads: list[torch.Tensor | None] = [None] * len(captured)
        for n, total, unit in zip(self._places, totals, units.unbind(), strict=True):
            grads[n] = in_numbers(total, unit, captured[n])
        return tuple(grads)
