"""Maxima of rows on Hopper: which calls guess them, and how far they may lag in others."""

from __future__ import annotations

from collections.abc import Callable

from ...analysis.program import Program
from ...call.problem import Problem
from ...primitives.lag import Lag
from ..fused.traits import is_line, keys, may_pass, padded

# With outliers, errors by sums are 1.00 to 1.01 of those with no lag, by 2^8 whatever sums are 1.06 to 1.13, by 2^3
# 1.02 to 1.04. Of N(0, 1) a warp is rescaled in one tile of 50 and less, in causal calls of 2k in one of 7 to 10; twice
# the share makes half of that, and errors by 0.4 % larger where the output is wide. There sums are noted at doublings:
# scores that deviate by 3 and 6 gain 1 to 4 %; narrow outputs lose 0.4 by it
BY_SUMS, BY_SUMS_WIDE = Lag(8.0, share=1 / 32), Lag(8.0, share=1 / 16, noted="doubled")
BY_SUMS_WIDEST = Lag(8.0, share=1 / 16)  # in shared memory nothing lies under the softmax: D 512 loses 0 to 2 % by it
# Where all tiles run at once D 256 of 2k takes 32.1 µs by 1/64 as by 1/16, whose errors are 1.01 to 1.02 there
BY_SUMS_AT_ONCE = Lag(8.0, share=1 / 64)
ALONE = Lag(3.0)
FEW_KEYS_ALONE = 1024  # up to which noting a row's sums takes 1 to 5 % of a call
# Keys of a query, on average, from which D 128 guesses: of N(0, 1) 4k and 8k gain 7 and 8 %, causal 8k 4, causal 2k, 4k
# and windows of 1,024 nothing; scores that deviate by 3 and 6 lose 3 to 6
MANY_KEYS_GUESSED = 2304
# The same with a score mod: ALiBi gains 10 % of causal 2k, 11 % of 8k
MANY_KEYS_LINE = 1024


def lag_of(problem: Problem, by_sums: Lag | None = None) -> Lag:
    """By sums as asked for, but where rows have few keys or may not depend on others.

    A warp notes sums of all its rows when one is rescaled: a row's bits depend on those beside it.
    """
    few = keys(problem) <= FEW_KEYS_ALONE
    if few or problem.schedule.batch_invariant:
        return ALONE
    return by_sums or (BY_SUMS if problem.head_dim_v <= 128 else BY_SUMS_WIDE)


def rows_guess(problem: Problem, program: Program, heads: int, mean_keys: Callable[[], float]) -> bool:
    """Whether a large block's rows guess their maxima: most tiles need no test, and a softmax is what they wait for.

    Behind score mods that are no lines they wait for its operations and loads (D 64 lost 3 % by a soft cap,
    spilled 48 in the loop by a table), or find tiles hidden (D 128 lost 5 % by `where(q >= kv, score, -1e9)`).
    """
    if program.keep is not None or not problem.layout.is_dense or problem.schedule.batch_invariant:
        return False
    if program.mask is not None and not may_pass(problem, program, heads):
        return False
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    wide = max(d, dv) > 96
    unmasked = program.score is not None and program.mask is None  # ALiBi to both sides rises far
    if unmasked or not is_line(program.score) or (wide and not d == dv == 128):
        return False
    few = MANY_KEYS_GUESSED if wide else 0
    if program.score is not None:
        few = min(few, MANY_KEYS_LINE)
    return few == 0 or mean_keys() > few
