"""Tensors → launch of a compiled forward kernel on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from ...call.sequences import NO_SEQUENCES, Sequences
from ...call.strides import ordered
from .arguments import CombineArguments, ForwardArguments
from .bulk import readable
from .captured import Reads
from .compile import Launchable, compile_plan
from .plan import ForwardPlan

Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # out, lse, max_scores


class ForwardLauncher:
    """A plan's kernels with what a launch needs; make it once, call it often.

    `kernel_of` turns a plan into what is called with its arguments, at the first launch; by default it compiles for
    the GPU.
    """

    def __init__(self, plan: ForwardPlan, kernel_of: Callable[[Any], Launchable] = compile_plan) -> None:
        self.plan, self.kernel_of = plan, kernel_of
        self.reads, self.is_dense = Reads(plan, plan.program), plan.layout.is_dense

    @cached_property
    def kernel(self) -> Any:
        return self.kernel_of(self.plan)

    @cached_property
    def combine(self) -> Any:
        """What follows the kernel where the plan splits kv."""
        return self.kernel_of(self.plan.combine)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        captured: Sequence[torch.Tensor] = (),
        scalars: Sequence[float | int] = (),
        sequences: Sequences = NO_SEQUENCES,
    ) -> Outputs:
        """(out (B, Hq, Sq, Dv), lse (B, Hq, Sq) or None, max_scores likewise), packed as q is.

        Raises `UnsupportedLayout`.
        """
        made = out, lse, max_scores = outputs(q, self.plan)
        if not q.numel():
            return made
        if has_unused_rows(self.plan, k):
            out.zero_()
            for t in (lse, max_scores):
                if t is not None:
                    t.fill_(-torch.inf)
        if not k.numel():
            return made
        reads = self.reads(captured, scalars, sequences)
        given = ForwardArguments(
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            max_scores=max_scores,
            scale=scale,
            sequences=None if self.is_dense else sequences,
            work=None if self.plan.work is None else self._work(q, sequences, reads),
            captured=reads or None,
            scalars=tuple(scalars) or None,
        )
        with device_of(q):
            self.launch(given)
        return made

    def launch(self, given: ForwardArguments) -> None:
        """All that the plan launches, in turn."""
        run = self._run_parts if self.plan.is_split else self._run
        try:
            run(given)
        except (ValueError, TypeError):
            # strides of sizes 0 and 1 are arbitrary and may offend; others are refused here by name
            run(tidied(given))

    def _run(self, given: ForwardArguments) -> None:
        self.kernel(*given)

    def _run_parts(self, given: ForwardArguments) -> None:
        """Each of the parts of kv apart, then all in one: 4 bytes * splits * (Dv + 1) of memory per query and head."""
        q, out, lse, packed = given.q, given.out, given.lse, given.q.ndim == 3
        by_head = out.transpose(0, 1)[None] if packed else out
        rows = by_head.shape[1 if packed else 0 : -1]
        parts = q.new_empty((self.plan.splits, *rows, out.shape[-1]), dtype=torch.float32)
        part_lse = q.new_empty((self.plan.splits, *rows), dtype=torch.float32)
        if packed:  # rows that no sequence uses get no part
            part_lse.fill_(-torch.inf)
        part_max = None if given.max_scores is None else torch.full_like(part_lse, -torch.inf)
        self.kernel(*given._replace(out=parts, lse=part_lse, max_scores=part_max))
        if part_max is not None:
            torch.amax(part_max, 0, out=given.max_scores)
        if packed:
            parts, part_lse, lse = parts[:, None], part_lse[:, None], None if lse is None else lse[None]
        self.combine(*CombineArguments(parts=parts, part_lse=part_lse, out=by_head, lse=lse))

    def _work(self, q: torch.Tensor, sequences: Sequences, reads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The table of the order of query tiles."""
        plan = self.plan
        assert plan.work is not None
        return plan.work(sequences, self.reads.counts(reads), q.shape[0] if plan.layout.q == "packed" else None)


def tidied(given: ForwardArguments) -> ForwardArguments:
    """As bulk copies can read them; raises `UnsupportedLayout`."""
    return given._replace(**{name: readable(getattr(given, name), name) for name in ("q", "k", "v", "out")})


def outputs(q: torch.Tensor, plan: ForwardPlan) -> Outputs:
    """What the plan returns for `q`, uninitialised."""
    out = ordered(q, plan.head_dim_v)
    rows = q.shape[:3] if plan.layout.q == "dense" else (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32) if plan.return_lse else None
    return out, lse, q.new_empty(rows, dtype=torch.float32) if plan.return_max_scores else None


def has_unused_rows(plan: ForwardPlan, k: torch.Tensor) -> bool:
    """Whether there may be rows that no kernel computes: O is 0, LSE and the largest score -inf there."""
    return plan.layout.used_q or not k.numel()


def device_of(t: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside, the device of `t` is current."""
    if not t.is_cuda or t.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(t.device)


_HERE = nullcontext()
