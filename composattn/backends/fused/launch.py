"""Tensors → launch of a compiled kernel on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch

from ...call.sequences import NO_SEQUENCES, Sequences
from ...call.strides import ordered
from ...errors import UnsupportedLayout
from .captured import read_by
from .compile import Launchable, compile_plan
from .plan import ForwardPlan

Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # out, lse, max_scores


class ForwardLauncher:
    """A plan's kernel with what a launch needs; make it once, call it often.

    `kernel_of` turns a plan into what is called with its tensors, at the first launch; by default it compiles for the
    GPU.
    """

    def __init__(self, plan: ForwardPlan, kernel_of: Callable[[Any], Launchable] = compile_plan) -> None:
        self.plan, self.kernel_of = plan, kernel_of

    @cached_property
    def kernel(self) -> Any:
        return self.kernel_of(self.plan)

    @cached_property
    def compiled(self) -> Launchable:
        """The kernel and, where the plan splits kv, what follows it."""
        return with_combine(self.plan, self.kernel, self.kernel_of)

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
        made = out, *statistics = outputs(q, self.plan)
        if not q.numel():
            return made
        if leaves_rows_out(self.plan, k):
            out.zero_()
            for t in statistics:
                if t is not None:
                    t.fill_(-torch.inf)
        if not k.numel():
            return made
        rest = arguments_behind_scale(self.plan, q.shape[0], sequences, captured, scalars)
        with device_of(q):
            self._launch(q, k, v, *made, scale, *rest)
        return made

    def _launch(self, q, k, v, *rest) -> None:  # type: ignore[no-untyped-def]
        try:
            self.compiled(q, k, v, *rest)
        except (ValueError, TypeError):
            # strides of sizes 0 and 1 are arbitrary and may offend; others are refused here by name
            self.compiled(tidy(q, "q"), tidy(k, "k"), tidy(v, "v"), *rest)


def outputs(q: torch.Tensor, plan: ForwardPlan) -> Outputs:
    """What the plan returns for `q`, uninitialised."""
    out = ordered(q, plan.head_dim_v)
    rows = q.shape[:3] if plan.layout.q == "dense" else (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32) if plan.return_lse else None
    return out, lse, q.new_empty(rows, dtype=torch.float32) if plan.return_max_scores else None


def leaves_rows_out(plan: ForwardPlan, k: torch.Tensor) -> bool:
    """Whether there may be rows that no kernel computes: O is 0, LSE and the largest score -inf there."""
    return plan.layout.used_q or not k.numel()


def arguments_behind_scale(
    plan: ForwardPlan,
    rows: int,
    sequences: Sequences,
    captured: Sequence[torch.Tensor],
    scalars: Sequence[float | int],
) -> tuple[Any, ...]:
    """What the kernel's host function takes behind the scale: sequences, work, captured tensors, numbers.

    `rows`: how many packed queries there are; not read of dense ones.
    """
    reads = read_by(plan, captured, scalars, sequences)
    counts = None if plan.lists is None else reads[len(captured)]
    return (
        tuple([t for t in sequences if t is not None]) or None,
        None if plan.work is None else plan.work(sequences, counts, rows if plan.layout.q == "packed" else None),
        tuple([at_least_1d(t) for t in reads]) or None,
        tuple(scalars) or None,
    )


class SplitKernel:
    """A forward kernel that has a block for each of `splits` parts of kv, and the kernel that combines the parts.

    Called as a forward kernel that does all at once is. Extra memory: 4 bytes * splits * (Dv + 1) a query and head.
    """

    def __init__(self, forward: Launchable, combine: Launchable, splits: int) -> None:
        self.forward, self.combine, self.splits = forward, combine, splits

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        max_scores: torch.Tensor | None,
        *rest: Any,
    ) -> None:
        packed = q.ndim == 3
        by_head = out.transpose(0, 1)[None] if packed else out
        rows = by_head.shape[1 if packed else 0 : -1]
        parts = q.new_empty((self.splits, *rows, out.shape[-1]), dtype=torch.float32)
        part_lse = q.new_empty((self.splits, *rows), dtype=torch.float32)
        if packed:  # rows that no sequence uses get no part
            part_lse.fill_(-torch.inf)
        part_max = None if max_scores is None else torch.full_like(part_lse, -torch.inf)
        self.forward(q, k, v, parts, part_lse, part_max, *rest)
        if part_max is not None:
            torch.amax(part_max, 0, out=max_scores)
        if packed:
            parts, part_lse, lse = parts[:, None], part_lse[:, None], None if lse is None else lse[None]
        self.combine(parts, part_lse, by_head, lse)


def with_combine(plan: ForwardPlan, forward: Launchable, kernel_of: Callable[[Any], Launchable]) -> Launchable:
    """The plan's kernel and, where it splits kv, what follows it."""
    return SplitKernel(forward, kernel_of(plan.combine), plan.splits) if plan.is_split else forward


def at_least_1d(t: torch.Tensor) -> torch.Tensor:
    return t if t.ndim else t.reshape(1)


def device_of(t: torch.Tensor) -> AbstractContextManager[Any]:
    """Inside, the device of `t` is current."""
    if not t.is_cuda or t.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(t.device)


_HERE = nullcontext()


def tidy(t: torch.Tensor, name: str) -> torch.Tensor:
    """`t` with harmless strides in its dimensions of size 1.

    Raises `UnsupportedLayout` where the last dimension is not contiguous or rows don't start at whole 16 bytes.
    """
    unit = 16 // t.element_size()
    strides = [8 if size == 1 else stride for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)]
    if t.shape[-1] != 1 and t.stride(-1) != 1:
        raise UnsupportedLayout(
            f"{name} has strides {t.stride()}; the last dimension must be contiguous: pass {name}.contiguous()"
        )
    if any(s % unit for s in strides) or t.data_ptr() % 16:
        raise UnsupportedLayout(
            f"{name} has strides {t.stride()} and starts at {t.data_ptr() % 16} bytes past a multiple of 16; "
            f"bulk copies need data and strides in whole 16 bytes ({unit} elements): pass {name}.contiguous()"
        )
    return t.as_strided(t.shape, (*strides, 1))
