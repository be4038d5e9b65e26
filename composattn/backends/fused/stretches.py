"""Stretches of rows that see only each other, as documents do: tiles begin with them, as with packed sequences.

Where no row before a place sees a key behind it, and none behind it sees one before, the mask falls apart there,
whatever it was made of. A mask of ids is told apart so on the device, by its contents: ids that come again later join
all between. Results never depend on it: a mask that does not fall apart is one stretch, whose tiles are as ever.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...analysis.derived import Derived, derive
from ...analysis.program import Program
from ...call.problem import Problem
from ...graph.evaluate import Env, evaluate_all
from ...graph.expr import Capture, Dep, Expr, inputs

# Rows of a stretch that is told from its neighbours if these are shorter: of short ones several share a tile. None
# ends before so many, as copies of an output's rows that end with a stretch need as many above them.
SHORT = 128
LONG = 4096  # Rows of sequences above which they are looked for; of fewer none was timed
MOST = 512  # as many stretches of a sequence as if they had so many rows each, but 8 at least; of more there is one


def stretches_of(problem: Problem, program: Program) -> Derived | None:
    """int32 (B, stretches, 2) of [start, stop), the unused ones empty, behind the others; None where no tensor says."""
    limits = program.limits
    if limits is None or not problem.layout.is_dense or not LONG < problem.q_len == problem.kv_len:
        return None
    ends = limits.begin, limits.end
    captures, scalars = inputs(*ends)
    if not captures or scalars or any(end.deps & (Dep.H | Dep.KV) for end in ends):
        return None
    name: Hashable = ("stretches", *ends, problem.batch, problem.q_len)
    return derive(name, _Recipe(ends, captures, problem.batch, problem.q_len), *captures)


def most_stretches(length: int) -> int:
    """Of a sequence."""
    return max(8, length // MOST)


def most_tiles(length: int, tile: int) -> int:
    """Of all stretches of a sequence."""
    return (length + most_stretches(length) * (tile - 1)) // tile


class _Recipe:
    """The table, from the captured tensors that say which keys a row sees."""

    def __init__(
        self, ends: tuple[Expr, Expr], captures: tuple[Capture, ...], batch: int, length: int
    ) -> None:
        self.ends, self.captures, self.batch, self.length = ends, captures, batch, length

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        n, device = self.length, tensors[0].device
        b = torch.arange(self.batch, device=device)[:, None] if self._by_sequence else 0
        index = {"b": b, "h": 0, "q": torch.arange(n, device=device)[None], "q_len": n, "kv_len": n}
        read = {id(c.tensor): t for c, t in zip(self.captures, tensors, strict=True)}
        found = evaluate_all(list(self.ends), Env(index=index, device=device, tensors=read))
        begin, end = (e.clamp(0, n) for e in found)
        seen = end > begin
        begin, end = begin.masked_fill(~seen, n).expand(-1, n), end.masked_fill(~seen, 0).expand(-1, n)
        return table(begin, end).expand(self.batch, -1, -1).to(torch.int32)

    @property
    def _by_sequence(self) -> bool:
        return any(end.deps & Dep.B for end in self.ends)


def table(begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """(B, stretches, 2) of the keys [begin, end) that each row sees, (B, S); of a row that sees none, S and 0."""
    n, most = begin.shape[-1], most_stretches(begin.shape[-1])
    row = torch.arange(n, device=begin.device)
    begins_here = _least_from(begin) >= row
    begins_here[:, 1:] &= end.cummax(-1).values[:, :-1] <= row[1:]
    # each place where one may begin, with the rows up to the one before and behind it
    before = torch.where(begins_here, row, 0).cummax(-1).values.roll(1, -1)
    behind = _least_from(torch.where(begins_here, row, n)).roll(-1, -1)
    behind[:, -1] = n
    begins_here &= ((row - before >= SHORT) | (behind - row >= SHORT)) & (row >= SHORT)
    number = begins_here.cumsum(-1)
    number = torch.where(begins_here & (number[:, -1:] < most), number, most)
    start = torch.full((len(begin), most + 1), n, dtype=row.dtype, device=row.device)
    start = start.scatter(1, number, row.expand_as(number))
    start[:, 0], start[:, most] = 0, n
    return torch.stack([start[:, :-1], start[:, 1:]], 2)


def _least_from(values: torch.Tensor) -> torch.Tensor:
    """The smallest of each value and those behind it."""
    return values.flip(-1).cummin(-1).values.flip(-1)
