"""What of a call is of its whole sequences, and means another thing to a part of them."""

from __future__ import annotations

from ....analysis.program import Program
from ....graph.expr import Dep


def reads_more_than_positions(program: Program) -> str:
    """Why parts of sequences would not know what the mods ask for, in words; empty where they do."""
    if program.sink is not None:
        return "each part would have the sinks"
    if program.keep is not None:
        return "dropout goes by the positions of the whole"
    mods = [graph for graph in (program.mask, program.score) if graph is not None]
    if any(graph.deps & (Dep.B | Dep.RUNTIME) for graph in mods):
        return "a mod reads tensors, numbers, lengths or the batch, which are of the whole"
    return ""
