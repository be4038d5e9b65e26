"""What kind of call a Hopper backward is: its class, and the largest tile for which registers are left, by a table."""

from __future__ import annotations

import dataclasses

from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.call_class import BEYOND, CallClass, MaskKind, ModsKind, class_of
from ..fused.tiles.patterns import Pattern, Span, first
from ..fused.tiles.target import Target

KEYS = 128  # of a tile


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
        pairs=call.d >= call.dv and first(PAIRS, call),
        largest=first(LARGEST, call),
    )


# what takes registers was found by compiling
FIXED, WIDE = ("fixed",), Span(128, 256)
READ = ModsKind.PAIRS, ModsKind.LEARNED_PAIRS, ModsKind.DROPOUT  # dropout: 98 and 76 spills
READ_AT_ALL = ModsKind.LINE, ModsKind.OTHER, ModsKind.PAIRS, ModsKind.LEARNED, ModsKind.LEARNED_PAIRS
TESTED = MaskKind.OPAQUE, MaskKind.LISTED  # a 2-D neighbourhood: 8 bytes of stack, one product after the other
# registers go to addresses of captured tensors, tests that are no bounds, or the words of dropout; in a fixed order
# turns are asked for beside what a mask reads, where no table tells: 8 spills with D 64, with D 128 one product after
# the other
TAKING: tuple[Pattern, ...] = ({"mods": READ}, {"mask": TESTED}, {"order": FIXED, "mask": (MaskKind.READ,)})
# With D 128 documents, a dilated window: one product after the other; tiles of 64 queries are 1.27 times as fast
FREE: Pattern = {"mods": (ModsKind.PLAIN,), "mask": (MaskKind.NONE, MaskKind.ENDS, MaskKind.BOUNDS, MaskKind.RUNS)}

# fmt: off
PAIRS: tuple[tuple[bool, Pattern], ...] = (
    (True, {"mods": (ModsKind.PAIRS,)}),
    (False, {"mods": (*READ, ModsKind.LEARNED)}),  # registers add gradients of captured tensors
    (True, {"mask": TESTED}),
    (False, {}),
)

LARGEST: tuple[tuple[int, Pattern], ...] = (
    (64, {"widest": Span(256, BEYOND)}),
    # keys, of which pairs of blocks have 128; 8 spilled beside what a score mod reads of packed sequences
    (64, {"widest": WIDE, "layout": ("packed",), "mods": READ_AT_ALL}),
    # 14 spilled beside sums of heads, 10 beside opaque tests, 2 beside dropout
    (64, {"d": (256,), "mods": (ModsKind.LEARNED, ModsKind.DROPOUT)}),
    (64, {"d": (256,), "mask": TESTED}),
    (128, {"widest": WIDE, "dims": ((160, 160), (192, 128), (192, 192), (256, 256))}),
    (64, {"widest": WIDE}),
    # queries
    *((64, taking | {"widest": Span(0, 64)}) for taking in TAKING),
    (128, {"widest": Span(0, 64)}),
    (80, {"d": (128,), "mask": (MaskKind.WHOLE,)}),
    (80, FREE | {"d": (128,)}),
    (64, {}),
)
# fmt: on
