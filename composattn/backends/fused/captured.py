"""The tensors that mods read, as one call has them: its own inputs, and what is derived from them, up to date."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...analysis.derived import refresh, value_of
from ...call.sequences import NO_SEQUENCES, Sequences
from ...graph.expr import Capture
from .plan import ForwardPlan


def values(captures: Iterable[Capture], replaced: Mapping[Capture, torch.Tensor]) -> list[torch.Tensor]:
    """What is to be read for `captures`, up to date; `replaced` are tensors in place of captured ones.

    Where other memory is given than the captures hold (compiled code copies its inputs at times), what is derived
    from it is computed anew.
    """
    captures = tuple(captures)
    refresh(captures)
    return [value_of(c, replaced) for c in captures]


def read_by(
    plan: ForwardPlan,
    captured: Sequence[torch.Tensor],
    scalars: Sequence[float | int],
    sequences: Sequences = NO_SEQUENCES,
) -> list[torch.Tensor]:
    """What the kernel of `plan` reads: the tensors of the mods, and lists of tiles where it has them, up to date."""
    if plan.lists is None:
        return list(captured)
    program = plan.program
    lists = plan.lists.of_call(
        dict(zip(program.captures, captured, strict=True)),
        dict(zip(program.scalars, scalars, strict=True)),
        (sequences.cu_q, sequences.used_q),
        (sequences.cu_k, sequences.used_k),
    )
    return [*captured, *lists]
