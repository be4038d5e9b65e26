"""A graph with parts of it replaced: nodes are never changed, what is above a replaced one is built anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .expr import Expr, read, walk
from .ops import apply


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """`node` with other arguments, retyped by its row."""
    if node.op == "read":
        return read(node.attr, args)
    if node.op == "size":
        return node
    return apply(node.op, *args, attr=node.attr) if args else node


def transform(root: Expr, leaf: Callable[[Expr], Expr | None]) -> Expr:
    """`root` with every node for which `leaf` gives a replacement replaced, and its users rebuilt."""
    done: dict[int, Expr] = {}
    for node in walk(root):
        new = leaf(node)
        if new is None:
            args = tuple(done[id(a)] for a in node.args)
            new = node if all(x is y for x, y in zip(args, node.args, strict=True)) else rebuild(node, args)
        done[id(node)] = new
    return done[id(root)]


def substitute(root: Expr, replacements: Mapping[Expr, Expr]) -> Expr:
    """`root` with leaves replaced, e.g. `{score(): other}`."""
    return transform(root, replacements.get)
