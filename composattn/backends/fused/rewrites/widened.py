"""Integers that a call's positions could take beyond 32 bits, computed in 64.

Positions are int32 in kernels, while torch runs a mod on int64. `(q * 73856093 ^ kv * 19349663) % 100` leaves 32 bits
from position 30 on, so a kernel would see other pairs than torch does. The sizes of a call say where that can happen;
elsewhere, in every mask that only compares positions, nothing changes.

What captured tensors of 32 bits and run-time numbers hold is taken to be no more than positions are (2^29), so that
`q + offset >= kv` stays as it is: sums of larger ones wrap around, as torch's of int32 do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from ....analysis.program import Program
from ....call.problem import Problem
from ....graph.expr import DType, Expr, walk
from ....graph.linear import OF_TYPE, POSITIONS, UNKNOWN, Bounds, Ranges
from ....graph.ops import apply
from ....graph.rebuilt import rebuild
from .posed import Found, Nothing, Posed, Rewritten

_GROWING = ("add", "sub", "neg", "mul", "pow", "lshift", "abs")  # all others stay within their arguments


def in_64_bits(posed: Posed) -> Found:
    """The call with what could leave 32 bits widened."""
    wide = widened(posed.program, posed.problem)
    if wide is posed.program:
        return Nothing()
    return Rewritten(dataclasses.replace(posed, program=wide), "what positions could take beyond 32 bits has 64")


def widened(program: Program, problem: Problem) -> Program:
    """`program` as a call of these sizes computes it; itself where no integer can leave 32 bits."""
    sizes = _Sizes(_leaves(problem))
    mods = [None if mod is None else _widened(mod, sizes) for mod in program.mods]
    return program if all(x is y for x, y in zip(mods, program.mods, strict=True)) else Program(*mods)


def _leaves(problem: Problem) -> Mapping[str, Bounds]:
    q_len, kv_len = problem.q_len, problem.kv_len
    return {
        "b": (0, problem.batch - 1), "h": (0, problem.q_heads - 1), "q": (0, q_len - 1), "kv": (0, kv_len - 1),
        "q_len": (0, q_len), "kv_len": (0, kv_len),
    }  # fmt: skip


def _widened(root: Expr, sizes: Ranges) -> Expr:
    done: dict[Expr, Expr] = {}
    for node in walk(root):
        args = tuple(done[a] for a in node.args)
        if node.op in _GROWING and node.dtype is DType.INT32:
            (low, high), (least, most) = sizes.of(node), OF_TYPE[DType.INT32]
            if low < least or high > most:
                args = (apply("cast_int64", args[0]), *args[1:])
        done[node] = node if all(x is y for x, y in zip(args, node.args, strict=True)) else rebuild(node, args)
    return done[root]


class _Sizes(Ranges):
    """What integers never leave, of operations too that no analysis of a mask follows."""

    def find(self, expr: Expr) -> Bounds:
        found = super().find(expr)
        if expr.dtype is DType.INT32 and expr.op in ("read", "scalar", "cast_int32"):
            return max(found[0], -POSITIONS), min(found[1], POSITIONS)
        if found == UNKNOWN and expr.dtype is DType.INT32 and expr.op not in _GROWING:
            return OF_TYPE[DType.INT32]
        return found

    def rule(self, op: str) -> Callable[..., Bounds | None] | None:
        return _MORE.get(op) or super().rule(op)


def _within(r: Ranges, e: Expr, *args: Expr) -> Bounds:
    """Bounds of a number no further from 0 than the arguments are."""
    furthest = max(max(-low, high) for low, high in map(r.of, args))
    return -furthest, furthest


def _within_bits(r: Ranges, e: Expr, *args: Expr) -> Bounds:
    """Bounds of a number with no more bits than the arguments have."""
    high = _within(r, e, *args)[1]
    if math.isinf(high):
        return UNKNOWN
    bits = int(high).bit_length()
    return -(1 << bits), (1 << bits) - 1


def _power(r: Ranges, e: Expr, x: Expr, y: Expr) -> Bounds:
    furthest = _within(r, e, x)[1]
    if not y.is_const or math.isinf(furthest) or y.attr > 64:
        return UNKNOWN
    return -(furthest**y.attr), furthest**y.attr


def _remainder(r: Ranges, e: Expr, x: Expr, y: Expr) -> Bounds:
    low, high = _within(r, e, y)
    return (0, high) if y.is_const and y.attr > 0 else (low, high)


def _divided(r: Ranges, e: Expr, x: Expr, y: Expr) -> Bounds:
    low, high = _within(r, e, x)
    return low - 1, high  # rounded down


_MORE: dict[str, Callable[..., Bounds | None]] = {
    "and": _within_bits, "or": _within_bits, "xor": _within_bits, "not": _within_bits, "pow": _power,
    "mod": _remainder, "fmod": _within, "floordiv": _divided, "truncdiv": _within, "sign": lambda r, e, x: (-1, 1),
}  # fmt: skip
