"""Which tiling the backward of a call has, by head dimension, and its order."""

from __future__ import annotations

import dataclasses
import math

from ...analysis.captured_gradient import Pattern
from ...analysis.program import Program
from ...call.problem import Problem
from ..fused.planning.backward_heads import SHORT, TOGETHER
from ..fused.planning.coverage import all_are_seen, differ
from ..fused.planning.cut import MANY
from ..fused.tiles.order import queries_of_a_key
from ..fused.tiles.target import Target
from ..fused.tiles.traits import has_opaque_test, padded, reads_any, sums_by
from .backward_keys_apart import KeysApart
from .backward_tiling import ExchangeBackwardTiling, HopperBackwardTiling, PairBackwardTiling


def backward_tiling(problem: Problem, program: Program, target: Target, deterministic: bool) -> HopperBackwardTiling:
    """Tiles of the backward kernel, and their order; `deterministic`: dQ is summed in a fixed order."""
    tiling = _tiles(problem, program, target, deterministic)
    return _in_order(tiling, problem, program, target) if deterministic else tiling


def _in_order(tiling: HopperBackwardTiling, problem: Problem, program: Program, target: Target) -> HopperBackwardTiling:
    """With dQ summed in a fixed order.

    Short tiles of keys come first then, and are soon at other heads of their group than long ones: with 13 key/value
    heads a section (32 on 8, 2k) L2 found little and a call took 1.46 times as long as in any order, with one 1.14.
    The last section fills the multiprocessors, or its longest tiles end alone: 1.05. Few tiles are cut in its place.
    """
    first = tiling.dq_in_bulk and all_are_seen(tiling, problem, program)
    tiling = dataclasses.replace(
        tiling, heads_at_last=0 if differ(problem, program) else None, dq_begins="turn" if first else "before"
    )
    grouped = problem.group > 1 and problem.layout.is_dense and problem.schedule.heads_together is None
    at_once, tiles = target.sms // tiling.sharing, max(1, -(-problem.kv_len // tiling.tile_n))
    if not (tiling.ends_backwards and grouped and problem.batch * problem.kv_heads * tiles > MANY * at_once):
        return tiling
    # a power of 2, as each is another kernel
    at_last = 1 << max(0, round(math.log2(at_once / tiles)))
    return dataclasses.replace(tiling, heads_together=1, heads_at_last=at_last)


def _tiles(problem: Problem, program: Program, target: Target, deterministic: bool) -> HopperBackwardTiling:
    """Of each kernel."""
    d, dv = padded(problem.head_dim), padded(problem.head_dim_v)
    if max(d, dv) > 256:
        return _halves(problem, target)
    if max(d, dv) > 128:
        tiling = _shared_keys(d, dv, problem, target)
        # beside a warp that clears, ptxas moves the sleep of a wait out of the loop; causal ones of D 256 have it there
        clears = problem.layout.is_dense and not deterministic
        if _exchanges(d, dv, problem, program):
            clears = clears and (d == 192 or program.mask is None)
            return dataclasses.replace(
                _exchanged(tiling, problem, program, target), dq_begins="beside" if clears else "before"
            )
        return dataclasses.replace(tiling, dq_begins="beside" if clears and program.mask is None else "before")
    return KeysApart(problem, program, target, deterministic).tiling


def _shared_keys(d: int, dv: int, problem: Problem, target: Target) -> HopperBackwardTiling:
    """dK or dV of 64 keys fill a warpgroup's registers: one has dV, the other one dK."""
    tiling = HopperBackwardTiling(
        kernel="backward_wide", tile_m=64, tile_n=64, d=d, dv=dv, l2=TOGETHER,
        heads_together=problem.schedule.heads_together,
    )  # fmt: skip
    fits = tiling.shared_memory(2) <= target.shared_memory
    return tiling if fits else dataclasses.replace(tiling, do_stages=1)


def _exchanges(d: int, dv: int, problem: Problem, program: Program) -> bool:
    """Whether pairs of blocks exchange dS: at D 256 14 % and more faster than `backward_wide`, at 192/128 and 192 6.

    At D 144 and 160 full calls take 0.64 to 0.98 of the time, causal ones of 2k 0.79 to 0.84 (11 drawn shapes, H200);
    at D 192 short causal ones of grouped heads 0.82 to 0.86. Those of a key/value head each lose 11 to 21 % of up to
    406 tokens, as pairs visit 128 keys. A captured bias of D 256 takes 0.74; beside sums of heads 14 registers spilled
    there, beside opaque tests 10, dropout 2, and 8 beside what a score mod reads of packed sequences.
    """
    if (d, dv) not in ((160, 160), (192, 128), (192, 192), (256, 256)):
        return False
    if problem.layout.q == "packed" and reads_any(program.score):
        return False
    if d == 256:
        return not (has_opaque_test(program) or sums_by(program, Pattern.HEAD) or program.keep is not None)
    many = program.mask is None or problem.group > 1 or queries_of_a_key(problem, program) > SHORT / 4
    return many or dv == 128


def _exchanged(one: HopperBackwardTiling, problem: Problem, program: Program, target: Target) -> ExchangeBackwardTiling:
    """Of a tile of two blocks. With D 256 the other block's K and dS take the place of a second dO.

    Two parts of dQ of 48 columns each are 7 % faster than one at 192/128, 6 to 8 at D 192: the first is added under the
    other's product.

    Where there are two, dV comes later: 2 to 4 %; with one, dO would stay for too long (D 256 loses 2).
    """
    kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    own = {
        "kernel": ExchangeBackwardTiling.kernel,
        "tile_n": 2 * one.tile_n,
        "written": "whole",  # 2 to 4 % of D 256, 0 to 3 of D 192 at 8k
    }
    tilings = (ExchangeBackwardTiling(**kept | own | {"do_stages": stages}) for stages in (2, 1))
    return next(t for t in tilings if t.shared_memory(2) <= target.shared_memory)


def _halves(problem: Problem, target: Target) -> PairBackwardTiling:
    """A block has half of all columns: as for a head dimension of half the size, but for scores that are exchanged."""
    d, dv = (-(-n // 64) * 64 for n in (problem.head_dim, problem.head_dim_v))
    one = _shared_keys(d, dv, problem, target)
    kept = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    own = {"kernel": PairBackwardTiling.kernel}
    tilings = (PairBackwardTiling(**{**kept, **own, "do_stages": stages}) for stages in (2, 1))
    return next(t for t in tilings if t.shared_memory(2) <= target.shared_memory)
