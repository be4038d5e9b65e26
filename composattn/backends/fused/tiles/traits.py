"""The facts of a call that tilings depend on: lengths, and what its mods read and test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from ....analysis.bands import mirrored, residual
from ....analysis.captured_gradient import GradientProgram, Pattern, pattern_of
from ....analysis.program import Program
from ....analysis.tile_lists import Extent
from ....call.problem import Problem
from ....graph.expr import Dep, Expr, Rate, walk

OF_HEADS = {Rate.CONSTANT, Rate.HEAD}  # alike for all pairs of a head


def padded(d: int) -> int:
    """Head dimension on chip: what a copy with at least 64-byte swizzle, as rows or as columns, and a product take."""
    return -(-d // 32) * 32


def reads(graph: Expr | None, rates: Iterable[Rate] = Rate) -> list[Expr]:
    """Reads of tensors, whose positions change so."""
    nodes = () if graph is None else walk(graph)
    return [n for n in nodes if n.op == "read" and n.rate in rates]


def reads_pairs(graph: Expr | None, of_heads: bool = False) -> bool:
    """Whether a tensor is read at (q, kv); `of_heads`: and elsewhere for each head."""
    return any(node.deps & Dep.H or not of_heads for node in reads(graph, (Rate.ELEMENT,)))


def reads_along_keys(graph: Expr | None) -> bool:
    """Whether a tensor is read at each key, of all queries or of each."""
    return bool(reads(graph, (Rate.COLUMN, Rate.ELEMENT)))


def bytes_at_pairs(graph: Expr | None) -> float:
    """Bytes read for each (q, kv) from where it lies; without end where some are read elsewhere, as at distances."""
    found = reads(graph, (Rate.ELEMENT,))
    return sum(n.attr.tensor.element_size() if pattern_of(n) is Pattern.PAIR else math.inf for n in found)


def reads_any(graph: Expr | None) -> bool:
    """Whether a tensor is read at all."""
    return bool(reads(graph))


def depends(graph: Expr | None, on: Dep) -> bool:
    """Whether it has other values where these have."""
    return graph is not None and bool(graph.deps & on)


def has_costly_test(mask: Expr | None) -> bool:
    """Whether a test of the mask reads tensors at a query or a key, or looks at a remainder."""
    return residual(mask).step > 1 or bool(reads(mask, set(Rate) - OF_HEADS))


def has_plain_part(mask: Expr) -> bool:
    """Whether it is a condition on positions, and others, as of causal documents."""
    return any(map(has_plain_part, mask.args)) if mask.op == "and" else not reads_any(mask)


def has_opaque_test(program: Program) -> bool:
    """Whether the mask has a condition on (q, kv) that is no bound on kv."""
    return residual(program.mask).opaque


def bounds_queries(mask: Expr | None) -> bool:
    """Whether bounds on queries say which of them see a key; documents have such, a table of pairs has none."""
    return mask is None or not residual(mirrored(mask)).opaque


def sums_by(program: Program, *patterns: Pattern) -> bool:
    """Whether the kernel sums the gradient of a tensor along such a pattern."""
    groups = program.reads.values() if isinstance(program, GradientProgram) else ()
    return any(read.pattern in patterns for read in itertools.chain(*groups))


def queries(problem: Problem) -> int:
    """Queries of a sequence: packed, the most that any has if that is known, else the average."""
    layout = problem.layout
    return (layout.max_q_len or -(-problem.q_len // problem.batch)) if layout.q == "packed" else problem.q_len


def keys(problem: Problem) -> int:
    """Keys of a sequence, by the rule of `queries`; in pages, as many as the page table has room for."""
    layout = problem.layout
    return (layout.max_kv_len or -(-problem.kv_len // problem.batch)) if layout.kv == "packed" else problem.kv_len


def weighs_keys(program: Program) -> bool:
    """Whether values of 8 bits are multiplied by numbers of their keys, which go into weights behind their sum."""
    return depends(program.values, Dep.KV)


def extent_of(problem: Problem) -> Extent:
    """What lists of tiles are made for: the longest sequence there can be, all rows where nothing else is said."""
    p, layout = problem, problem.layout
    q_len, q_unbounded = _longest(layout.q, p.q_len, layout.max_q_len)
    kv_len, kv_unbounded = _longest(layout.kv, p.kv_len, layout.max_kv_len)
    unbounded = q_unbounded or kv_unbounded
    return Extent(max(1, q_len), max(1, kv_len), p.batch, p.q_heads, p.device, not layout.is_dense, unbounded)


def _longest(lies: str, rows: int, most: int | None) -> tuple[int, bool]:
    """Rows that a sequence has at most, and whether nothing but all rows together says so."""
    packed = lies == "packed"
    return (min(rows, most), False) if packed and most else (rows, packed)
