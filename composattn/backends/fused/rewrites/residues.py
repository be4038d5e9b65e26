"""A call of which queries see only keys of their own residue (`analysis.residues`), as one call for each residue.

Positions of one residue lie `step` rows apart in memory, which copies read as they are: nothing is permuted. Residues
of one length are sequences of one call, as a batch; so a sequence whose length is a multiple of the step is one call,
and its results, in memory ordered as q is, are those of the sequence.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....analysis.program import Program
from ....analysis.residues import of_residue, residues
from ....call.autograd import BackwardInputs, Grads, Results, attend
from ....call.inputs import Asked, Inputs, Outputs
from ....call.problem import Problem
from ....call.sequences import NO_SEQUENCES, Sequences
from ....call.strides import ordered
from ....graph.expr import Capture, Dep, Expr
from ....graph.lent import Lending
from ..tiles.order import keys_of_a_query

if TYPE_CHECKING:
    from ..running.call import FusedCall

LEAST = 128  # queries and keys of a residue: fewer fill no tile
MOST = 4  # calls in place of one: each costs the host as much as a call does
# FLOPs of the forward in visited tiles, of the whole: below it a GPU would wait for the host, which has 15 µs more to
# do forward and 75 with a backward (kernels that do nothing, on a CPU; a whole call takes 3 and 29)
LONG = 2e10

Make = Callable[[Problem, Program, float], "FusedCall"]


class Group(NamedTuple):
    """So many residues from `first` on, with so many queries and keys each."""

    first: int
    residues: int
    q_len: int
    kv_len: int


def prepared(make: Make, problem: Problem, program: Program, scale: float) -> FusedCall | ResidueCall:
    """The call, by residues where the mask and the lengths allow it."""
    step, rest = _step(problem, program)
    if step == 1:
        return make(problem, program, scale)
    return ResidueCall(make, problem, Program(program.score, rest), scale, step)


def _step(problem: Problem, program: Program) -> tuple[int, Expr | None]:
    """How far apart positions of one residue are; 1: the call stays whole.

    It does where a mod reads tensors, numbers, lengths or the batch: these are of the whole sequence.
    """
    whole = 1, program.mask
    if program.mask is None or not problem.layout.is_dense or problem.schedule.batch_invariant:
        return whole
    if program.sink is not None or program.keep is not None:
        return whole
    if any(graph.deps & (Dep.B | Dep.RUNTIME) for graph in (program.mask, program.score) if graph is not None):
        return whole
    step, rest = residues(program.mask)
    few = problem.batch * len(groups(problem, step)) <= MOST
    if not few or min(problem.q_len, problem.kv_len) // step < LEAST:
        return whole
    visited = problem.batch * problem.q_heads * problem.q_len * keys_of_a_query(problem, program)
    return (step, rest) if problem.flops(int(visited)) >= LONG else whole


class ResidueCall:
    """`program` is that of the whole sequence without the term that asks for one residue. Raises as `FusedCall`."""

    def __init__(self, make: Make, problem: Problem, program: Program, scale: float, step: int) -> None:
        self.problem, self.step, self.groups = problem, step, groups(problem, step)
        self.calls = [make(_of(g, problem), _program_of(g, program, step), scale) for g in self.groups]

    @property
    def plan(self) -> str:
        each = "\n".join(f"{g.residues} of {g.q_len} queries and {g.kv_len} keys" for g in self.groups)
        return f"by residues modulo {self.step}, which are sequences of their own: {each}\n{self.calls[0].plan}"

    @property
    def captured_sums(self) -> str:
        return self.calls[0].captured_sums

    def short_way(self, inputs: Inputs) -> None:
        """None: what a short way knows is of one launch."""

    def kernels(self, asked: Asked, gradient: bool) -> list[Any]:
        return [kernel for call in self.calls for kernel in call.kernels(asked, gradient)]

    def __call__(self, inputs: Inputs, asked: Asked) -> Outputs:
        q, k, v, _, _ = inputs
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            self.calls[0].checks_gradient  # noqa: B018  raises where there is none
            return attend(self.begin((), return_max_scores=asked.max_scores), q, k, v)
        found = []
        for b in range(q.shape[0]):
            for group, call in zip(self.groups, self.calls, strict=True):
                of_q, of_k, of_v = self.rows(group, b, q, k, v)
                found.append(call(Inputs(of_q, of_k, of_v), asked))
        return self.whole(q, v.shape[-1], found)

    def begin(
        self, scalars: Sequence[float | int], sequences: Sequences = NO_SEQUENCES, return_max_scores: bool = False
    ) -> ResidueAttend:
        return ResidueAttend(self, return_max_scores)

    def rows(self, group: Group, b: int, q: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        """Those of the group's residues in sequence `b`, as a batch: of q, k, v and what has queries as rows."""
        lengths = (group.q_len, group.kv_len, group.kv_len, *[group.q_len] * len(others))
        return [self.row(group, b, t, length) for t, length in zip((q, *others), lengths, strict=False)]

    def row(self, group: Group, b: int, t: torch.Tensor, length: int) -> torch.Tensor:
        """(residues, H, length, ...) of t (B, H, S, ...)."""
        batch, head, position, *inner = t.stride()
        size = (group.residues, t.shape[1], length, *t.shape[3:])
        start = t.storage_offset() + b * batch + group.first * position
        return t.as_strided(size, (position, head, self.step * position, *inner), start)

    def whole(self, q: torch.Tensor, width: int, found: Sequence[Outputs]) -> Outputs:
        """Results of the groups, of each sequence in turn, as those of all."""
        outs, lses, tops = zip(*found, strict=True)
        return self.results(q, width, outs), self.statistics(q, lses), self.statistics(q, tops)

    def results(self, like: torch.Tensor, width: int, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """(B, H, S, width) of parts (residues, H, length, width), in the order of `like`; one part is not copied."""
        if len(parts) == 1:
            return parts[0].permute(1, 2, 0, 3).reshape(1, parts[0].shape[1], -1, width)
        return self.joined(ordered(like, width), parts)

    def statistics(self, q: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """(B, H, S) of parts (residues, H, length); None of none."""
        there = [part for part in parts if part is not None]
        return self.joined(q.new_empty(q.shape[:-1], dtype=torch.float32), there) if there else None

    def joined(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """`whole`, filled."""
        for n, part in enumerate(parts):
            b, group = divmod(n, len(self.groups))
            self.row(self.groups[group], b, whole, part.shape[2]).copy_(part)
        return whole


class ResidueAttend:
    """One differentiable call: a `Differentiable`."""

    differentiable_twice = False
    captures: Sequence[torch.Tensor] = ()
    sources: Sequence[torch.Tensor] = ()
    sequences = NO_SEQUENCES

    def __init__(self, call: ResidueCall, return_max_scores: bool) -> None:
        self.call = call
        self.begun = [each.begin((), return_max_scores=return_max_scores) for each in call.calls]
        self.lending: Lending | None = None

    def read(self, replaced: Mapping[Capture, torch.Tensor]) -> Sequence[torch.Tensor]:
        return ()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, captured: Sequence[torch.Tensor]) -> Results:
        found = [begun.forward(of_q, of_k, of_v, ()) for begun, (of_q, of_k, of_v) in self._each(q, k, v)]
        out, lse, top = self.call.whole(q, v.shape[-1], found)
        assert lse is not None
        return out, lse, top

    def backward(self, known: BackwardInputs) -> Grads:
        q, k, v, out, lse, dout, dlse, *same = known
        of_rows = (q, k, v, out, lse, dout) if dlse is None else (q, k, v, out, lse, dout, dlse)
        found = []
        for begun, rows in self._each(*of_rows):
            given = rows if dlse is not None else [*rows, None]
            found.append(begun.backward(BackwardInputs(*given, *same)))
        grads = zip((q, k, v), zip(*found, strict=True), strict=True)
        return tuple(None if parts[0] is None else self.call.results(t, t.shape[-1], parts) for t, parts in grads)

    def _each(self, *tensors: torch.Tensor) -> Iterator[tuple[Any, list[torch.Tensor]]]:
        """The calls of each sequence, with their rows."""
        for b in range(tensors[0].shape[0]):
            for group, begun in zip(self.call.groups, self.begun, strict=True):
                yield begun, self.call.rows(group, b, *tensors)


def groups(problem: Problem, step: int) -> list[Group]:
    """Residues of equal lengths: three groups at most, as queries and keys each end somewhere in a round."""
    ends = sorted({0, problem.q_len % step, problem.kv_len % step, step})
    return [
        Group(first, stop - first, _length(problem.q_len, step, first), _length(problem.kv_len, step, first))
        for first, stop in itertools.pairwise(ends)
    ]


def _length(length: int, step: int, residue: int) -> int:
    """Positions below `length` with this residue."""
    return (length - residue + step - 1) // step


def _of(group: Group, problem: Problem) -> Problem:
    return dataclasses.replace(problem, batch=group.residues, q_len=group.q_len, kv_len=group.kv_len)


def _program_of(group: Group, program: Program, step: int) -> Program:
    mods = program.score, program.mask
    return Program(*(None if graph is None else of_residue(graph, step, group.first) for graph in mods))
