"""The backward kernels, compiled with no GPU: they fit, spill nothing, and their products stay asynchronous."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from benchmarks.model.loops import inner_loops
from benchmarks.model.sass import SassInstruction, instructions
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import _run_compiler, compile_offline
from composattn.backends.fused.compiling.inspect import Artifact
from composattn.backends.fused.kernels.around import preprocess
from composattn.backends.fused.planning.plan_backward import BackwardPlans, plan_backward
from composattn.backends.fused.running.gradient import FusedGradient
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.backward_tiling import HopperBackwardTiling
from composattn.call.problem import DENSE, Layout, Problem
from composattn.mods import causal, document, neighborhood, prefix_lm, sliding_window
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from composattn.primitives.q_tiles import QueryRun, query_runs
from tests.support import sampled

SLOPES = torch.rand(4)
BIAS = torch.rand(4, 600)
DOCUMENT = torch.arange(8) // 3
LENGTH = 220  # of which D 64 has tiles of 128 queries, and D 128 a last one of 64

# where a kernel that is emulated too has these mods it has them in the same words, so that both compile once
MODS = {
    "plain-full": (None, None),
    "plain-causal": (None, lambda b, h, q, kv: q >= kv),
    "alibi-causal": (lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q), lambda b, h, q, kv: q >= kv),
    "softcap-causal": (lambda score, b, h, q, kv: 5.0 * torch.tanh(score / 5.0), lambda b, h, q, kv: q >= kv),
    "document": (None, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv]),
    "relative-full": (lambda score, b, h, q, kv: score + BIAS[h, q - kv + 300], None),
}


IDS, OFFSETS = (torch.arange(LENGTH) // 70).to(torch.int32), torch.tensor([0, 100, 170, LENGTH], dtype=torch.int32)
READING = {
    "causal-documents": (None, lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv)),
    "documents-by-offsets": (None, document(offsets=OFFSETS) & causal()),
    "dilated": (None, lambda b, h, q, kv: (q >= kv) & ((q - kv) % 4 == 0)),
    "prefix": (None, prefix_lm(100)),
    "window": (None, causal() & sliding_window(50)),
}
AHEAD = {"keys-ahead": (None, lambda b, h, q, kv: q <= kv)}


def retiled(tiling: HopperBackwardTiling, changes: dict[str, Any]) -> HopperBackwardTiling:
    """The tiling with these changes; with another kernel it is none of pairs."""
    if "kernel" not in changes:
        return dataclasses.replace(tiling, **changes)
    return HopperBackwardTiling(**{f.name: getattr(tiling, f.name) for f in dataclasses.fields(tiling)} | changes)


def plans(
    mods: str,
    d: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    dv: int | None = None,
    deterministic: bool = False,
    packed: bool = False,
    length: int = LENGTH,
    **changes: Any,
) -> BackwardPlans:
    score, mask = (MODS | READING | AHEAD)[mods]
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
    layout = Layout("packed", "packed", used_q=True, used_kv=True) if packed else DENSE
    problem = Problem(1, 4, 2, length, length, d, dv or d, dtype, torch.device("cpu"), layout=layout)
    planned = plan_backward(problem, program, HOPPER, deterministic=deterministic)
    if not changes:
        return planned
    tiling = retiled(planned.main.tiling, changes)
    return plan_backward(problem, program, HOPPER, deterministic=deterministic, tiling=tiling)


# by lists of tiles
OPAQUE = {"grid": (None, neighborhood((15, 20), (3, 5)))}
MODS |= OPAQUE

CASES = [(m, d) for m in MODS for d in (64, 128)] + [("plain-causal", 32), ("plain-causal", 96)]
# at D 128 too, where registers are fewer
ROOMY = [("alibi-causal", 64), ("softcap-causal", 64), ("document", 64), ("relative-full", 64)]
PACKED = [("plain-full", 128), ("plain-causal", 64), ("alibi-causal", 128), ("relative-full", 256)]
WIDE = [("document", 224), ("plain-causal", 512), ("alibi-causal", 512)]
SELDOM_WIDE = [("document", 320), ("softcap-causal", 512)]  # fewer columns, fewer registers than ALiBi's


@pytest.mark.parametrize(
    ("mods", "d"),
    [pytest.param(m, d, id=f"{m}-d{d}", marks=[pytest.mark.slow] if (m, d) in ROOMY else []) for m, d in CASES],
)
def test_main_kernel_spills_nothing_and_overlaps(mods: str, d: int, folder: Path) -> None:
    plan = plans(mods, d).main
    made: Artifact = compile_offline(plan, folder)
    # the loop over tiles of keys, not that over queries
    around = {("relative-full", 128): 2, ("softcap-causal", 128): 14}.get((mods, d), 0)
    assert made.shared_memory <= HOPPER.shared_memory
    if made.stack is not None:
        assert made.stack <= 4 * around
    if made.mnemonics:
        t = plan.tiling
        # a tile later dK stands in a branch with dQ and in one without, and the last dQ comes behind the loop
        dk = dq = 1 + t.dq_later
        products = t.d // 16 + t.dv // 16 + (1 + dk) * (t.tile_m // 16) + dq * (t.tile_n // 16)
        assert made.mnemonics["HGMMA"] == products
        assert made.spills is not None and made.spills <= around
        assert not any(loop["LDL"] + loop["STL"] for loop in loops_over_queries(made))
        # an arrive a product and at most seven waits; a compiler that gives up overlapping waits after each
        assert made.mnemonics["WARPGROUP"] <= 14
        additions = (not t.dq_in_bulk) * dq * t.tile_m * t.d // (4 * 128 * t.warpgroups)
        assert made.mnemonics["REDG"] == additions + t.clears  # who clears dQ says so


@pytest.mark.parametrize("d", [64, 128])
def test_warpgroups_meet_nowhere_in_the_loop(d: int, folder: Path) -> None:
    """Each would wait for the other's dS with its products done, and the loads' waits would sleep: up to 8 % each."""
    made = compile_offline(plans("plain-causal", d).main, folder)
    if made.assembly:
        (loop,) = loops_over_queries(made)
        assert loop["HGMMA"] > 0 and loop["BAR"] == loop["NANOSLEEP"] == 0


ADDS = "REDG.E.ADD.F32x4"


@pytest.mark.parametrize(("mods", "d"), [("plain-causal", 64), ("alibi-causal", 128)])
def test_dq_is_added_while_dk_runs(mods: str, d: int, folder: Path) -> None:
    plan = plans(mods, d).main
    made = compile_offline(plan, folder)
    kinds = [i.text.split(" ;")[0] for i in instructions(made) if i.text.startswith((ADDS, "WARPGROUP.DEPBAR"))]
    if kinds:
        first = next(n for n, text in enumerate(kinds) if text.startswith(ADDS))
        additions = plan.tiling.tile_m * d // 1024
        assert "0x1" in kinds[first - 1] and "0x0" in kinds[first + additions]


@pytest.mark.parametrize(
    ("mods", "d", "length", "queries"),
    [
        ("plain-full", 128, 8192, 80),
        ("plain-causal", 128, 8192, 80),
        ("plain-causal", 128, 32768, 80),  # in blocks that leave
        ("plain-causal", 128, 2048, 80),  # claimed
    ],
)
def test_dq_of_long_calls_leaves_in_bulk(mods: str, d: int, length: int, queries: int, folder: Path) -> None:
    plan = plans(mods, d, length=length).main
    made = compile_offline(plan, folder)
    t = plan.tiling
    assert (t.tile_m, t.dq_in_bulk, t.persistent) == (queries, True, length < 32768)
    assert made.shared_memory <= HOPPER.shared_memory
    if made.assembly:
        loops = loops_over_queries(made)
        loop = max(loops, key=lambda found: found["MUFU"])
        assert made.spills == 0 and not any(found["LDL"] + found["STL"] for found in loops)
        assert made.mnemonics["WARPGROUP"] <= 14 and len(loops) <= 1
        assert made.mnemonics["REDG"] == t.clears and made.mnemonics["UBLKRED"] == 1
        assert made.mnemonics["UBLKCP"] == (t.claimed_parts > 0) != t.clears
        assert loop["STS"] == queries * d // 2 // (4 * 128)  # 16 bytes each
        assert loop["BAR"] == loop["NANOSLEEP"] == 0


def events(code: Iterable[SassInstruction]) -> list[str]:
    """Products, exponentials, reads of shared memory, fences, waits until one product may run or none ("all") does."""
    found = []
    for i in code:
        if i.name == "WARPGROUP" and "DEPBAR" in i.text:
            found.append("one" if "0x1" in i.text else "all")
        elif i.name in ("HGMMA", "LDS", "FENCE"):
            found.append(i.name)
        elif i.text.startswith("MUFU.EX2"):
            found.append("exp")
    return found


def loops_over_queries(made: Artifact) -> list[Counter[str]]:
    return [loop.counts for loop in inner_loops(instructions(made)) if loop.multiplies]


@pytest.mark.parametrize(("mods", "d"), [*WIDE, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM_WIDE)])
def test_wide_kernel_spills_nothing_and_overlaps(mods: str, d: int, folder: Path) -> None:
    plan = plans(mods, d).main
    made = compile_offline(plan, folder)
    assert plan.step == ("backward_pair" if d > 256 else "backward_wide")
    assert made.shared_memory <= HOPPER.shared_memory
    if made.stack is not None:
        assert made.stack == 0
    if made.mnemonics:
        t = plan.tiling.of_block if d > 256 else plan.tiling
        # of each side: scores, its sum, its half of dQ
        assert made.mnemonics["HGMMA"] == t.d // 16 + t.dv // 16 + 2 * (t.tile_m // 16) + 2 * (t.tile_n // 16)
        assert made.spills == 0
        assert made.mnemonics["WARPGROUP"] <= 14
        assert made.mnemonics["REDG"] == t.tile_m * t.d // (4 * 128) + t.clears


def check_order(side: list[str], tiling: HopperBackwardTiling) -> None:
    """A side of a pair reads statistics before scores start, and computes P beside dV where dV comes later."""
    first = side.index("HGMMA")
    assert side[:first].count("LDS") == tiling.tile_m // 8  # of 2 rows each
    if "exp" not in side:
        return
    exponentials = side.index("exp")
    assert ("one" in side[first:exponentials]) is tiling.dv_later
    until = side.index("all" if tiling.dv_later else "HGMMA", exponentials)
    assert side[exponentials:until].count("exp") == side.count("exp")


EXCHANGED = [
    ("plain-full", 256, 256),
    ("plain-causal", 256, 256),
    ("softcap-causal", 256, 256),
    ("plain-full", 192, 128),
    ("plain-causal", 192, 128),
    ("document", 256, 256),
    ("alibi-causal", 192, 192),
]
SELDOM_EXCHANGED = [
    ("document", 192, 192),
    ("relative-full", 160, 160),
    ("alibi-causal", 256, 256),
    ("relative-full", 256, 256),
    ("softcap-causal", 192, 128),
    ("alibi-causal", 192, 128),
]


@pytest.mark.parametrize("in_order", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["any-order", "in-order"])
@pytest.mark.parametrize(
    ("mods", "d", "dv"), [*EXCHANGED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM_EXCHANGED)]
)
def test_pairs_that_exchange_gradients_spill_nothing_and_overlap(
    mods: str, d: int, dv: int, in_order: bool, folder: Path
) -> None:
    plan = plans(mods, d, dv=dv, deterministic=in_order).main
    made = compile_offline(plan, folder)
    t = plan.tiling
    assert (plan.step, t.sharing, t.tile_n) == ("backward_exchange", 2, 128)
    assert made.shared_memory <= HOPPER.shared_memory
    if made.stack is not None:
        assert made.stack == 0
    if made.mnemonics:
        halves = [2 if columns > 192 else 1 for columns in (d, dv)]  # no product takes 256 columns
        parts = d // 2 // t.part_columns
        sums = sum(halves) + t.dv_later  # dV of the last tile behind the loop
        assert made.mnemonics["HGMMA"] == (d + dv) // 16 + sums * (t.tile_m // 16) + parts * (t.tile_n // 16)
        assert made.spills == 0
        # an arrive a product, and a wait: a compiler that gives up overlapping waits after each
        assert made.mnemonics["WARPGROUP"] <= 8 + 2 * t.dv_later + 3 * parts
        assert made.mnemonics["REDG"] == t.tile_m * d // 2 // (4 * 128) + t.clears + in_order  # who has added
        loops = loops_over_queries(made)
        assert not any(loop["BAR"] + loop["NANOSLEEP"] for loop in loops)
        # dS goes to the other block in one copy of a warp, not in stores of each thread
        assert made.ptx.count("cp.async.bulk.shared::cluster.shared::cta") == 1
        sides = [
            events(loop.body) for loop in inner_loops(instructions(made)) if loop.multiplies and loop.counts["LDS"]
        ]
        assert len(sides) == 2 and [side.count("FENCE") for side in sides] in ([0, 1], [1, 0])
        for side in sides if mods != "softcap-causal" else ():  # whose tanh leaves no registers for it
            check_order(side, t)
        # who tells the other block does not wait for its additions to memory; in a fixed order one warp does for all
        waiting = [loop for loop in inner_loops(instructions(made)) if loop.multiplies or not in_order]
        assert not any("MEMBAR.ALL.GPU" in i.text for loop in waiting for i in loop.body)


@pytest.mark.parametrize(
    ("mods", "d", "dv", "deterministic"),
    [("plain-full", 192, 192, False), ("plain-causal", 192, 192, False), ("plain-full", 192, 128, False),
     ("plain-full", 256, 256, False), ("plain-causal", 256, 256, False), ("plain-causal", 192, 192, True)],
)  # fmt: skip
def test_no_wait_of_wide_kernels_sleeps_in_the_loop(
    mods: str, d: int, dv: int, deterministic: bool, folder: Path
) -> None:
    """ptxas puts the NANOSLEEP of all waits into the loop over queries, or of none: 3 to 4 % at D 192 and 256."""
    made = compile_offline(plans(mods, d, dv=dv, deterministic=deterministic).main, folder)
    assert made.spills in (0, None)
    assert not any(loop["NANOSLEEP"] for loop in loops_over_queries(made))


def test_a_soft_cap_is_a_polynomial_where_scores_are_near(folder: Path) -> None:
    """Two of three exponentials an element are gone there, and P is computed while dP runs."""
    made = compile_offline(plans("softcap-causal", 128).main, folder)
    if made.mnemonics:
        elements = 64 * 128 // 256
        (loop,) = loops_over_queries(made)
        assert loop["MUFU"] <= 4 * elements


@pytest.mark.parametrize(("mods", "d", "length"), [("plain-full", 128, 32768), ("plain-causal", 96, 1024)])
def test_products_that_hold_keys_overlap_and_read_the_others_from_shared_memory(
    mods: str, d: int, length: int, folder: Path
) -> None:
    plan = plans(mods, d, length=length).main
    assert plan.tiling.resident_v
    without = dataclasses.replace(plan, tiling=dataclasses.replace(plan.tiling, resident=0))
    made, other = compile_offline(plan, folder), compile_offline(without, folder)
    assert made.spills == other.spills == 0
    assert made.mnemonics["WARPGROUP"] == other.mnemonics["WARPGROUP"]
    assert made.mnemonics["LDSM"] > other.mnemonics["LDSM"] and made.mnemonics["HGMMA"] == other.mnemonics["HGMMA"]


@pytest.mark.parametrize("mods", ["plain-full", *OPAQUE])
def test_blocks_that_stay_in_a_fixed_order_draw_their_tiles_in_one_place(mods: str, folder: Path) -> None:
    """Drawn in two, the loop of a neighbourhood has 5 % more instructions and takes 3.5 % more time."""
    plan = plans(mods, 96 if mods == "plain-full" else 128, length=8192, deterministic=True).main
    assert plan.tiling.persistent
    made = compile_offline(plan, folder)
    assert not made.assembly or made.mnemonics["ATOMG"] == 1


# each in one of both orders by default
@pytest.mark.parametrize(
    ("mask", "deterministic"),
    sampled((mask, order) for n, mask in enumerate(READING) for order in (n % 2 == 0, n % 2 == 1)),
)
def test_products_overlap_whatever_a_mask_reads(mask: str, deterministic: bool, folder: Path) -> None:
    plan = plans(mask, 128, deterministic=deterministic).main
    made = compile_offline(plan, folder)
    if made.mnemonics:
        loops = max(1, len(plan.intervals))  # by lists: one
        assert made.spills <= 12 and not any(loop["LDL"] + loop["STL"] for loop in loops_over_queries(made))
        assert made.mnemonics["WARPGROUP"] <= 14 * loops


# each in one of both orders by default
@pytest.mark.parametrize(("is_causal", "deterministic"), sampled([(False, False), (True, True), (True, False)]))
def test_tiles_that_begin_with_documents_cost_no_registers_in_the_loop(
    is_causal: bool, deterministic: bool, folder: Path
) -> None:
    ids = torch.arange(8192) // 1000
    program = Program(None, (causal() & document(ids) if is_causal else document(ids)).expr)
    problem = Problem(1, 4, 2, 8192, 8192, 128, 128, torch.bfloat16, torch.device("cpu"))
    plan = plan_backward(problem, program, HOPPER, deterministic=deterministic).main
    made = compile_offline(plan, folder)
    whole = not (is_causal or deterministic)  # in tiles of 80 queries, which are faster all the same
    assert plan.has_segments and made.spills <= (5 if whole else 0)
    if made.mnemonics:
        assert not any(loop["LDL"] + loop["STL"] for loop in loops_over_queries(made))
        assert made.mnemonics["WARPGROUP"] <= 14
        assert all(loop["BAR"] == 0 for loop in loops_over_queries(made)) or deterministic


@pytest.mark.parametrize(
    ("mods", "d"),
    sampled([("plain-causal", 128), ("plain-causal", 64), ("plain-causal", 96), ("plain-causal", 256),
             ("document", 128), ("document", 64), ("document", 256)]),
)  # fmt: skip
def test_a_fixed_order_costs_no_registers(mods: str, d: int, folder: Path) -> None:
    plan = plans(mods, d, deterministic=True).main
    made = compile_offline(plan, folder)
    assert not made.stack and made.spills == 0
    if made.mnemonics:
        assert made.mnemonics["WARPGROUP"] <= (16 if mods == "document" else 14)
        assert (made.mnemonics["UBLKRED"] > 0) is plan.tiling.dq_in_bulk is (d <= 128)
    assert plan.key != plans(mods, d).main.key


def test_a_fixed_order_ends_backwards_where_tiles_differ_and_something_runs_before() -> None:
    def tiling(mods: str, d: int, *, heads: int = 64, length: int = 2048, **changes: Any) -> HopperBackwardTiling:
        score, mask = (MODS | READING)[mods]
        program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)
        shape = {"deterministic": True} | changes
        problem = Problem(1, heads, heads, length, length, d, d, torch.bfloat16, torch.device("cpu"))
        return plan_backward(problem, program, HOPPER, **shape).main.tiling

    assert all(tiling("plain-causal", d).ends_backwards for d in (64, 96, 128, 192, 256))
    assert not tiling("plain-full", 128).ends_backwards and not tiling("document", 128).ends_backwards
    assert not tiling("plain-causal", 128, deterministic=False).ends_backwards
    assert not tiling("plain-causal", 128, heads=1).ends_backwards
    # two sections of a few heads
    assert tiling("plain-causal", 128, heads=4, length=8192).heads_together == 2
    # some tile of keys is seen by all queries
    assert all(tiling(mods, d).first_writes for mods in ("plain-full", "plain-causal") for d in (64, 96, 128))
    # or each row sees the key of its number
    assert tiling("window", 128).first_writes and tiling("document", 128).first_writes
    assert not tiling("documents-by-offsets", 128).first_writes
    # pairs add to dQ from registers
    assert not any(tiling("plain-causal", d, length=n).first_writes for d in (192, 256) for n in (1024, 2048))


@pytest.mark.parametrize(
    ("mask", "queries", "seen"),
    [
        (lambda b, h, q, kv: q <= kv, LENGTH, True),
        (lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= kv), LENGTH, True),
        (lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q > kv), LENGTH, False),
        (lambda b, h, q, kv: (IDS[q] == IDS[kv]) & (q >= 130), LENGTH, False),
        (lambda b, h, q, kv: (q >= kv) & (q - kv < 50), LENGTH, True),
        (lambda b, h, q, kv: (q >= kv) & (q - kv < 50), LENGTH + 200, False),
    ],
    ids=["keys-ahead", "documents", "first-rows-see-none", "hidden-rows", "window", "rows-without-a-key"],
)
def test_whose_turn_is_first_writes_dq_where_each_row_sees_the_key_of_its_number(
    mask: Callable[..., Any], queries: int, seen: bool
) -> None:
    """If a mask says less, nobody would write the rows that no tile of keys visits."""
    problem = Problem(1, 4, 4, queries, LENGTH, 128, 128, torch.bfloat16, torch.device("cpu"))
    main = plan_backward(problem, Program(None, Mask.of(mask).expr), HOPPER, deterministic=True).main
    assert main.tiling.first_writes is seen


@pytest.mark.parametrize("mods", ["plain-full", "plain-causal"])
def test_nobody_clears_dq_where_the_first_turn_writes(mods: str, folder: Path) -> None:
    steps = plans(mods, 128, deterministic=True)
    prepare, main = (compile_offline(getattr(steps, name), folder).ptx for name in ("preprocess", "main"))
    assert "st.global.v4.b32" not in prepare and "cp.async.bulk.global.shared::cta.bulk_group" in main


@pytest.mark.parametrize(("d", "deterministic"), [(96, False), (64, True), (96, True), (128, True)])
def test_a_wait_looks_once_before_its_loop(d: int, deterministic: bool, folder: Path) -> None:
    """ptxas makes it so of all waits or of none; of these kernels it was none, at 2 to 5 %; of D 96 it is all since."""
    made = compile_offline(plans("plain-full", d, deterministic=deterministic).main, folder)
    looks = sum(i.text.startswith("SYNCS.PHASECHK.TRANS64.TRYWAIT") for i in instructions(made))
    assert looks >= 2 * made.mnemonics["NANOSLEEP"]


def test_nobody_counts_on_queries_that_one_of_the_heads_alone_sees() -> None:
    mask = Mask.of(lambda b, h, q, kv: (q >= h * 512) & (q < h * 512 + 512))
    problem = Problem(2, 2, 2, 1024, 1024, 128, 128, torch.bfloat16, torch.device("cpu"))
    tiling = plan_backward(problem, Program(None, mask.expr), HOPPER).main.tiling
    assert tiling.clears and not tiling.claimed_parts


def test_nobody_clears_dq_where_who_comes_first_writes(folder: Path) -> None:
    steps = plans("plain-causal", 128, length=2048)
    prepare, main = (compile_offline(getattr(steps, name), folder).ptx for name in ("preprocess", "main"))
    assert "st.global.v4.b32" not in prepare and "cp.async.bulk.global.shared::cta.bulk_group" in main


def test_who_asks_for_a_fixed_order_gets_it() -> None:
    problem = Problem(1, 4, 2, 8, 8, 64, 64, torch.bfloat16, torch.device("cuda"))
    answers = []
    for asked in (None, False, True):
        gradient = FusedGradient(dataclasses.replace(problem, deterministic=asked), Program(None, None), 1.0, HOPPER)
        was = torch.are_deterministic_algorithms_enabled()
        try:
            for setting in (False, True):
                torch.use_deterministic_algorithms(setting)
                answers.append(gradient.deterministic())
        finally:
            torch.use_deterministic_algorithms(was)
    assert answers == [False, True, False, False, True, True]


@pytest.mark.parametrize("asked", [False, True])
def test_explain_shows_the_order_that_is_asked_for(asked: bool) -> None:
    attention = ca.Attention(backend="hopper-emulated", deterministic=asked)
    text = str(attention.explain(*(torch.randn(1, 2, 64, 64).bfloat16() for _ in range(3))))
    assert ("from the last keys to the first" in text) is asked


LYING = [*PACKED, *((m, d) for m in OPAQUE for d in (64, 256))]


# each in one of both orders by default
@pytest.mark.parametrize(
    ("mods", "d", "deterministic"),
    sampled((*case, order) for n, case in enumerate(LYING) for order in (n % 2 == 0, n % 2 == 1)),
)
def test_packed_sequences_cost_no_registers(mods: str, d: int, deterministic: bool, folder: Path) -> None:
    plan = plans(mods, d, deterministic=deterministic, packed=True).main
    assert (plan.lists is not None) == (mods in OPAQUE)
    made = compile_offline(plan, folder)
    assert not made.stack and made.spills == 0
    if made.mnemonics:
        assert made.mnemonics["WARPGROUP"] <= 14


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("step", ["preprocess", "postprocess"])
def test_other_steps_spill_nothing(step: str, d: int, packed: bool, folder: Path) -> None:
    made = compile_offline(getattr(plans("plain-full", d, packed=packed), step), folder)
    assert not made.stack and made.spills == 0


@pytest.mark.parametrize("d", [64, 96, 128])
def test_the_small_kernels_and_the_clearing_of_dq_move_16_bytes_an_access(d: int, folder: Path) -> None:
    steps = plans("plain-full", d, length=1024)
    tile = steps.main.tiling
    in_order = plans("documents-by-offsets", d, deterministic=True).preprocess
    named = {"preprocess": in_order, "main": steps.main, "postprocess": steps.postprocess}
    made = {name: compile_offline(plan, folder) for name, plan in named.items()}
    if made["postprocess"].assembly:
        cleared, cleared_inside, loaded = (
            sum(i.text.startswith(access) for i in instructions(made[name]))
            for name, access in (("preprocess", "STG.E.128"), ("main", "STG.E.128"), ("postprocess", "LDG.E.128"))
        )
        assert cleared == in_order.tiling.tile_m * tile.d // (4 * preprocess.THREADS)
        assert made["preprocess"].threads == 512  # 1 to 2 us, of fewer
        pieces = steps.main.in_pieces * 64 * (tile.d + tile.dv) // (4 * 128)  # sums of 64 keys
        assert tile.clears and cleared_inside == tile.tile_m * tile.d // (4 * 32) + pieces
        assert loaded == tile.tile_m * tile.d // (4 * made["postprocess"].threads)


class Traced(Exception):
    """The traced module, in place of its compilation."""


def test_clearing_dq_is_traced_in_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    # an access at a time, it was a quarter of all that is traced of a backward
    from cutlass.base_dsl.compiler import Compiler

    def stop(self: Compiler, module: Any, *_: Any, **__: Any) -> None:
        raise Traced(str(module))

    def operations(**changes: Any) -> int:
        with pytest.raises(Traced) as found:
            _run_compiler(plans("plain-causal", 128, **changes).main)
        return str(found.value).count("\n")

    monkeypatch.setattr(Compiler, "compile", stop)
    assert operations() - operations(dq_begins="before") < 500


def test_a_kernel_that_starts_early_waits_before_it_reads_what_was_computed(folder: Path) -> None:
    steps = plans("plain-causal", 64)
    wait, go = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    names = ("preprocess", "main", "postprocess")
    prepare, main, finish = (compile_offline(getattr(steps, name), folder).ptx_path.read_text() for name in names)
    assert go in prepare and go in main and wait not in prepare
    assert "ld.global" not in finish[: finish.index(wait)]
    copies = main[: main.index(wait)].count("cp.async.bulk.tensor.4d.shared")
    assert copies == 2 * steps.main.tiling.d // 64  # K and V alone
    assert "red.relaxed" not in main[: main.index(wait)]


@pytest.mark.parametrize(("mods", "d"), [("plain-full", 64), ("plain-causal", 96), ("alibi-causal", 128)])
def test_probabilities_are_computed_while_dp_runs(mods: str, d: int, folder: Path) -> None:
    made = compile_offline(plans(mods, d).main, folder)
    if made.assembly:
        kinds = [i.text for i in instructions(made)]
        waits = [n for n, text in enumerate(kinds) if text.startswith("WARPGROUP.DEPBAR")]
        exponentials = [n for n, text in enumerate(kinds) if text.startswith("MUFU.EX2")]
        one_may_run, none_may = waits[:2]
        assert "0x1" in kinds[one_may_run] and "0x0" in kinds[none_may]
        assert sum(one_may_run < n < none_may for n in exponentials) > len(exponentials) // 2
        stored = next(n for n, text in enumerate(kinds) if text.startswith("STSM"))
        dv_starts = next(n for n, text in enumerate(kinds) if n > none_may and text.startswith("HGMMA"))
        assert stored < dv_starts


def test_pieces_of_a_run_are_the_run() -> None:
    for _ in range(200):
        first, count = int(torch.randint(0, 9, ())), int(torch.randint(0, 40, ()))
        pieces = int(torch.randint(1, 17, ()))
        parts = [QueryRun(first, count, 3, 7).piece(i, pieces) for i in range(pieces)]
        assert [p.tile(i) for p in parts for i in range(p.count)] == list(range(first, first + count))


def test_pieces_of_a_group_have_as_many_tiles() -> None:
    for count, pieces, group in itertools.product(range(1, 14), range(2, 7), (2, 3, 8)):
        run = QueryRun(2, count, 3, 7)
        heads = [[run.piece(i, pieces, head) for i in range(pieces)] for head in range(5, 5 + group)]
        for of_head in heads:
            assert sorted(p.tile(i) for p in of_head for i in range(p.count)) == list(range(2, 2 + count))
        tiles = [sum(of_head[i].count for of_head in heads) for i in range(pieces)]
        assert max(tiles) - min(tiles) <= 1


def test_query_tiles_are_visited_once_and_cover_the_intervals() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    for _ in range(500):
        q_len = int(torch.randint(1, 300, (), generator=generator))
        ends = torch.randint(-20, 320, (3, 2), generator=generator).tolist()
        begins, stops = sorted(e[0] for e in ends), sorted(e[1] for e in ends)
        intervals = [(b, s, b + 5, s - 5) for b, s in zip(begins, stops, strict=True)]
        runs = query_runs(intervals, q_len, 64, padding_is_harmless=True)
        visited = [r.tile(i) for r in runs for i in range(max(r.count, 0))]
        assert len(visited) == len(set(visited)) and visited == sorted(visited)
        wanted = {q // 64 for b, s, _, _ in intervals for q in range(max(b, 0), min(s, q_len))}
        assert wanted <= set(visited)
        for r in runs:
            for i in range(max(r.count, 0)):
                tile = r.tile(i)
                if not r.tested(i):
                    rows = range(tile * 64, min(tile * 64 + 64, q_len))
                    assert any(all(fb <= q < fe for q in rows) for _, _, fb, fe in intervals)
