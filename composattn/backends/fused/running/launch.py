"""Tensors → launch of a compiled forward kernel on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.autograd import profiler

from ....analysis.derived import derived_for_graph, derives_anew
from ....analysis.program import Program
from ....call.inputs import Outputs
from ....call.sequences import NO_SEQUENCES, Sequences
from ....call.strides import ordered
from ....graph.borrowed import Borrowed, current
from ....watched import range_name
from ...streaming import DerivedMods, Streaming
from ..compiling.compile import Launchable, compile_plan
from ..planning.arguments import CombineArguments, ForwardArguments
from ..planning.plan import ForwardPlan
from .bulk import readable
from .captured import Reads, derives_for_itself
from .counter import counter_of
from .dequantise import dequantised


class ForwardLauncher:
    """A plan's kernels with what a launch needs; make it once, call it often.

    `kernel_of` turns a plan into what is called with its arguments, at the first launch; by default it compiles for
    the GPU.
    """

    def __init__(self, plan: ForwardPlan, kernel_of: Callable[[Any], Launchable] = compile_plan) -> None:
        self.plan, self.kernel_of = plan, kernel_of
        self.reads, self.is_dense, self.used_q = Reads(plan, plan.program), plan.layout.is_dense, plan.layout.used_q
        as_given = self.reads.are_given and self.reads.are_as_given and not self.reads.has_numbers
        self.key_type = plan.types.k
        self.counts, self.shares = plan.counts, plan.tiling.scheduler.shares
        self.reads_what_is_given = as_given and plan.work is None
        self.standing = self.reads.standing(plan.work) if self.is_dense else None
        self.one_run = self.reads.one_run((plan.work,), plan.work) if self.is_dense else None

    @cached_property
    def kernel(self) -> Any:
        return self.kernel_of(self.plan)

    @cached_property
    def combine(self) -> Any:
        """What follows the kernel where the plan splits kv."""
        return self.kernel_of(self.plan.combine)

    def kernels(self) -> list[Any]:
        """All that it launches, made now."""
        return [self.kernel, *([self.combine] if self.plan.is_split else ())]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        captured: Sequence[torch.Tensor] = (),
        scalars: Sequence[float | int] = (),
        sequences: Sequences = NO_SEQUENCES,
        into: torch.Tensor | None = None,
    ) -> Outputs:
        """(out (B, Hq, Sq, Dv), lse (B, Hq, Sq) or None, max_scores likewise), packed as q is.

        `into`: memory for out. Raises `UnsupportedLayout`.
        """
        plan = self.plan
        made = out, lse, max_scores = outputs(q, plan, into)
        if not q.numel():
            return made
        if self.used_q or not k.numel():  # there may be rows that no kernel computes
            fill_unused_rows(made)
            if not k.numel():
                return made if plan.program.sink is None else self._without_keys(made, q, k, v, captured, sequences)
        self.fill(q, k, v, out, lse, max_scores, scale, captured, scalars, sequences)
        return made

    def fill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        max_scores: torch.Tensor | None,
        scale: float,
        given: Sequence[torch.Tensor],
        numbers: Sequence[float | int],
        lie: Sequences = NO_SEQUENCES,
        borrowed: Borrowed | None = None,
    ) -> None:
        """A call with queries and keys, into memory that is there.

        `given`: what it gives for captured tensors; `lie`: where its sequences do; `borrowed`: of the call, where it is
        not entered.

        Raises `UnsupportedLayout`.
        """
        if q.is_cuda and q.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(q.device):
                self.fill(q, k, v, out, lse, max_scores, scale, given, numbers, lie, borrowed)
            return
        if self.reads_what_is_given:
            reads: Sequence[torch.Tensor] = given
            work = None
        else:
            found = None if self.standing is None else self.standing.find(current() if borrowed is None else borrowed)
            if found is None:
                reads, work = self._read(q, given, numbers, lie, borrowed)
            else:
                reads, (work,) = self.reads.given(given) if self.reads.has_numbers else given, found
        if k.dtype is not self.key_type:  # 8 bits, of which the plan wants 16
            k, v = dequantised(k, v, self.plan.target, self.key_type, self.kernel_of)
        captured, scalars, sequences = tuple(reads) or None, tuple(numbers) or None, None if self.is_dense else lie
        counter, left = self.counted(q) if self.counts else (None, None)
        launch = self.launch_in_range if profiler._is_profiler_enabled else self.launch
        launch(q, k, v, out, lse, max_scores, scale, sequences, work, captured, scalars, counter, left)

    def counted(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A counter, and memory for what shares leave, if there are any."""
        if not self.shares:
            return counter_of(q), None
        plan = self.plan
        left = q.new_empty(plan.left_numbers, dtype=torch.float32)
        return counter_of(q, plan.counters), left

    def _without_keys(
        self,
        made: Outputs,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        captured: Sequence[torch.Tensor],
        sequences: Sequences,
    ) -> Outputs:
        """LSE of rows that have a sink and nothing else; the rest is there."""
        if made[1] is not None:
            alone, program = Program(sink=self.plan.program.sink), self.plan.program
            at_call = dict(zip(program.captures, captured, strict=True))
            sinks = Streaming(DerivedMods(alone, 1.0), (), sequences)
            made[1].copy_(sinks.forward(q, k, v, [at_call[c] for c in alone.captures])[1])
        return made

    def launch(self, *given: Any) -> None:
        """All that the plan launches, in turn; given `ForwardArguments` in their order."""
        run = self._run_parts if self.plan.is_split else self.kernel
        try:
            run(*given)
        except (ValueError, TypeError):
            # strides of sizes 0 and 1 are arbitrary and may offend; others are refused here by name
            run(*tidied(*given))

    def launch_in_range(self, *given: Any) -> None:
        """`launch`, where somebody profiles."""
        with profiler.record_function(range_name("forward", self.plan.program.title, self.plan.target.backend)):
            self.launch(*given)

    def _run_parts(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        max_scores: torch.Tensor | None,
        *others: Any,
    ) -> None:
        """Each of the parts of kv apart, then all in one: 4 bytes * splits * (Dv + 1) of memory per query and head."""
        packed = q.ndim == 3
        by_head = out.transpose(0, 1)[None] if packed else out
        rows = by_head.shape[1 if packed else 0 : -1]
        parts = q.new_empty((self.plan.splits, *rows, out.shape[-1]), dtype=torch.float32)
        part_lse = q.new_empty((self.plan.splits, *rows), dtype=torch.float32)
        if packed:  # rows that no sequence uses get no part
            part_lse.fill_(-torch.inf)
        part_max = None if max_scores is None else torch.full_like(part_lse, -torch.inf)
        self.kernel(q, k, v, parts, part_lse, part_max, *others)
        if max_scores is not None and part_max is not None:
            torch.amax(part_max, 0, out=max_scores)
        if packed:
            parts, part_lse, lse = parts[:, None], part_lse[:, None], None if lse is None else lse[None]
        self.combine(*CombineArguments(parts=parts, part_lse=part_lse, out=by_head, lse=lse))

    def _read(
        self,
        q: torch.Tensor,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences,
        borrowed: Borrowed | None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """What the mods read, and the table of the order of query tiles, up to date."""
        if borrowed is not None:
            with borrowed:
                return self._read(q, captured, scalars, sequences, None)
        with derived_for_graph(self.reads.program.captures, captured):
            moment = None if self.one_run is None else derives_for_itself()
            if self.one_run is not None and moment is not None:
                reads, (work,) = self.one_run(captured, moment)
                return reads, work
            reads = self.reads(captured, scalars, sequences)
            work = None if self.plan.work is None else self._work(q, captured, reads, sequences)
            if self.standing is not None and not derives_anew():
                self.standing.keep((work,))
        return reads, work

    def _work(
        self,
        q: torch.Tensor,
        captured: Sequence[torch.Tensor],
        reads: Sequence[torch.Tensor],
        sequences: Sequences,
    ) -> torch.Tensor:
        plan = self.plan
        assert plan.work is not None
        counts = None if self.reads.lists is None else self.reads.counts(reads)
        rows = q.shape[0] if plan.layout.q == "packed" else None
        return plan.work(sequences, counts, rows, self.reads.at_call(captured))


def tidied(*given: Any) -> ForwardArguments:
    """`ForwardArguments` as bulk copies can read them; raises `UnsupportedLayout`."""
    named = ForwardArguments(*given)
    return named._replace(**{name: readable(getattr(named, name), name) for name in ("q", "k", "v", "out")})


def outputs(q: torch.Tensor, plan: ForwardPlan, into: torch.Tensor | None = None) -> Outputs:
    """What the plan returns for `q`, uninitialised; `into`: memory for out."""
    alike = plan.head_dim_v == plan.head_dim and q.dtype is plan.dtype
    out = into
    if out is None:
        out = memory_like(q) if alike else ordered(q, plan.head_dim_v, plan.dtype)
    lse = of_rows(q) if plan.return_lse else None
    return out, lse, of_rows(q) if plan.return_max_scores else None


def of_rows(q: torch.Tensor) -> torch.Tensor:
    """Memory of a number for each row of `q`: (B, Hq, Sq), packed (Hq, total), fp32."""
    # strides given: 0.9 µs, new_empty takes 1.3 to find out which of its kinds is meant
    return torch.empty_strided(*rows_of(q), dtype=torch.float32, device=q.device)


def rows_of(q: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a number for each row of `q`."""
    if q.ndim == 4:
        batch, heads, length, _ = q.shape
        return (batch, heads, length), (heads * length, length, 1)
    length, heads, _ = q.shape
    return (heads, length), (length, 1)


def form_alone(
    shape: Sequence[int], strides: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A tensor with no memory, to make others like it: `empty_like` takes half of `empty`'s time, or less."""
    found = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    found.untyped_storage().resize_(0)
    return found


def memory_like(t: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory of the shape, the dtype and the order of dimensions of `t`."""
    # 0.9 µs, where new_empty(t.shape) takes 1.7
    if t.is_contiguous():
        return torch.empty_like(t, memory_format=torch.contiguous_format)
    return ordered(t, t.shape[-1])


def fill_unused_rows(made: Outputs) -> None:
    """O 0, LSE and the largest score -inf: what rows get that no kernel computes."""
    out, *statistics = made
    out.zero_()
    for t in statistics:
        if t is not None:
            t.fill_(-torch.inf)


def has_unused_rows(plan: ForwardPlan, k: torch.Tensor) -> bool:
    """Whether there may be rows that no kernel computes."""
    return plan.layout.used_q or not k.numel()
