"""What of a call is of its whole sequences, and means another thing to a part of them."""

from __future__ import annotations

from ....analysis.program import Program
from ....graph.expr import Dep, index, walk


def has_more_than_mods(program: Program) -> str:
    """Why parts of sequences would not be softmaxes of their own, in words; empty where they are."""
    if program.sink is not None:
        return "each part would have the sinks"
    if program.values is not None:
        return "values are multiplied by what belongs to positions of the whole"
    return "" if program.keep is None else "dropout goes by the positions of the whole"


def reads_lengths(program: Program) -> str:
    """Why the score mod would ask for more than a part knows, in words; empty where it reads no lengths."""
    asked = () if program.score is None else walk(program.score)
    lengths = index("q_len"), index("kv_len")
    return "the score mod reads lengths, which are of the whole" if any(node in lengths for node in asked) else ""


def reads_more_than_positions(program: Program) -> str:
    """Why parts of sequences would not know what the mods ask for, in words; empty where they do."""
    why = has_more_than_mods(program)
    if why:
        return why
    mods = [graph for graph in (program.mask, program.score) if graph is not None]
    if any(graph.deps & (Dep.B | Dep.RUNTIME) for graph in mods):
        return "a mod reads tensors, numbers, lengths or the batch, which are of the whole"
    return ""
