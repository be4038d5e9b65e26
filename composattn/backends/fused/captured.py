"""The tensors that a kernel reads for its mods in one call: captured, derived from captured ones, or made for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...analysis.derived import Upkeep, refresh, value_of
from ...analysis.program import Program
from ...call.sequences import NO_SEQUENCES, Sequences
from ...graph.expr import Capture
from .plan import ForwardPlan
from .plan_backward import BackwardPlan


def values(captures: Iterable[Capture], replaced: Mapping[Capture, torch.Tensor]) -> list[torch.Tensor]:
    """What is to be read for `captures`, up to date; `replaced` are tensors in place of captured ones.

    Where other memory is given than the captures hold (compiled code copies its inputs at times), what is derived
    from it is computed anew.
    """
    captures = tuple(captures)
    refresh(captures)
    return [value_of(c, replaced) for c in captures]


class Reads:
    """What the kernel of `plan` reads, in its order (`plan.captured`), in calls of `program`.

    A call gives the tensors and run-time numbers of its program; the kernel may read lists of tiles as well, other
    tensors that are derived from the call's, and what is made for it (sums of gradients).
    """

    def __init__(self, plan: ForwardPlan | BackwardPlan, program: Program) -> None:
        self.program, self.captured, self.lists = program, plan.captured, plan.lists
        at_call = {capture: n for n, capture in enumerate(program.captures)}
        self.places = [at_call.get(capture) for capture in plan.captured]
        self.are_as_given = self.places == list(range(len(program.captures)))
        self.has_numbers = any(rank == 0 for _, rank in plan.captures)
        self.upkeep = Upkeep(plan.captured)
        self.are_given = self.are_as_given and not self.upkeep.derived  # whatever was lent

    def __call__(
        self,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences = NO_SEQUENCES,
        made: Mapping[Capture, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The tensors, up to date; 0-d ones come as one element."""
        if not self.captured:
            return ()
        if self.upkeep.derived:
            self.upkeep()
        found = tuple(captured) if self.are_as_given else self._found(captured, scalars, sequences, made or {})
        return tuple([t if t.ndim else t.reshape(1) for t in found]) if self.has_numbers else found

    def _found(
        self,
        captured: Sequence[torch.Tensor],
        scalars: Sequence[float | int],
        sequences: Sequences,
        made: Mapping[Capture, torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        at_call = dict(zip(self.program.captures, captured, strict=True))
        if self.lists is not None:
            numbers = dict(zip(self.program.scalars, scalars, strict=True))
            listed = self.lists.of_call(at_call, numbers, sequences.queries, sequences.keys)
            made = {**made, **dict(zip(self.lists.captures, listed, strict=True))}
        return tuple(
            captured[n] if n is not None else made[c] if c in made else value_of(c, at_call)
            for c, n in zip(self.captured, self.places, strict=True)
        )

    def counts(self, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of what a call reads, how many tiles each tile visits by the lists, of which there are some."""
        assert self.lists is not None
        return found[self.captured.index(self.lists.captures[0])]
