"""Deep graphs made shallow: long chains of one logical operation (documents joined in a loop) as trees."""

from __future__ import annotations

from collections import Counter

from .expr import DEEP, DType, Expr, walk
from .ops import apply
from .rebuilt import rebuild


def balanced(expr: Expr) -> Expr:
    """`expr` with its chains as balanced trees if it is deep, else `expr` itself.

    Exact: `&`, `|` and `^` of bools don't mind in which order they are joined.
    """
    if expr.depth <= DEEP:
        return expr
    nodes = list(walk(expr))
    inside = _inside(nodes)
    done: dict[Expr, Expr] = {}
    chains: dict[Expr, list[Expr]] = {}  # what those inside of a longer chain join
    for node in nodes:
        if not _is_logic(node):
            done[node] = rebuild(node, tuple(done[a] for a in node.args)) if node.args else node
            continue
        parts: list[Expr] = []
        for a in node.args:
            more = chains.pop(a) if a in inside else [done[a]]
            parts = parts + more if parts else more
        if node in inside:
            chains[node] = parts
        else:
            done[node] = _tree(node.op, parts)
    return done[expr]


def _inside(nodes: list[Expr]) -> set[Expr]:
    """Operations of logic whose only user is another one of their kind."""
    users = Counter(a for node in nodes for a in node.args)
    return {a for n in nodes if _is_logic(n) for a in n.args if a.op == n.op and users[a] == 1}


def _is_logic(node: Expr) -> bool:
    return node.op in ("and", "or", "xor") and node.dtype is DType.BOOL


def _tree(op: str, parts: list[Expr]) -> Expr:
    while len(parts) > 1:
        joined = [apply(op, x, y) for x, y in zip(parts[::2], parts[1::2], strict=False)]
        parts = joined + parts[len(parts) - len(parts) % 2 :]
    return parts[0]
