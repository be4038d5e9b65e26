"""Passes that a kernel is compiled without: they would find nothing in it, and look for 0.1 s of a forward's 1.

All recorded kernels have the same PTX with them and without, but where tiles are found by a division in a loop.
"""

from __future__ import annotations

from ....graph.expr import walk
from ..planning.plan import Plan

DIVIDING = ("floordiv", "truncdiv", "mod", "fmod")


def switches(plan: Plan) -> str:
    """Options of the kernel language's sequence of passes, for the kernel of `plan`."""
    left_out = ["nvgpu-optimization"] if divides(plan) else ["nvgpu-optimization", "strength-reduction"]
    return " ".join(f"use-{name}-pass=false" for name in left_out)


def divides(plan: Plan) -> bool:
    """Whether positions may be divided in a loop: by the size of a page, or by the mods."""
    layout, program = getattr(plan, "layout", None), getattr(plan, "program", None)
    roots = () if program is None else tuple(mod for mod in program.mods if mod is not None)
    return (layout is not None and layout.kv == "paged") or any(node.op in DIVIDING for node in walk(*roots))
