"""Mods made for another number of heads or sequences than a call has, found from shapes before anything is computed.

In a call of 4 heads a table for 8 would give the first 4 of its heads without a word. A mask made for a batch would
give each microbatch its first sequences. So a dimension that is read at `h` or `b` itself has as many entries as the
call has heads or sequences. Whoever means a part says where it begins (`Mod.shifted`), or computes the index: `table[h
// 2]`, `table[h + first]`. Dimensions that are read at positions may be longer: tables are made for the longest
sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ModShapeMismatch
from ..graph.expr import Expr, walk
from .program import Program
from .symbolic import read_in_words

_CALLED = {"b": "batch entries", "h": "query heads"}


def refuse_other_sizes(program: Program, sizes: Mapping[str, int]) -> None:
    """`sizes`: batch entries ("b") and query heads ("h") of the call. Raises: `ModShapeMismatch`.

    A dimension that is too short is `refuse_short_reads`'s matter, as the mask may hide what it lacks.
    """
    for node in walk(*(mod for mod in program.given[:2] if mod is not None)):
        if node.op == "among" and node.attr is not None:
            axis = axis_of(node.args[0])
            if axis is not None and node.attr != sizes[axis]:
                raise ModShapeMismatch(
                    f"a mod was made for {node.attr} {_CALLED[axis]}, and the call has {sizes[axis]}; make it for "
                    f"{sizes[axis]}, as alibi({sizes[axis]}), {_part(axis)}"
                )
        elif node.op == "read":
            shape = tuple(node.attr.tensor.shape)
            for dim, (index, length) in enumerate(zip(node.args, shape, strict=True)):
                axis = axis_of(index)
                if axis is not None and length > sizes[axis]:
                    raise ModShapeMismatch(
                        f"{read_in_words(node)}, so it has {length} entries for {sizes[axis]} {_CALLED[axis]}; "
                        f"capture those of this call, as tensor[{':, ' * dim}:{sizes[axis]}], {_part(axis)}"
                    )


def axis_of(index: Expr) -> str | None:
    """ "b" or "h", where an index is that itself in any integer type."""
    while index.op in ("cast_int32", "cast_int64"):
        index = index.args[0]
    return index.attr if index.op == "index" and index.attr in _CALLED else None


def _part(axis: str) -> str:
    return f"or say where the call begins in what has more: mod.shifted({axis}=first), 0 included"
