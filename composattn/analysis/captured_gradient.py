"""How gradients of captured tensors are summed inside a backward kernel: which reads, along which pattern, how large.

The gradient of one read at one pair is P (dP - D) times d score_mod / d read. What the positions of the read change
with (its `Pattern`) says over what a kernel sums before it goes to memory. Sums in memory are 64-bit fixed point:
integers add up to the same bits in any order, so they need no order, no buffer per block and no second pass. The unit
is chosen from a bound of the whole sum (`GradientProgram.bounds`, times the largest numbers of dO and V, which a kernel
finds: `composattn.backends.fused.kernels.around.units`), so a read is fused only where the derivative has one.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ..graph.expr import DEEP, Capture, Dep, DType, Expr, const, walk
from ..graph.gradient import derivative, partials
from ..graph.linear import slopes
from ..graph.philox import factor_of
from .program import Program


class Pattern(enum.Enum):
    """What the positions of a read change with, within a head."""

    HEAD = "one number per head"
    ROW = "by row"
    COLUMN = "by column"
    DISTANCE = "by distance q - kv"
    PAIR = "by pair (q, kv)"


@dataclass(frozen=True)
class FusedRead:
    """One read; `factor` is what dS has to be multiplied by for its gradient, None is 1."""

    leaf: Expr
    pattern: Pattern
    factor: Expr | None
    slope: Expr

    def bound(self, q_len: int, kv_len: int) -> float:
        """The largest |d score_mod / d read| over all pairs."""
        found = bound(self.slope, q_len, kv_len)
        assert found is not None
        return found


def fused_reads(program: Program) -> dict[Capture, tuple[FusedRead, ...]]:
    """The captured tensors whose gradient a kernel can sum, with all their reads."""
    if program.score is None:
        return {}
    slope = derivative(program.score)
    by_tensor: dict[Capture, list[FusedRead | None]] = {}
    for leaf, d in partials(program.score).items():
        if leaf.op == "read":
            by_tensor.setdefault(leaf.attr, []).append(_fused(leaf, d, slope))
    return {c: tuple(r for r in reads if r) for c, reads in by_tensor.items() if None not in reads}


def _fused(leaf: Expr, d: Expr, slope: Expr) -> FusedRead | None:
    pattern = pattern_of(leaf)
    if pattern is None or bound(d, 1, 1) is None or leaf.attr.tensor.numel() >= 2**31:
        return None
    if d is slope:
        return FusedRead(leaf, pattern, None, d)
    # dS = P (dP - D) slope: dividing the slope out again would lose the zeros; the score is gone by then
    if slope is not const(1.0) or d.deps & Dep.SCORE:
        return None
    return FusedRead(leaf, pattern, d, d)


# by whether positions change with q, and with kv
_ALONG = {(False, False): Pattern.HEAD, (True, False): Pattern.ROW, (False, True): Pattern.COLUMN}


def pattern_of(leaf: Expr) -> Pattern | None:
    """The pattern of a read's positions, None where none of them fits."""
    deps = functools.reduce(operator.or_, (a.deps for a in leaf.args), 0)
    if deps & Dep.SCORE:
        return None  # anywhere, and the score is gone when sums are made
    along = bool(deps & Dep.Q), bool(deps & Dep.KV)
    if along != (True, True):
        return _ALONG[along]
    if all(map(follows_distance, leaf.args)):
        return Pattern.DISTANCE
    moves = {(bool(f[0]), bool(f[1])) for a in leaf.args if (f := slopes(a))}
    return Pattern.PAIR if {(True, False), (False, True)} <= moves else None


def follows_distance(node: Expr) -> bool:
    """Whether an integer stays the same along q - kv."""
    if node.depth > DEEP:
        return not node.deps & (Dep.Q | Dep.KV)
    found: dict[Expr, bool] = {}
    for part in walk(node):
        form = slopes(part)
        parts = bool(part.args) and all(found[a] for a in part.args)
        found[part] = parts if form is None else form[0] == -form[1]
    return found[node]


_AT_MOST_ONE = ("tanh", "sigmoid", "sin", "cos", "erf", "sign")


def bound(node: Expr, q_len: int, kv_len: int) -> float | None:
    """A bound of |node| known without any data but the lengths; None where there is none."""
    found: dict[Expr, float | None] = {}
    for part in walk(node):
        found[part] = _bound(part, found, q_len, kv_len)
    return found[node]


def _bound(node: Expr, found: Mapping[Expr, float | None], q_len: int, kv_len: int) -> float | None:
    """That of a node by those of its arguments."""
    if node.is_const:
        return abs(float(node.attr))
    if node.op == "index" and node.attr in ("q", "kv"):
        return float(q_len if node.attr == "q" else kv_len)
    if node.op in _AT_MOST_ONE or node.dtype is DType.BOOL:
        return 1.0
    if node.op not in ("add", "sub", "mul", "neg", "abs", "cast_float", "where", "maximum", "minimum"):
        return None
    parts = [found[a] for a in node.args[int(node.op == "where") :]]
    known = [p for p in parts if p is not None]
    if len(known) < len(parts):
        return None
    if node.op == "mul":
        return known[0] * known[1]
    return sum(known) if node.op in ("add", "sub") else max(known)


class GradientProgram(Program):
    """A program whose backward kernel also sums the gradients of some captured tensors.

    Beside what the mods read, the kernel receives a flat int64 tensor for each of them (`totals`), which it adds
    into, and the number of units in 1 of each (`units`, fp32).
    """

    def __init__(self, program: Program, reads: dict[Capture, tuple[FusedRead, ...]]) -> None:
        super().__init__(program.score, program.mask, keep=program.keep)
        self.forms = program.forms
        self.__dict__["intervals"] = program.intervals
        self.reads = reads
        # placeholders: which tensor stands for them is said at the call
        self.totals = {c: Capture(torch.empty(1, dtype=torch.int64, device="cpu")) for c in reads}
        self.units = Capture(torch.empty(1, dtype=torch.float32, device="cpu"))

    @property
    def content(self) -> dict[str, object]:
        return {**super().content, "reads": tuple(self.reads.values())}

    def bounds(self, rows: int, q_len: int, kv_len: int) -> tuple[float, ...]:
        """How many times the largest |dP - D| each sum over `rows` may be: Σ P = 1 per row.

        Positions are below `q_len` and `kv_len`.
        """
        kept = 1.0 if self.keep is None else factor_of(self.keep)
        slopes = [sum([r.bound(q_len, kv_len) for r in group]) for group in self.reads.values()]
        return tuple([max(slope, 1e-6) * rows * kept for slope in slopes])

    @property
    def made(self) -> tuple[Capture, ...]:
        """What is made for a call, behind all that it captures."""
        return *self.totals.values(), self.units

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        return (*super().captures, *self.made)


def in_numbers(total: torch.Tensor, units: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A sum of units, powers of two, as a gradient of `like`; NaN where the units say that it may not be finite."""
    made = torch.empty(like.shape, dtype=like.dtype, device=total.device)
    # one operation: the quotient is the sum rounded to fp32, and so rounded again where `like` has 16 bits
    torch.div(total, units, out=made.view(-1))
    return made
