"""Tensors → launches of the backward kernels on torch's current stream: statistics, dK and dV and the sum of dQ, dQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ...analysis.program import Program
from ...call.sequences import NO_SEQUENCES, Sequences
from ...call.strides import ordered
from ...graph.expr import Capture
from .arguments import GatherArguments, MainArguments, PiecesArguments, PostprocessArguments, PreprocessArguments
from .bulk import copyable
from .captured import Reads
from .compile import compile_plan
from .launch import device_of
from .plan_backward import COUNTER, BackwardPlans

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Kernel = Callable[..., Any]


class BackwardLauncher:
    """The kernels of the backward with what a launch needs; make it once, call it often.

    `kernel_of` turns a plan into what is called with its tensors, at the first launch; by default it compiles for the
    GPU. `program` is that of the calls, by default the plan's: one that sums gradients reads more than a call gives.
    """

    def __init__(
        self,
        plans: BackwardPlans,
        kernel_of: Callable[[Any], Kernel] = compile_plan,
        program: Program | None = None,
    ) -> None:
        self.plans, self.tiling = plans, plans.main.tiling
        self.kernel_of = kernel_of
        self.has_dlse, self.is_dense = plans.preprocess.has_dlse, plans.main.layout.is_dense
        self.reads = Reads(plans.main, plans.main.program if program is None else program)

    @cached_property
    def preprocess(self) -> Kernel:
        return self.kernel_of(self.plans.preprocess)

    @cached_property
    def main(self) -> Kernel:
        return self.kernel_of(self.plans.main)

    @cached_property
    def postprocess(self) -> Kernel:
        return self.kernel_of(self.plans.postprocess)

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
        made: Mapping[Capture, torch.Tensor] | None = None,
    ) -> Gradients:
        """(dq, dk, dv), in the dtype and the order of dimensions of q, k, v.

        q, k, v, out, lse as the forward had and gave them; dout like out; dlse fp32 like lse where the plan has it;
        `made`: what the kernel reads that is neither captured nor derived from it.
        Extra memory: 4 bytes * Sq * (padded D + 2) a query head, and 512 bytes * (padded D + padded Dv) a piece of
        a tile of keys.
        """
        layout = self.plans.main.layout
        dq = _gradient_of(q, layout.used_q or not k.numel())
        dk, dv = (_gradient_of(t, layout.used_kv or not q.numel()) for t in (k, v))
        if not q.numel() or not k.numel():
            return dq, dk, dv
        reads = self.reads(captured, scalars, sequences, made)
        lie = None if self.is_dense else sequences
        rows, keys = self._work(q, k, sequences, reads)
        batch, heads, tiles = self._workspace(q, sequences)
        turns = q.new_zeros((batch, heads, tiles), dtype=torch.int32) if self.plans.main.deterministic else None
        workspace = q.new_empty(COUNTER + 2 * batch * heads * tiles * self.tiling.tile_m, dtype=torch.float32)
        dq_accum = q.new_empty((batch, heads, tiles, self.tiling.tile_m * self.tiling.d), dtype=torch.float32)
        pieces = self._pieces(q)
        q, k, v, out, dout = [copyable(t) for t in (q, k, v, out, dout)]
        preprocess = PreprocessArguments(
            out=out,
            dout=dout,
            lse=lse,
            dlse=dlse if self.has_dlse else None,
            workspace=workspace,
            dq_accum=dq_accum,
            sequences=lie,
            work=rows,
        )
        main = MainArguments(
            q=q,
            k=k,
            v=v,
            dout=dout,
            workspace=workspace,
            dq_accum=dq_accum,
            dk=dk,
            dv=dv,
            pieces=pieces,
            turns=turns,
            scale=scale,
            sequences=lie,
            work=keys,
            captured=reads or None,
            scalars=tuple(scalars) or None,
        )
        with device_of(q):
            self.preprocess(*preprocess)
            self.main(*main)
            self.postprocess(*PostprocessArguments(dq_accum=dq_accum, dq=dq, scale=scale, sequences=lie, work=rows))
            if self.gather is not None:
                self.gather(*GatherArguments(pieces=pieces, dk=dk, dv=dv))
        return dq, dk, dv

    def _work(
        self, q: torch.Tensor, k: torch.Tensor, sequences: Sequences, reads: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Tables of the tiles of queries and of keys, where plans have them."""
        rows, main = self.plans.preprocess.work, self.plans.main
        total = k.shape[0] if main.layout.kv == "packed" else None
        return (
            None if rows is None else rows(sequences, None, q.shape[0]),
            None if main.work is None else main.work(sequences.mirrored, self.reads.counts(reads), total),
        )

    def _pieces(self, q: torch.Tensor) -> PiecesArguments | None:
        """Memory for the sums of pieces, and how tiles are cut."""
        cut, t = self.plans.main.cut, self.tiling
        if cut is None:
            return None
        size = cut.cut * (cut.pieces * t.tile_n * (t.d + t.dv) + 4)
        workspace = q.new_empty(size, dtype=torch.float32)
        return PiecesArguments(workspace=workspace, whole=cut.whole, cut=cut.cut, pieces=cut.pieces)

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
    made = t.new_empty(t.shape) if t.is_contiguous() else ordered(t, t.shape[-1])
    return made.zero_() if partly else made
