"""Cuts a kernel's instructions into nodes and finds where divergent lanes meet again (immediate post-dominators)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from composattn.emulator.ptx import Instr, PtxKernel

EXIT = -1


@dataclass
class Node:
    """A run of instructions that is executed as one step: plain code, or a single instruction that may block."""

    index: int
    code: list[Instr]
    sync: bool
    branch: Instr | None = None  # the bra or ret that ends it
    taken: int = EXIT
    fall: int = EXIT
    meet: int = EXIT  # where both ways of a divergent branch come together
    short: bool = False  # nothing between the branch and that point may block
    rests: bool = False  # who comes through it waits for what another warp does: it sleeps, or asks memory again

    def successors(self) -> list[int]:
        b = self.branch
        if b is None:
            return [self.fall]
        ends = b.op.split(".")[0] in ("ret", "exit")
        first = EXIT if ends else self.taken
        return [first] if b.guard is None else [first, self.fall]


def _leaves(instr: Instr) -> bool:
    """Whether it may go on elsewhere, or nowhere."""
    return instr.op.split(".")[0] in ("bra", "ret", "exit")


def _starts(kernel: PtxKernel, blocks: Callable[[Instr], bool]) -> list[int]:
    """The first instruction of each node."""
    leaders = {0, *kernel.labels.values()}
    for i, instr in enumerate(kernel.code):
        if _leaves(instr):
            leaders.add(i + 1)
        elif blocks(instr):
            leaders |= {i, i + 1}
    return sorted(s for s in leaders if s < len(kernel.code))


def cut(kernel: PtxKernel, blocks: Callable[[Instr], bool]) -> list[Node]:
    """Nodes in program order; `blocks(instr)` says which instructions stand alone."""
    code = kernel.code
    starts = _starts(kernel, blocks)
    of = {s: n for n, s in enumerate(starts)}
    nodes = []
    for n, (s, end) in enumerate(pairwise([*starts, len(code)])):
        body = code[s:end]
        branch = body[-1] if body and _leaves(body[-1]) else None
        if branch is not None:
            body = body[:-1]
        node = Node(n, body, len(body) == 1 and blocks(body[0]), branch)
        node.fall = n + 1 if n + 1 < len(starts) else EXIT
        if branch is not None and branch.target:
            at = kernel.labels[branch.target]
            node.taken = of.get(at, EXIT)  # of a label behind the last instruction
        nodes.append(node)
    _post_dominators(nodes)
    for node in nodes:
        node.rests = any(_rests(i, node) for i in node.code)
        node.short = node.branch is not None and node.branch.guard is not None and _is_short(nodes, node)
    return nodes


def _rests(instr: Instr, node: Node) -> bool:
    asks = instr.op.startswith("ld.") and ("acquire" in instr.parts or "relaxed" in instr.parts)
    return instr.op.startswith("nanosleep") or (asks and node.taken == node.index)


def _is_short(nodes: list[Node], start: Node) -> bool:
    """Whether every way from a branch to where its ways meet passes nodes that can't block or loop, and none exits."""
    seen: set[int] = {start.meet}
    todo = [n for n in start.successors() if n not in seen]
    while todo:
        n = todo.pop()
        if n == EXIT or nodes[n].sync or n == start.index:
            return False
        if n not in seen:
            seen.add(n)
            todo += nodes[n].successors()
    return start.meet != EXIT and not _has_loop(nodes, seen - {start.meet})


def _has_loop(nodes: list[Node], among: set[int]) -> bool:
    """Whether some of these nodes lead back to themselves: who goes round may wait for what another warp does."""
    while among:
        ends = {n for n in among if not among.intersection(nodes[n].successors())}
        if not ends:
            return True
        among = among - ends
    return False


def _post_order(root: int, after: list[list[int]]) -> list[int]:
    """Numbers that can be reached from `root`, each behind those that are reached from it first."""
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(after[root]))]
    while stack:
        node, rest = stack[-1]
        following = next((other for other in rest if other not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(after[following])))
    return order


def _predecessors(succ: list[list[int]]) -> list[list[int]]:
    """By node, those that it comes behind; the root's are last."""
    pred: list[list[int]] = [[] for _ in range(len(succ) + 1)]
    for i, following in enumerate(succ):
        for s in following:
            pred[s].append(i)
    return pred


def _post_dominators(nodes: list[Node]) -> None:
    """Cooper, Harvey, Kennedy: "A Simple, Fast Dominance Algorithm", on the reversed graph with EXIT as its root."""
    root = len(nodes)
    succ = [[root if s == EXIT else s for s in node.successors()] for node in nodes]
    order = _post_order(root, _predecessors(succ))
    rank = {node: i for i, node in enumerate(order)}  # post-order: the root is last
    idom: dict[int, int] = {root: root}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [s for s in succ[node] if s in idom]
            new = functools.reduce(lambda a, b: _meet(b, a, idom, rank), known) if known else None
            if new is not None and idom.get(node) != new:
                idom[node] = new
                changed = True
    for i, cut_node in enumerate(nodes):
        meet = idom.get(i, root)
        cut_node.meet = EXIT if meet == root else meet


def _meet(a: int, b: int, idom: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = idom[a]
        while rank[b] < rank[a]:
            b = idom[b]
    return a
