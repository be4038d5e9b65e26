"""Tensors → launches of the backward kernels on torch's current stream: statistics, dK and dV and the sum of dQ, dQ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from ....analysis.derived import derived_for_graph, derives_anew
from ....analysis.program import Program
from ....analysis.streams import has_streams, stream_handle
from ....analysis.strips import parts_of
from ....call.autograd import Gradients
from ....call.sequences import NO_SEQUENCES, Sequences
from ....graph.expr import Capture
from ....watched import range_name
from ..compiling.compile import compile_plan
from ..planning.arguments import PiecesArguments
from ..planning.plan_backward import COUNTER, BackwardPlans
from ..tiles.segments import most_places
from .backward_kernels import BackwardTensors, Kernel, SinkGradient, Tables, launches
from .bulk import copyable
from .captured import Reads, derives_for_itself
from .launch import memory_like
from .scratch import Memory, Scratch, kept

_STRIDES_LIMIT = 64


class _WorkspaceSizes(NamedTuple):
    """Sizes of the memory that a call takes for itself."""

    of: tuple[int, ...]  # shape of q
    # a counter, two statistics of rows, numbers that say what is done to dQ, and to keys of strips, shares of sinks
    workspace: int
    sums: tuple[int, ...]  # of dQ
    strides: tuple[int, ...]
    turns: tuple[int, ...] | None  # of a fixed order
    scratch: Scratch | None = None  # of dense calls

    def memory(self, device: torch.device) -> Memory:
        """Workspace and sums."""
        fp32 = torch.float32
        workspace = torch.empty(self.workspace, dtype=fp32, device=device)
        return workspace, torch.empty_strided(self.sums, self.strides, dtype=fp32, device=device)


NO_TABLES: Tables = None, None


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
        self.is_dense = plans.main.layout.is_dense
        self.strips = plans.main.layout.strips
        tables = [plan.work for plan in (plans.preprocess, plans.main) if plan.work is not None]
        self.has_tables = bool(tables)
        self.program = plans.main.program if program is None else program
        self.reads = Reads(plans.main, self.program)
        as_given = self.reads.are_given and self.reads.are_as_given and not self.reads.has_numbers
        self.reads_nothing = not (self.reads.captured or tables)
        self.reads_captured_alone = as_given and not tables
        self.standing = self.reads.standing(*tables) if self.is_dense else None
        # by stream, what dense calls read that give mods no tensors and no numbers: it holds for ever
        self.lasting: dict[int | None, tuple[Sequence[torch.Tensor], Tables]] | None = (
            {} if self.is_dense and not (self.program.captures or self.program.scalars or self.reads.derived) else None
        )
        of_each = plans.preprocess.work, plans.main.work
        self.one_run = self.reads.one_run(of_each, plans.main.work) if self.is_dense else None
        self._tidy_strides: set[tuple[int, ...]] = set()
        self.sizes: _WorkspaceSizes | None = None  # of the latest dense call

    @cached_property
    def preprocess(self) -> Kernel:
        return self.kernel_of(self.plans.preprocess)

    @cached_property
    def main(self) -> Kernel:
        return self.kernel_of(self.plans.main)

    @cached_property
    def postprocess(self) -> Kernel | None:
        return None if self.plans.postprocess is None else self.kernel_of(self.plans.postprocess)

    @cached_property
    def gather(self) -> Kernel | None:
        return None if self.plans.gather is None else self.kernel_of(self.plans.gather)

    @cached_property
    def launch(self) -> Callable[..., None]:
        """Launches them all on the current device, see `launches`."""
        pieces_of = None if self.plans.main.cut is None else self.pieces
        kernels = self.preprocess, self.main, self.postprocess, self.gather
        return launches(*kernels, pieces_of=pieces_of, shares_keys=self.plans.main.layout.shares_keys)

    def launch_in_range(self, *given: Any) -> None:
        """`launch`, where somebody profiles."""
        with profiler.record_function(range_name("backward", self.program.title, self.plans.main.target.backend)):
            self.launch(*given)

    def kernels(self) -> list[Kernel]:
        """All that it launches, made now."""
        return [self.preprocess, self.main, *(k for k in (self.postprocess, self.gather) if k is not None)]

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
        of_sinks: SinkGradient | None = None,
        tables: Tables | None = None,
        into: Gradients | None = None,
    ) -> Gradients:
        """(dq, dk, dv), in the dtype and the order of dimensions of q, k, v.

        q, k, v, out, lse as the forward had and gave them; dout like out; dlse fp32 like lse where the plan has it;
        `made`: what the kernel reads that is neither captured nor derived from it. `of_sinks`, where the plan has
        sinks: their gradient is filled in. `tables` are those that stand for what was borrowed (`Standing`): nothing
        has to be borrowed again. `into`: memory for the results. Extra memory: 4 bytes * Sq * (padded D + 2) per query
        head, and 512 bytes * (padded D + padded Dv) per piece of a tile of keys.
        """
        layout = self.plans.main.layout
        # as `memory_like`, without the calls: this runs in a thread of torch's whose caches are cold
        dq, dk, dv = into or (
            torch.empty_like(q) if q.is_contiguous() else memory_like(q),
            torch.empty_like(k) if k.is_contiguous() else memory_like(k),
            torch.empty_like(v) if v.is_contiguous() else memory_like(v),
        )
        nothing = not q.numel() or not k.numel()
        if layout.used_q or nothing:
            dq.zero_()
        if layout.used_kv or nothing:
            dk.zero_()
            dv.zero_()
        if nothing:
            return dq, dk, dv
        known = self._tidy_strides
        if (q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr() | dout.data_ptr()) % 16 or not (
            q.stride() in known and k.stride() in known and v.stride() in known
            and out.stride() in known and dout.stride() in known
        ):  # fmt: skip
            q, k, v, out, dout = self._tidied(q, k, v, out, dout)
        tensors = q, k, v, out, lse, dout, dlse, dq, dk, dv
        self.fill(tensors, scale, captured, scalars, sequences, made, of_sinks, tables)
        return dq, dk, dv

    def fill(
        self,
        tensors: BackwardTensors,
        scale: float,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences,
        made: Mapping[Capture, torch.Tensor] | None,
        of_sinks: SinkGradient | None,
        tables: Tables | None,
    ) -> None:
        """Launches the backward of queries and keys that TMA can read as they are, into gradients that are there."""
        q, k = tensors[:2]
        if self.reads_captured_alone:
            reads, tables = captured, NO_TABLES
        elif self.reads_nothing:
            reads, tables = (), NO_TABLES
        elif tables is not None:
            reads = self.reads.given(captured) if self.reads.has_numbers else captured
        else:
            reads, tables = self._read(q, k, captured, scalars, sequences, made)
        lie = None if self.is_dense else sequences
        sizes = self.sizes
        if sizes is None or sizes.of != q.shape or not self.is_dense:
            sizes = self._sizes_of(q, k, sequences, tables[0])
        memory, place = (sizes.memory(q.device), None) if sizes.scratch is None else sizes.scratch.take()
        given = (tensors, scale, reads, scalars, lie, tables, memory, sizes.turns, of_sinks)
        launch = self.launch_in_range if profiler._is_profiler_enabled else self.launch
        if not q.is_cuda or q.get_device() == torch._C._cuda_getDevice():
            launch(*given)
        else:
            with torch.cuda.device(q.device):
                launch(*given)
        if place is not None:
            kept[place] = memory

    def _read(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences,
        made: Mapping[Capture, torch.Tensor] | None,
    ) -> tuple[tuple[torch.Tensor, ...], Tables]:
        """What the mods read, and the tables."""
        with derived_for_graph(self.reads.program.captures, captured):
            moment = None if self.one_run is None else derives_for_itself()
            if self.one_run is not None and moment is not None:
                reads, (of_queries, of_keys) = self.one_run(captured, moment, made)
                return reads, (of_queries, of_keys)
            reads = self.reads(captured, scalars, sequences, made) if self.reads.captured else ()
            tables = self._work(q, k, sequences, reads, captured) if self.has_tables else NO_TABLES
            if self.standing is not None and not derives_anew():
                self.standing.keep(tables)
            if self.lasting is not None and not derives_anew():
                self.lasting[stream_handle(q.device) if has_streams(q.device) else None] = reads, tables
        return reads, tables

    def _tidied(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The tensors as bulk copies can read them; strides with which they can are known from then on."""
        found = [copyable(t) for t in tensors]
        if len(self._tidy_strides) >= _STRIDES_LIMIT:
            self._tidy_strides.clear()
        self._tidy_strides.update(t.stride() for t in found)
        return found

    def _work(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        sequences: Sequences,
        reads: Sequence[torch.Tensor],
        captured: Sequence[torch.Tensor],
    ) -> Tables:
        """Tables of the tiles of queries and of keys, where plans have them."""
        rows, main = self.plans.preprocess.work, self.plans.main
        at_call = self.reads.at_call(captured)
        total = k.shape[0] if main.layout.kv == "packed" else None
        mirrored = sequences if self.is_dense else sequences.mirrored
        counts = None if self.reads.lists is None else self.reads.counts(reads)
        return (
            None if rows is None else rows(sequences, None, q.shape[0], at_call),
            None if main.work is None else main.work(mirrored, counts, total, at_call),
        )

    def pieces(self, dk: torch.Tensor, table: torch.Tensor | None) -> PiecesArguments:
        """Memory for the sums of pieces, and how tiles of keys are cut, which come by a `table`, if there is one."""
        cut, t = self.plans.main.cut, self.tiling
        assert cut is not None
        if cut.tiles is not None:
            count = cut.cut
        else:
            entries = dk.shape[0] * -(-dk.shape[2] // t.tile_n) if table is None else table.shape[0]
            count = entries * dk.shape[1]
        size = count * (cut.pieces * t.tile_n * (t.d + t.dv) + 4)
        workspace = torch.empty(size, dtype=torch.float32, device=dk.device)
        return PiecesArguments(workspace=workspace, whole=cut.whole, cut=count, pieces=cut.pieces)

    def _sizes_of(
        self, q: torch.Tensor, k: torch.Tensor, sequences: Sequences, table: torch.Tensor | None
    ) -> _WorkspaceSizes:
        """The memory of a call, see `composattn.primitives.padded_tiles`; that of dense ones is known from then on."""
        tile_m = self.tiling.tile_m
        if sequences.cu_q is None:
            batch, heads, q_len, _ = q.shape
            if self.strips is not None:
                batch, q_len = batch * self.strips.count, self.strips.queries_of(q_len)
            tiles = most_places(q_len, tile_m) if self.plans.main.has_segments else -(-q_len // tile_m)
        else:
            total, heads, _ = q.shape
            batch, tiles = 1, total // tile_m + sequences.cu_q.shape[0] - 1
        rows, width = batch * heads * tiles * tile_m, tile_m * self.tiling.d
        blocks = batch * tiles if table is None else table.shape[0]
        shares = 0 if self.plans.preprocess.sinks is None else blocks
        of_keys = 0
        if self.strips is not None and self.plans.main.layout.shares_keys:  # of dK and dV
            of_keys = 2 * batch * k.shape[1] * parts_of(self.strips.keys_of(k.shape[2]), self.tiling.tile_n)
        found = _WorkspaceSizes(
            of=q.shape,
            workspace=COUNTER + 2 * rows + (self.tiling.flags(tiles) * batch + shares) * heads + of_keys,
            sums=(batch, heads, tiles, width),
            strides=(heads * tiles * width, tiles * width, width, 1),
            turns=(batch, heads, self.tiling.sharing * tiles) if self.plans.main.deterministic else None,
        )
        if self.is_dense:
            scratch = Scratch(found.workspace, found.sums, found.strides, q.device)
            self.sizes = found = found._replace(scratch=scratch)
        return found
