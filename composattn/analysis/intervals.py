"""Interval arithmetic of a graph over tiles: what a value can be anywhere in a tile, for all tiles at once.

Every node gets bounds (integers and floats) or the two answers it may give (bools), as tensors that broadcast over
(B, H, query tile, kv tile); a row-only value has one kv tile. Bounds are never too tight:

- int32 arithmetic that leaves 32 bits somewhere in a tile may be anything there (a kernel wraps, the reference does
  not; both are inside), and so may arithmetic that leaves 64 bits. Values that are only read and compared are exact, to
  the ends of int64;
- floats are bounded in fp64 and widened outward after each operation by more than fp32 rounding, and by more than the
  error of fast instructions after a transcendental one; a value that may be NaN says so, and fails every comparison
  but `!=`;
- besides, every integer carries a congruence (value ≡ residue mod step) that holds in all tiles.

Captured tensors are bounded by their minima and maxima over the positions that a tile reads. Where the index is q or kv
itself, these are block reductions. Where it changes with the query tile or the kv tile alone and over one more
dimension, they are range minima; otherwise those of the whole dimension.

Nothing here looks at a value on the host: on a GPU the analysis is a queue of launches, with no synchronisation.
"""

from __future__ import annotations

from collections import Counter

import torch

from ..graph.expr import DType, Expr, walk
from ..graph.linear import INT64, forget
from .interval_reads import read_in_tiles
from .interval_rules import MAY_WRAP, RULES, as_kind, kind_of, unless_wrapped
from .interval_values import Ints, Value, cast, unbounded
from .tile_grid import INT32, Grid


class Tiles(Grid):
    """A grid of tiles, with the bounds of any value in each of them."""

    def value(self, root: Expr) -> Value:
        """Bounds of `root` in every tile."""
        nodes = list(walk(root))
        users = Counter(a for node in nodes for a in node.args)
        values: dict[Expr, Value] = {}
        try:
            for node in nodes:
                values[node] = self._node(node, [values[a] for a in node.args])
                for a in node.args:  # what nobody asks for any more frees its memory
                    users[a] -= 1
                    if not users[a]:
                        values.pop(a, None)
        finally:
            forget()
        return values[root]

    def _node(self, node: Expr, args: list[Value]) -> Value:
        if node.op == "const":
            return self.constant(node.attr, node.dtype)
        if node.op == "index":
            return self.leaf(node.attr)
        if node.op == "scalar":
            return self.constant(self.scalars.get(id(node.attr), node.attr.value), node.dtype)
        if node.op == "size":
            held = node.attr.tensor
            return self.exactly(self.tensors.get(id(held), held).shape[node.args[0].attr])
        if node.op == "read":
            return read_in_tiles(node, args, self)
        if node.op.startswith("cast_"):
            return self._fitted(node, cast(node.op.removeprefix("cast_"), args[0]))
        kind, values = kind_of(node, args), as_kind(node, args)
        is_square = node.op == "mul" and node.args[0] is node.args[1]
        rule = RULES.get(("square" if is_square else node.op, kind))
        result = None if rule is None else rule(*values)
        if rule is None or result is None:
            return unbounded(node.dtype, self.device)
        if kind is Ints and node.op in MAY_WRAP and self._leaves(node, INT64):
            result = unless_wrapped(rule, values, result)
        return self._fitted(node, result)

    def _leaves(self, node: Expr, ends: tuple[int, int]) -> bool:
        """Whether the integer `node` may lie at an end of its type or beyond it: to be looked for in each tile."""
        least, most = self.everywhere.of(node)
        return least <= ends[0] or ends[1] <= most  # what is clamped below has its end there

    def _fitted(self, node: Expr, v: Value) -> Value:
        """An int32 that may have wrapped may be anything."""
        if not isinstance(v, Ints) or node.dtype is not DType.INT32 or not self._leaves(node, INT32):
            return v
        low, high = INT32
        lost = (v.low < low) | (v.high > high)
        return Ints(torch.where(lost, v.low.clamp(max=low), v.low), torch.where(lost, v.high.clamp(min=high), v.high))
