"""One call of a backend on some rows of a rank: planned as every call is, its mods at global positions."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..analysis.derived import refresh
from ..call.autograd import BackwardInputs, Differentiable, Grads, Results, without_autocast
from ..call.inputs import Inputs
from ..dispatch.contents import check_call
from ..dispatch.plan_cache import planned_of
from ..graph.borrowed import current
from .offset_mods import FIRST_HEAD, FIRST_KV, FIRST_Q, SEQ_LEN, OffsetMods

_numbers = threading.Lock()  # plans look at run-time numbers as they are made


@dataclass(frozen=True)
class Offsets:
    """Where the rows of a call lie: first query and key (0 where tables say it), first head, length of the sequence.

    tables: what the mods read of the call's own rows, see `OffsetMods.tables`.
    """

    first_q: int
    first_kv: int
    seq_len: int
    tables: Mapping[Any, torch.Tensor]
    first_head: int = 0

    def numbers(self) -> dict[Any, int]:
        """The run-time numbers that say where the mods' positions begin."""
        return {FIRST_Q: self.first_q, FIRST_KV: self.first_kv, SEQ_LEN: self.seq_len, FIRST_HEAD: self.first_head}

    def enter(self) -> None:
        """Makes them those of now, which plans look at; under `_numbers`."""
        for scalar, number in self.numbers().items():
            scalar.value = number


@dataclass(frozen=True)
class Begun:
    """A call whose forward is done: what its backward takes.

    read: what the mods read, in the plan's order; of: which of the given tensors each of them is, -1: none.
    """

    call: Differentiable
    offsets: Offsets
    read: tuple[torch.Tensor, ...]
    of: tuple[int, ...]

    def backward(self, known: BackwardInputs) -> Grads:
        """(dq, dk, dv, *d given): `known.captured` and `known.wanted` are of the given tensors."""
        count, given = len(known.captured), known.wanted[3:]
        asked = (*known.wanted[:3], *(n >= 0 and given[n] for n in self.of))
        known = known._replace(captured=self.read, wanted=asked)
        with _numbers:
            self.offsets.enter()  # kernels of the backward are planned when they are first needed
            dq, dk, dv, *found = without_autocast(known.q, self.call.backward, known)
        of_given: list[torch.Tensor | None] = [None] * count
        for n, grad, ask in zip(self.of, found, asked[3:], strict=True):
            if ask and grad is not None:
                had = of_given[n]
                of_given[n] = grad if had is None else had + grad
        return (dq, dk, dv, *of_given)


def forward(
    offset_mods: OffsetMods,
    options: tuple[Any, ...],
    offsets: Offsets,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    given: Sequence[torch.Tensor],
    max_scores: bool,
) -> tuple[Results, Begun]:
    """(out, lse, max_scores) of one call, and what its backward takes."""
    leaves = offset_mods.leaves_of(given, offsets.tables)
    planned, borrowed = planned_of(offset_mods.forms, leaves, options)
    numbers = offsets.numbers()
    with nullcontext() if borrowed is None else borrowed:
        program = planned.program
        with _numbers:
            offsets.enter()
            of_call = Inputs(*inputs)
            prepared = planned.prepared(of_call)
            check_call(program, [], of_call, planned.options.scale)
            values = [numbers.get(s, s.value) for s in program.scalars]
            call = prepared.begin(values, return_max_scores=max_scores)
        call.borrowed = current()
        refresh(program.captures)
        read = tuple(c.tensor for c in program.captures)
        found = without_autocast(inputs[0], call.forward, *inputs, read)
        numbered = {id(t): n for n, t in enumerate(given)}
        return found, Begun(call, offsets, read, tuple(numbered.get(id(t), -1) for t in read))
