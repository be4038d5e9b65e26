"""Fields of a Hopper forward's tiling that hang on the call, whatever blocks it has."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ...primitives.lag import NO_LAG, Lag
from ..fused.target import Target
from ..fused.tiling import invariant_keys
from ..fused.traits import bytes_at_pairs, has_opaque_test, keys, padded, reads_any, reads_by, reads_pairs, sees_at_most
from ..fused.written import Written
from .maxima import lag_of
from .tiling import GUESSING, HopperTiling

# Bytes of K and V of a head up to which heads without a mask come one after the other: their blocks run in step, and
# want less of L2 at a time. D 128: 1k to 8k gain 6 to 2 %, D 64 2k 3 %, 192/128 8k 2 %; of 16 MiB nothing is gained
ONE_HEAD = 8 << 20
# Keys of a row up to which batch-invariant tiles have 64 of them where D is at most 96: windows of 128 to 2,048 reach
# 0.97 to 1.17 of the default by them, 0.74 to 0.91 by tiles of 128 keys
NARROW = 2048
# up to so many keys so many key/value heads of D 128: causal 256 gains 5 %, 512 3; 1024 loses 2 (B 16, 16 heads)
SHORT_TOGETHER = ((256, 16), (512, 32))
PAGE_REGISTERS = 40  # of a thread that copies: page numbers beside what all copies need
# Columns of Q in registers by D and Dv, where there is no score mod. In blocks that stay: D 192 3 to 5 % of 8k with the
# 80 keys that are left room for; D 128 1, 3 and 3 % of causal 1k, 2k and 8k, in blocks that leave 3 % of causal 16k
HELD = {(192, 192): 128, (128, 128): 128, (192, 128): 192}  # 8k causal 1 %; D 256 gains nothing


def tiling_of(problem: Problem, heads: int, kernel: str, lag: Lag | None = None, **chosen: Any) -> HopperTiling:
    """With what hangs on the problem and the kernel alone, and the lag too if none is given."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    return HopperTiling(
        d=d,
        dv=dv,
        kernel=kernel,
        # where maxima are guessed, few tiles look for their own
        lag=NO_LAG if kernel == GUESSING else lag or lag_of(problem),
        l2=32 << 20,
        packed_heads=heads,
        **chosen,
    )


def kernel_of(problem: Problem) -> str:
    return "forward_in_order" if problem.schedule.batch_invariant else "forward"


def heads_together(problem: Problem, program: Program) -> int | None:
    """What is asked for, else one head where all query tiles visit the same keys and these are not too many.

    Short masked calls of D 128 have few as well: others would need their keys again when these have left L2. Not with
    biases at pairs, which heads share: 8 heads of 8k gain 4 % at D 64, 2 at D 128.
    """
    asked = problem.schedule.heads_together
    if asked is not None or not problem.layout.is_dense:
        return asked
    if program.mask is not None:
        widest = max(padded(problem.head_dim), padded(problem.head_dim_v))
        short = next((heads for most, heads in SHORT_TOGETHER if keys(problem) <= most), None)
        return short if widest == 128 else None
    if reads_by(program.score, Pattern.PAIR):
        return None
    kv_bytes = 2 * keys(problem) * (padded(problem.head_dim) + padded(problem.head_dim_v))
    return 1 if kv_bytes <= ONE_HEAD else None


def written(d: int, dv: int, program: Program, guesses: bool) -> Written:
    """How a large block's products are; whole ones compile fastest. Timed on an H200, in turns.

    Anew, what is read at (q, kv) gains 1 to 3 %, and of rows that guess D 128 3 of 8k, D 96 1, D 64 1 to 2 of causal 4k
    and more. ALiBi loses 2 by it, soft caps 3, documents 5, 192/128 6.
    """
    if d > dv:  # 192/128 with no mask loses 1 % by whole ones
        return "by steps"
    if reads_pairs(program.score):
        return "anew"
    # D 64 with no mask loses 2 % anew
    gains = max(d, dv) > 64 or program.mask is not None
    return "anew" if guesses and program.score is None and gains else "whole"


def most_read(widest: int, program: Program) -> int:
    """Keys of a tile beside what a score mod reads at each pair; numbers of 16 bits take half of the registers.

    128 keys of such biases gain 5 % of causal calls at D 64, 9 of full ones, 6 and 5 at D 128; of fp32 they lose 57.
    """
    assert program.score is not None
    halves = widest <= 128 and bytes_at_pairs(program.score) == 2
    return 128 if halves else 96


def keys_in_order(widest: int, program: Program) -> int:
    """Keys of a tile where results are batch-invariant: fewer where constants of the mask leave a row few."""
    return 64 if widest <= 96 and sees_at_most(NARROW, program) else invariant_keys(widest, program)


def with_next_queries(tiling: HopperTiling, target: Target) -> HopperTiling:
    """With two stages of Q, if the block stays and they fit beside its neighbours' memory."""
    if not tiling.separate_o:
        return tiling
    two = dataclasses.replace(tiling, q_stages=2)
    room = target.shared_memory // tiling.blocks - 1024 * (tiling.blocks > 1)
    return two if two.shared_memory(2) <= room else tiling


def keys_by_registers(registers: int, dv: int, program: Program) -> int:
    """Columns that fit: scores in fp32, probabilities in 16 bits, output in fp32, and room for the rest."""
    other = 30 if program.score is None and not reads_any(program.mask) else 36  # values on their way
    if has_opaque_test(program):
        other += 12  # of a test that is no bound: 25 spilled and read again with D 64 and 128 columns
    free = registers - other - dv // 2
    return free * 4 // 3 // 16 * 16
