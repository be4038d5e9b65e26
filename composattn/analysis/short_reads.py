"""Captured tensors that are too short for a call, found from shapes before anything is computed.

Kernels clamp what is read outside of a tensor, at no cost and with no error: a table for 2 heads would serve 4 without
a word. Most such mistakes show in shapes alone: an index stands for a dimension that is shorter than the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..errors import CapturedIndexOutOfRange
from ..graph.expr import Expr
from .cuda_graphs import refuse_in_graph
from .program import Program
from .symbolic import read_in_words
from .tiles import FULL, PARTIAL, settled_tiles, tiles

_CALLED = {"b": "batch", "h": "query heads", "q": "queries", "kv": "keys"}
_COARSE = 1024  # tiles of the analysis; bounds of b and h are exact in tiles of any size
_AT_ONCE = 2**22  # pairs of a tile, which are looked at together


def refuse_short_reads(program: Program, sizes: Mapping[str, int], device: torch.device) -> bool:
    """Looks at `tensor[..., h, ...]` and the like where `sizes` (of b, h, q, kv, as far as known) exceed the shape.

    A read in a branch of `torch.where` is taken to be guarded, one at pairs that the mask hides is never looked at.
    Returns whether the mask was asked what it hides: then other contents may say otherwise.

    Raises: `CapturedIndexOutOfRange`.
    """
    asked = False
    for root in (program.mask, program.score):
        for node in () if root is None else _unguarded_reads(root):
            shape = tuple(node.attr.tensor.shape)
            for index, length in zip(node.args, shape, strict=True):
                if index.op != "index" or length >= sizes.get(index.attr, 0):
                    continue
                asked = True
                if _sees(program.mask, index.attr, length, sizes, device):
                    raise CapturedIndexOutOfRange(
                        f"{read_in_words(node)}, and the call has {sizes[index.attr]} for {_CALLED[index.attr]}; "
                        "make the tensor larger, clamp the index, or hide those pairs with the mask"
                    )
    return asked


def positions_of(root: Expr, most: int) -> tuple[int, int]:
    """(queries, keys), `most` of each at most, up to which every captured tensor has an entry."""
    found = {"q": most, "kv": most}
    for node in _unguarded_reads(root):
        for index, length in zip(node.args, node.attr.tensor.shape, strict=True):
            if index.op == "index" and index.attr in found:
                found[index.attr] = min(found[index.attr], length)
    return found["q"], found["kv"]


def _unguarded_reads(root: Expr) -> Iterator[Expr]:
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        if node.op == "read":
            yield node
        for argument in node.args[:1] if node.op == "where" else node.args:
            if argument not in seen:
                seen.add(argument)
                stack.append(argument)


def _sees(mask: Expr | None, name: str, first: int, sizes: Mapping[str, int], device: torch.device) -> bool:
    """Whether the mask leaves a pair visible where index `name` is `first` or more."""
    if mask is None or not {"q", "kv"} <= sizes.keys():
        return True
    refuse_in_graph(
        "whether a mask hides what a captured tensor is too short for is looked at in the first call",
        "call once before the capture, with the same tensors",
    )
    # of queries or keys the second tile begins at `first`
    axis = list(_CALLED).index(name)
    other = min(_COARSE, max(1, _AT_ONCE // first))
    tile = (first if name == "q" else other), (first if name == "kv" else other)
    kinds = tiles(mask, sizes["q"], sizes["kv"], tile, sizes["b"], sizes["h"], device=device)
    kinds = kinds.expand(sizes["b"], sizes["h"], -1, -1)
    beyond = kinds.movedim(axis, 0)[first if axis < 2 else 1 :]
    if axis < 2 or not bool((beyond == PARTIAL).any()) or bool((beyond == FULL).any()):
        return bool(beyond.any())
    where = (kinds == PARTIAL).nonzero()
    where = where[where[:, axis] > 0]
    settled = settled_tiles(mask, where, sizes["q"], sizes["kv"], tile, device)
    return any(bool(found.any()) for _, found in settled)
