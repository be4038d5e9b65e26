"""What kind of call a Hopper backward is: its class, and what of the table's facts no class of other kernels has."""

from __future__ import annotations

import dataclasses

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import CallClass, MaskKind, class_of
from ..fused.tiles.target import Target
from ..fused.tiles.traits import (
    has_costly_test,
    has_opaque_test,
    reads_any,
    reads_by,
    reads_pairs,
    sums_by,
)

KEYS = 128  # of a tile
EXCHANGED = ((160, 160), (192, 128), (192, 192), (256, 256))  # D and Dv for which pairs of blocks exchange dS


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardClass(CallClass):
    """Backward calls that are cut alike.

    `group`: query heads of a key/value head. `ratio`: so many times as many queries as keys, of dense calls.
    `pairs`: a tensor is read at each pair, or a test computes as much, of no wider V than K. `largest`: queries of the
    largest tile for which registers are left; above D 128, where tiles have 64, keys.
    """

    group: int
    ratio: int
    pairs: bool
    largest: int


def backward_class(problem: Problem, program: Program, target: Target, deterministic: bool) -> BackwardClass:
    """The class of a backward whose dQ is summed in any order, or in a fixed one."""
    call = class_of(problem, program, target, "backward", rows=KEYS, deterministic=deterministic)
    facts = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return BackwardClass(
        **facts,
        group=problem.group,
        ratio=problem.q_len // max(1, problem.kv_len) if problem.layout.is_dense else 1,
        pairs=call.d >= call.dv and _at_pairs(program),
        largest=_largest(call, problem, program),
    )


# --- what takes registers: found by compiling -----------------------------------------------------------------------


def reads(program: Program) -> bool:
    """Whether addresses of captured tensors, tests that are no bounds, or the words of dropout take registers.

    A 2-D neighbourhood: 8 bytes of stack, one product after the other; dropout 98 and 76 spills.
    """
    score, mask = program.score, program.mask
    return reads_pairs(score) or reads_pairs(mask) or has_opaque_test(program) or program.keep is not None


def asks(call: CallClass, program: Program) -> bool:
    """Whether whose turn it is does so beside what a mask reads, and no table tells.

    Documents: 8 spills with D 64, with D 128 one product after the other.
    """
    return call.order == "fixed" and reads_any(program.mask) and call.mask not in (MaskKind.DOCUMENTS, MaskKind.WHOLE)


def is_plain(call: CallClass, program: Program) -> bool:
    """Whether nothing does: no score mod, nor any test of more than bounds on indices.

    With D 128 documents, a dilated window: one product after the other; tiles of 64 queries are 1.27 times as fast.
    """
    return program.score is None and not (reads(program) or asks(call, program) or has_costly_test(program.mask))


def _largest(call: CallClass, problem: Problem, program: Program) -> int:
    if call.widest > 128:
        return 2 * 64 if _may_exchange(call, problem, program) else 64
    if call.widest <= 64:
        return 64 if reads(program) or asks(call, program) else 128
    return 80 if call.d == 128 and (call.mask is MaskKind.WHOLE or is_plain(call, program)) else 64


def _may_exchange(call: CallClass, problem: Problem, program: Program) -> bool:
    """Whether pairs of blocks may: at D 256 14 registers spilled beside sums of heads, 10 beside opaque tests, 2 beside
    dropout; 8 beside what a score mod reads of packed sequences.
    """
    packed = problem.layout.q == "packed" and reads_any(program.score)
    spills = has_opaque_test(program) or sums_by(program, Pattern.HEAD) or program.keep is not None
    return (call.d, call.dv) in EXCHANGED and not packed and not (call.d == 256 and spills)


def _at_pairs(program: Program) -> bool:
    """Whether mods read or test at each pair, and no gradients of captured tensors are summed, which registers add."""
    sums = any(sums_by(program, pattern) for pattern in Pattern) or program.keep is not None
    return (has_opaque_test(program) or reads_by(program.score, Pattern.PAIR)) and not sums
