"""Tensors → launches of the backward kernels on torch's current stream: statistics, dK and dV and the sum of dQ, dQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from ...analysis.derived import Upkeep
from ...call.sequences import NO_SEQUENCES, Sequences
from ...call.strides import ordered
from .compile import compile_plan
from .launch import at_least_1d, device_of
from .plan_backward import COUNTER, BackwardPlan, BackwardPlans

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Kernel = Callable[..., Any]


class BackwardLauncher:
    """The kernels of the backward with what a launch needs; make it once, call it often.

    `kernel_of` turns a plan into what is called with its tensors, at the first launch; by default it compiles for the
    GPU.
    """

    def __init__(self, plans: BackwardPlans, kernel_of: Callable[[BackwardPlan], Kernel] = compile_plan) -> None:  # type: ignore[assignment]
        self.plans, self.tiling = plans, plans.main.tiling
        self.kernel_of = kernel_of
        self.has_dlse = plans.prepare.has_dlse
        self.upkeep = Upkeep(plans.main.captured)

    @cached_property
    def prepare(self) -> Kernel:
        return self.kernel_of(self.plans.prepare)

    @cached_property
    def main(self) -> Kernel:
        return self.kernel_of(self.plans.main)

    @cached_property
    def finish(self) -> Kernel:
        return self.kernel_of(self.plans.finish)

    @cached_property
    def gather(self) -> Kernel | None:
        return None if self.plans.gather is None else self.kernel_of(self.plans.gather)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        scale: float,
        captured: Sequence[torch.Tensor] = (),
        scalars: Sequence[float | int] = (),
        sequences: Sequences = NO_SEQUENCES,
    ) -> Gradients:
        """(dq, dk, dv), in the dtype and the order of dimensions of q, k, v.

        q, k, v, out, lse as the forward had and gave them; dout like out; dlse fp32 like lse where the plan has it.
        Extra memory: 4 bytes * Sq * (padded D + 2) a query head, and 512 bytes * (padded D + padded Dv) a piece of
        a tile of keys.
        """
        layout = self.plans.main.layout
        dq = _gradient_of(q, layout.used_q or not k.numel())
        dk, dv = (_gradient_of(t, layout.used_kv or not q.numel()) for t in (k, v))
        if not q.numel() or not k.numel():
            return dq, dk, dv
        self.upkeep()
        places = tuple(t for t in sequences if t is not None) or None
        rows, keys = self._work(q, k, sequences, captured)
        batch, heads, tiles = self._workspace(q, sequences)
        turns = q.new_zeros((batch, heads, tiles), dtype=torch.int32) if self.plans.main.deterministic else None
        statistics = q.new_empty(COUNTER + 2 * batch * heads * tiles * self.tiling.tile_m, dtype=torch.float32)
        dq_sum = q.new_empty((batch, heads, tiles, self.tiling.tile_m * self.tiling.d), dtype=torch.float32)
        q, k, v, out, dout = (copyable(t) for t in (q, k, v, out, dout))
        reads, numbers = tuple(at_least_1d(t) for t in captured) or None, tuple(scalars) or None
        with device_of(q):
            self.prepare(out, dout, lse, dlse if self.has_dlse else None, statistics, dq_sum, places, rows)
            pieces = self._pieces(q)
            self.main(q, k, v, dout, statistics, dq_sum, dk, dv, pieces, turns, scale, places, keys, reads, numbers)
            self.finish(dq_sum, dq, scale, places, rows)
            if self.gather is not None:
                self.gather(pieces, dk, dv)
        return dq, dk, dv

    def _work(
        self, q: torch.Tensor, k: torch.Tensor, sequences: Sequences, captured: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Tables of the tiles of queries and of keys, where plans have them."""
        rows, main = self.plans.prepare.work, self.plans.main
        packed = main.layout.kv == "packed"
        counts = None if main.lists is None else captured[main.captured.index(main.lists.captures[0])]
        return (
            None if rows is None else rows(sequences, None, q.shape[0]),
            None if main.work is None else main.work(sequences.mirrored, counts, k.shape[0] if packed else None),
        )

    def _pieces(self, q: torch.Tensor) -> tuple[torch.Tensor | int, ...] | None:
        """Memory for the sums of pieces, and how tiles are cut; see `composattn.primitives.pieces`."""
        cut, t = self.plans.main.cut, self.tiling
        if cut is None:
            return None
        size = cut.cut * (cut.pieces * t.tile_n * (t.d + t.dv) + 4)
        return q.new_empty(size, dtype=torch.float32), cut.whole, cut.cut, cut.pieces

    def _workspace(self, q: torch.Tensor, sequences: Sequences) -> tuple[int, int, int]:
        """(entries, heads, tiles of each) of the workspaces, see `composattn.primitives.padded_tiles`."""
        tile_m = self.tiling.tile_m
        if sequences.cu_q is None:
            batch, heads, q_len, _ = q.shape
            return batch, heads, -(-q_len // tile_m)
        total, heads, _ = q.shape
        return 1, heads, total // tile_m + sequences.cu_q.shape[0] - 1


def _gradient_of(t: torch.Tensor, partly: bool) -> torch.Tensor:
    """Memory for the gradient of `t`, zeros where the kernels write `partly` of it."""
    made = ordered(t, t.shape[-1])
    return made.zero_() if partly else made


def copyable(t: torch.Tensor) -> torch.Tensor:
    """`t`, or a copy where bulk copies can't read it: head dimension not contiguous, strides not in whole 16 bytes.

    Gradients arrive in any form (`out.sum().backward()` expands one number), so here the copy is the way out.
    """
    unit = 16 // t.element_size()
    *strides, last = t.stride()
    if last == 1 and not t.data_ptr() % 16 and all(s > 0 and not s % unit for s in strides):
        return t
    # strides of size 1 are arbitrary
    strides = [8 if size == 1 else stride for size, stride in zip(t.shape[:-1], strides, strict=True)]
    whole = all(s % unit == 0 and s > 0 for s in strides) and t.data_ptr() % 16 == 0
    if not whole or (t.shape[-1] != 1 and last != 1):
        return t.contiguous() if not t.is_contiguous() else t.clone()
    return t.as_strided(t.shape, (*strides, 1))
