"""The forward kernels, compiled with no GPU: they fit, spill nothing, and use the instructions that make them fast."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from benchmarks.model.loops import inner_loops
from benchmarks.model.sass import instructions
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.compile import compile_offline, content_hash
from composattn.backends.fused.compiling.inspect import Artifact
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper.forward_choice import choose_forward
from composattn.backends.hopper.tiling import GUESSING, HopperTiling
from composattn.backends.hopper.wide_tiling import GROUPS, STAGE
from composattn.call.problem import DENSE, Layout, Problem
from composattn.call.schedule import AUTO, Schedule
from composattn.mods import causal, document, sliding_window
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from composattn.primitives.rescale_threshold import ALWAYS_RESCALE, RescaleThreshold
from tests.support import sampled

ALONE = RescaleThreshold(3.0)
BY_SUMS = RescaleThreshold(8.0, share=1 / 32)
BY_SUMS_WIDE = RescaleThreshold(8.0, share=1 / 16, sums_read="doubled")
BY_SUMS_WIDEST = RescaleThreshold(8.0, share=1 / 16)

LONG, SHORT = 16384, 512  # calls whose queries see few keys are cut into small tiles
WINDOW = 512
PACKED, PERSISTENT = Layout("packed", "packed"), Schedule(persistent=True, split_kv=1)
SLOPES = torch.rand(4)
BIAS = torch.rand(4, 8, 8)
BLOCKS = torch.rand(4, 8, 8) < 0.5
DOCUMENT = torch.arange(8) // 3

MASKS = {
    "full": None,
    "causal": lambda b, h, q, kv: q >= kv,
    "window": lambda b, h, q, kv: (q >= kv) & (q - kv < WINDOW),
    "document": lambda b, h, q, kv: (DOCUMENT[q] == DOCUMENT[kv]) & (q >= kv),
    "checkerboard": lambda b, h, q, kv: (q + kv) % 2 == 0,
    "grid": lambda b, h, q, kv: ((q // 64 - kv // 64).abs() <= 3) & ((q % 64 - kv % 64).abs() <= 3),
    "blocks": lambda b, h, q, kv: BLOCKS[h, q // 64, kv // 64],
    "chunks": lambda b, h, q, kv: (kv // 256 == q // 256) | (kv // 256 == q // 256 - 1),
}
SCORES = {
    "plain": None,
    "alibi": lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q),
    "softcap": lambda score, b, h, q, kv: 30.0 * torch.tanh(score / 30.0),
    "bias": lambda score, b, h, q, kv: score + BIAS[h, q, kv],
    "key": lambda score, b, h, q, kv: score + BIAS[h, 0, kv],
    "chosen": lambda score, b, h, q, kv: torch.where(q >= kv, score, -1e9),
}


def program(score: str = "plain", mask: str = "full") -> Program:
    score_mod, mask_mod = SCORES[score], MASKS[mask]
    return Program(
        None if score_mod is None else Score.of(score_mod).expr, None if mask_mod is None else Mask.of(mask_mod).expr
    )


def plan(
    score: str = "plain",
    mask: str = "full",
    d: int = 128,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = DENSE,
    schedule: Schedule = AUTO,
    length: int = LONG,
    heads: int = 4,
) -> ForwardPlan:
    problem = Problem(
        1,
        heads,
        heads,
        length,
        length,
        d,
        d if dv is None else dv,
        dtype,
        torch.device("cuda"),
        layout=layout,
        schedule=schedule,
    )
    return plan_forward(problem, program(score, mask), HOPPER)


PLANS = {
    **{f"plain-full-d{d}": plan(d=d) for d in (8, 64, 96, 128, 192, 256)},
    **{f"plain-causal-short-d{d}": plan(mask="causal", d=d, length=SHORT) for d in (64, 96, 128)},
    "softcap-document-short-d96": plan("softcap", "document", d=96, length=SHORT),
    "bias-full-short-d64": plan("bias", d=64, length=SHORT),
    "plain-causal-d64": plan(mask="causal", d=64),
    "plain-causal-d128-fp16": plan(mask="causal", dtype=torch.float16),
    "plain-window-d128": plan(mask="window"),
    "plain-document-d64": plan(mask="document", d=64),
    "plain-document-d128": plan(mask="document"),
    "plain-checkerboard-d128": plan(mask="checkerboard"),
    "plain-causal-d192": plan(mask="causal", d=192),
    "plain-causal-d192-dv128": plan(mask="causal", d=192, dv=128),
    "plain-causal-d64-dv256": plan(mask="causal", d=64, dv=256),
    "plain-causal-d256": plan(mask="causal", d=256),
    "plain-grid-d64": plan(mask="grid", d=64),
    "plain-grid-d128": plan(mask="grid"),
    "alibi-causal-d128": plan("alibi", "causal"),
    "softcap-causal-d64": plan("softcap", "causal", d=64),
    "bias-full-d128": plan("bias"),
    **{f"plain-causal-packed-d{d}": plan(mask="causal", d=d, layout=PACKED) for d in (64, 128, 256)},
    "alibi-window-packed-used-d128": plan("alibi", "window", layout=dataclasses.replace(PACKED, used_q=True)),
    **{f"plain-causal-persistent-d{d}": plan(mask="causal", d=d, schedule=PERSISTENT) for d in (64, 128, 256)},
    **{
        f"{score}-causal-max-scores-d{d}": dataclasses.replace(plan(score, "causal", d=d), return_max_scores=True)
        for score, d in (("plain", 64), ("alibi", 128), ("plain", 256))
    },
    "plain-window-packed-persistent-d128": plan(mask="window", layout=PACKED, schedule=PERSISTENT),
}


# at D 128 or 256 too, where registers are fewer
ROOMY = (
    "plain-full-d8",
    "plain-causal-short-d96",
    *(f"plain-causal-{kind}-d64" for kind in ("packed", "persistent", "max-scores")),
    "plain-causal-packed-d256",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in ROOMY else ()) for n in PLANS])
def test_compiles_lean(name: str, folder: Path) -> None:
    artifact = compile_offline(PLANS[name], folder)
    if artifact.registers is None or not artifact.assembly:
        pytest.skip("needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    inner = loops_over_tiles(artifact)
    assert len(inner) == loops(artifact)
    assert [loop["LDL"] + loop["STL"] for loop in inner] == [0] * len(inner)
    # loads of a bias are started as early as registers allow, and a test that reads no bounds wants registers too; two
    # values wait for the epilogue, or the loop, in local memory
    assert artifact.spills <= (4 if name.startswith(("bias", "plain-grid-d128")) else 0)
    assert artifact.shared_memory <= HOPPER.shared_memory
    assert artifact.registers * artifact.threads <= HOPPER.registers
    assert artifact.mnemonics["HGMMA"] > 0, "no warpgroup products"
    assert artifact.mnemonics["UTMALDG"] > 0, "no bulk tensor loads"
    assert isinstance(artifact.plan, ForwardPlan)
    if artifact.plan.tiling.output_direct:
        lines = [i for i in instructions(artifact) if i.text.startswith("STG.E.128 ")]
        assert artifact.mnemonics["UTMASTG"] == 0 and len(lines) == 2 * artifact.plan.tiling.dv // 32
    else:
        assert artifact.mnemonics["UTMASTG"] > 0, "no bulk tensor store"
    assert not products_are_serialised(artifact)


def products_are_serialised(artifact: Artifact) -> bool:
    """Whether the compiler waits for every product by itself (its warning C7510), which costs half the speed."""
    # an arrival and a wait at each of two products in every loop, before the first one and after the last one
    # and those of products that are computed again where a guess failed
    return artifact.mnemonics["WARPGROUP"] > 4 * (loops(artifact) + 1) + 2 * guessed(artifact)


def loops_over_tiles(artifact: Artifact) -> list[Counter[str]]:
    return [loop.counts for loop in inner_loops(instructions(artifact)) if loop.multiplies]


def loops(artifact: Artifact) -> int:
    """Loops over kv tiles that the plan asks for."""
    plan = artifact.plan
    assert isinstance(plan, ForwardPlan)
    if plan.lists is not None:
        return 2
    once = sum(1 + s.left + s.right if s.full else 1 for s in plan.intervals)
    return 2 + min(guessed(artifact), 1) if in_rounds(plan) else once + guessed(artifact)


def in_rounds(plan: ForwardPlan) -> bool:
    """Whether one loop is over all tested tiles, and another over all others."""
    limits = plan.program.limits
    tests = 1 if limits is None or limits.holds.is_const else 2  # by the rows' limits, and by the mask where none hold
    copies = sum(1 + tests * (s.left + s.right) if s.full else tests for s in plan.intervals)
    return isinstance(plan.tiling, HopperTiling) and copies > 3


def guessed(artifact: Artifact) -> int:
    """Loops over tiles of which a maximum is guessed; before each is one for those that look for it."""
    plan = artifact.plan
    assert isinstance(plan, ForwardPlan)
    return sum(s.full for s in plan.intervals) if plan.tiling.kernel == GUESSING else 0


@pytest.mark.parametrize("name", ["plain-causal-short-d64", "plain-document-d64", "plain-document-d128"])
def test_the_outputs_product_is_waited_for_behind_the_first_exponentials(name: str, folder: Path) -> None:
    """Left to the compiler the wait stands before all of them: 1 to 5 % where no other warpgroup fills it."""
    artifact = compile_offline(PLANS[name], folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    for loop in inner_loops(instructions(artifact)):
        if loop.multiplies:
            kinds = [i.text for i in loop.body if i.text.startswith(("WARPGROUP.DEPBAR", "MUFU.EX2"))]
            scores, *between = kinds[: next(n for n, text in enumerate(kinds) if "0x0" in text)]
            assert "0x1" in scores and len(between) >= 4


@pytest.mark.parametrize(
    ("mask", "d", "dv", "length", "behind"),
    [
        ("full", 128, 128, 1024, 5),
        ("window", 128, 128, LONG, 5),
        ("causal", 192, 128, LONG, 5),
        ("full", 128, 128, LONG, 32),  # where maxima are guessed
        ("causal", 128, 128, LONG, 32),
    ],
)
def test_exponentials_run_under_the_outputs_product(
    mask: str, d: int, dv: int, length: int, behind: int, folder: Path
) -> None:
    """With two warpgroups too: 3 to 8 % of these calls were lost where the wait stood before all exponentials."""
    artifact = compile_offline(plan(mask=mask, d=d, dv=dv, length=length), folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    before_wait = []
    for loop in inner_loops(instructions(artifact)):
        if loop.multiplies:
            kinds = [i.text for i in loop.body if i.text.startswith(("WARPGROUP.DEPBAR", "MUFU.EX2"))]
            scores, *between = kinds[: next(n for n, text in enumerate(kinds) if "0x0" in text)]
            assert "0x1" in scores
            before_wait.append(len(between))
    # of guesses the loop that has most tiles; the one before it looks for maxima
    assert (max if behind == 32 else min)(before_wait) >= behind


@pytest.mark.parametrize(
    ("mask", "d", "dv", "resident"),
    [
        ("full", 128, 128, 128),
        ("full", 192, 192, 128),
        ("causal", 192, 192, 128),
        ("causal", 192, 128, 192),
        ("full", 192, 128, 192),
    ],
)
def test_columns_of_queries_wait_in_registers(mask: str, d: int, dv: int, resident: int, folder: Path) -> None:
    chosen = plan(mask=mask, d=d, dv=dv)
    artifact = compile_offline(chosen, folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    assert artifact.spills == 0 and not products_are_serialised(artifact)
    assert artifact.mnemonics["LDSM"] == resident // 16  # once for all tiles of keys
    for loop in inner_loops(instructions(artifact)):
        if loop.multiplies:
            products = [i.text for i in loop.body if i.name == "HGMMA" and "tnspB" not in i.text]
            from_registers = [bool(re.search(r", R\d+, gdesc", text)) for text in products]
            repeats = len(products) // (d // 16)  # twice where a guess failed
            assert from_registers == ([True] * (resident // 16) + [False] * ((d - resident) // 16)) * repeats


def test_queries_are_held_where_registers_have_room_beside_the_tile() -> None:
    def resident(mask: str = "causal", d: int = 192, dv: int | None = None, **how: Any) -> int:
        tiling = plan(how.pop("score", "plain"), mask, d, dv, **how).tiling
        assert isinstance(tiling, HopperTiling)
        return tiling.resident

    short = [resident(mask, 128, length=length, heads=32) for mask in ("causal", "full") for length in (512, 1024)]
    assert short == [0, 128] * 2
    assert [resident(mask, dv=128) for mask in ("causal", "window", "document", "full")] == [192] * 4
    assert resident("full", dv=128, schedule=Schedule(persistent=False)) == 0, "in blocks that leave"
    assert [resident(score=score) for score in ("softcap", "bias")] == [0, 0]
    assert (
        resident() == 128
        and resident(layout=PACKED) == resident(d=256) == 0
        and resident(schedule=Schedule(batch_invariant=True)) == 0
    )
    assert {resident(mask, d) for mask in ("causal", "full") for d in (64, 96)} == {0}
    assert resident("full", schedule=Schedule(persistent=False)) == resident("full", layout=PACKED) == 0


def test_plain_blocks_that_hold_queries_stay_and_draw_their_tiles() -> None:
    for tiling in (cut(192, 8192), cut(128, 16384), cut(192, 8192, causal())):
        assert tiling.resident == 128 and tiling.scheduler.draws
    assert [cut(192, 8192, persistent=stays).tile_n for stays in (None, False)] == [80, 112]


def test_a_load_brings_two_numbers_of_a_bias_at_pairs(folder: Path) -> None:
    """48 of a thread's pairs in 24 loads, each one instruction: 1.3 to 1.9 times as fast as 48 of fourteen each."""
    artifact = compile_offline(plan("bias"), folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    assert artifact.spills == 0
    for loop in inner_loops(instructions(artifact)):
        if loop.multiplies:
            two = [i.text for i in loop.body if i.text.startswith("LDG.E.64 ")]
            assert len(two) == 24 and len({text.split("[")[-1].split(".")[0] for text in two}) == 2  # addresses


@pytest.mark.parametrize("mask", ["blocks", "chunks"])
def test_a_mask_of_blocks_is_computed_once_a_block(mask: str, folder: Path) -> None:
    artifact = compile_offline(plan(mask=mask), folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    assert artifact.spills == 0
    for loop in loops_over_tiles(artifact):
        assert loop["LDG"] <= 9  # one for each 16 of 128 columns, and the number of the tile
        assert sum(loop.values()) < 800  # of masks with a value an element: 1000 to 1500


WIDE = {
    "plain-full-d512": plan(d=512),
    "plain-causal-d576-dv512": plan(mask="causal", d=576, dv=512),
    "plain-causal-d320": plan(mask="causal", d=320),
    "plain-causal-d64-dv512": plan(mask="causal", d=64, dv=512),
    "softcap-document-d512": plan("softcap", "document", d=512),
    "bias-full-d512": plan("bias", d=512),
    "alibi-window-packed-d512": plan("alibi", "window", d=512, layout=PACKED),
    "plain-grid-d512": plan(mask="grid", d=512),
    "plain-causal-persistent-d512": plan(mask="causal", d=512, schedule=PERSISTENT),
    "alibi-causal-max-scores-d512": dataclasses.replace(plan("alibi", "causal", d=512), return_max_scores=True),
}


@pytest.mark.parametrize("name", sampled(WIDE, 5))
def test_wide_heads_compile_lean(name: str, folder: Path) -> None:
    artifact = compile_offline(WIDE[name], folder)
    if artifact.registers is None or not artifact.assembly:
        pytest.skip("needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    t = WIDE[name].tiling
    assert artifact.spills == 0
    assert artifact.shared_memory <= HOPPER.shared_memory
    assert artifact.registers * artifact.threads <= HOPPER.registers
    inner = loops_over_tiles(artifact)
    assert len(inner) == loops(artifact)
    of_keys, of_values = t.d // t.key_box[1], t.tile_n // t.value_box[0]
    for loop in inner:
        assert loop["HGMMA"] == t.d // 16 + t.tile_n // 16
        assert loop["WARPGROUP"] <= 2 * (of_keys + of_values)  # an arrival and a wait for each slice


def test_wide_tiles_keep_within_registers_and_shared_memory() -> None:
    for d, dv in itertools.product(range(8, 577, 8), range(8, 513, 8)):
        for q_len, kv_len in ((1, 4096), (4096, 4096)):
            if max(d, dv) > 256:
                problem = Problem(1, 16, 1, q_len, kv_len, d, dv, torch.bfloat16, torch.device("cuda"))
                t = choose_forward(problem, Program(), HOPPER).tiling
                for computing, copying in (t.registers(False), t.registers(True)):
                    assert 128 * (GROUPS * computing + copying) <= HOPPER.registers
                assert t.shared_memory <= HOPPER.shared_memory
                assert t.stages >= 8
                assert d <= t.d and dv <= t.dv == GROUPS * t.output_columns
                assert t.value_box[0] % 16 == 0 and t.value_box[0] * t.value_box[1] <= STAGE


def test_roles_keep_within_the_register_file() -> None:
    for d in range(8, 257, 8):
        for dv in range(8, 257, 8):
            for q_len, kv_len in ((1, 4096), (300, 300), (4096, 4096)):
                problem = Problem(1, 1, 1, q_len, kv_len, d, dv, torch.bfloat16, torch.device("cuda"))
                t = choose_forward(problem, Program(), HOPPER).tiling
                for computing, copying in (t.registers(False), t.registers(True)):
                    assert t.blocks * 128 * (t.warpgroups * computing + copying) <= HOPPER.registers
                assert t.blocks * t.shared_memory <= HOPPER.shared_memory
                assert t.tile_n % 16 == 0
                assert t.tile_n >= 64


def cut(head_dim: int, length: int, mask: Mask | None = None, **schedule: Any) -> HopperTiling:
    problem = Problem(9, 8, 8, length, length, head_dim, head_dim, torch.bfloat16, torch.device("cuda"))
    problem = dataclasses.replace(problem, schedule=ca.Schedule(**schedule))
    return choose_forward(problem, ca.Attention(mask_mod=mask).program, HOPPER).tiling


def test_where_queries_see_few_keys_small_blocks_share_a_sm() -> None:
    ids = torch.arange(8192) // 700
    assert [cut(64, length, causal()).blocks for length in (256, 512, 2048)] == [3, 3, 1]
    assert [cut(96, length, causal()).blocks for length in (256, 1024, 2048)] == [3, 1, 1], "few rounds, then more"
    assert [cut(64, length, causal(), batch_invariant=True).blocks for length in (4096, 8192)] == [2, 1]
    assert [cut(64, 8192, causal() & sliding_window(left)).blocks for left in (256, 1024)] == [3, 1]
    assert [cut(128, length, causal() & document(ids)).blocks for length in (512, 1024, 2048)] == [1, 2, 1]
    assert cut(256, 256, causal()).blocks == 1


def test_long_documents_are_in_large_blocks_that_stay() -> None:
    ids = torch.arange(8192) // 700
    by_head = torch.stack([ids] * 8)
    other = Mask.of(lambda b, h, q, kv: by_head[h, q] == by_head[h, kv])
    for mask in (document(ids), other):  # tiles begin with documents of all heads
        for long in (cut(128, 8192, mask), cut(128, 8192, causal() & mask)):
            assert (long.kernel, long.warpgroups, long.tile_n, long.blocks) == ("forward", 2, 128, 1)
            assert long.persistent and long.q_stages == 2
        assert not cut(128, 8192, causal() & mask, persistent=False).persistent
    assert cut(64, 8192, causal(), batch_invariant=True).kernel == "forward"


def test_up_to_d_128_a_tile_with_no_test_is_not_searched_for_its_maximum() -> None:
    assert {cut(d, 8192, mask).kernel for d in (64, 96, 128) for mask in (None, causal())} == {GUESSING}
    assert [cut(64, 8192, mask).stages for mask in (None, causal())] == [3, 3] and cut(128, 8192).stages == 2
    assert cut(64, 8192, batch_invariant=True).kernel == "forward"
    assert [cut(128, length, causal()).kernel for length in (2048, 4096)] == ["forward", GUESSING]
    assert [cut(128, length).kernel for length in (1024, 2048)] == ["forward", GUESSING]
    assert cut(192, 8192).kernel == "forward"


def test_behind_a_score_mod_that_is_a_line_a_maximum_is_guessed_too() -> None:
    guessed = [plan("alibi", "causal", d) for d in (64, 96, 128)] + [plan("alibi", "causal", length=2048)]
    assert {p.tiling.kernel for p in guessed} == {GUESSING}
    to_both_sides = [plan("alibi", d=d, length=length) for d in (64, 128) for length in (4096, 8192)]
    assert {p.tiling.kernel for p in to_both_sides} == {"forward"}  # scores may rise, and far


def test_maxima_lag_by_sums_but_for_few_keys_and_where_a_row_knows_no_others() -> None:
    """Rows that guess take every tile's own maximum where they look for one."""
    assert {cut(d, 8192, mask).threshold for d in (64, 128) for mask in (None, causal())} == {ALWAYS_RESCALE}
    assert {cut(128, 2048, causal()).threshold, cut(64, 2048, causal(), batch_invariant=False).threshold} == {
        BY_SUMS,
        ALWAYS_RESCALE,
    }
    assert {cut(d, 2048).threshold for d in (192, 256)} == {BY_SUMS_WIDE}  # more to rescale
    assert cut(512, 2048).threshold == BY_SUMS_WIDEST
    assert {cut(64, 512, causal()).threshold, cut(128, 1024, causal()).threshold} == {ALONE}
    assert {cut(d, 8192, batch_invariant=True).threshold for d in (64, 128, 256, 512)} == {ALONE}


@pytest.mark.parametrize(("d", "length"), [(128, 2048), (192, 8192), (256, 8192)])
def test_sums_are_noted_by_warps_that_rescale_or_of_wide_outputs_under_both_products(
    d: int, length: int, folder: Path
) -> None:
    """Their logarithms, and two shuffles a row, stand behind a branch that few tiles take."""
    mask = "causal" if d == 128 else "full"  # up to D 128 tiles with no mask guess
    artifact = compile_offline(plan(mask=mask, d=d, length=length), folder)
    if not artifact.assembly:
        pytest.skip("needs cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
    loops = [loop for loop in inner_loops(instructions(artifact)) if loop.multiplies]
    loop = min(loops, key=lambda loop: len(loop.body))  # that of tiles with no test
    names = [instruction.name for instruction in loop.body]
    (vote,) = [at for at, name in enumerate(names) if name == "VOTE"]
    behind = vote if d == 128 else max(at for at, name in enumerate(names) if name == "HGMMA")
    skips = next(at for at in range(behind, len(names)) if loop.body[at].predicate and names[at] == "BRA")
    noted = [at for at, instruction in enumerate(loop.body) if "LG2" in instruction.text]
    assert len(noted) == 2 and min(noted) > skips
    assert names.count("SHFL") == 8 and sum(skips < at < max(noted) for at, n in enumerate(names) if n == "SHFL") == 4
    if d != 128:  # the scores are waited for behind it
        waits = next(at for at in range(behind, len(names)) if "DEPBAR" in loop.body[at].text)
        assert max(noted) < waits


@pytest.mark.parametrize("score", ["softcap", "bias", "chosen", "key"])
def test_behind_other_score_mods_and_in_packed_sequences_it_is_looked_for(score: str) -> None:
    assert {plan(score, d=d).tiling.kernel for d in (64, 96, 128)} == {"forward"}
    assert plan(d=64, layout=PACKED).tiling.kernel == "forward"


@pytest.mark.parametrize(
    ("score", "mask", "d"),
    [
        *(("plain", mask, d) for d in (64, 96, 128) for mask in ("full", "causal")),
        ("alibi", "causal", 64),
        ("alibi", "causal", 128),
    ],
)
def test_a_guess_takes_no_maximum_and_sums_rounded_probabilities_in_the_product(
    score: str, mask: str, d: int, folder: Path
) -> None:
    chosen = plan(score, mask, d)
    artifact = compile_offline(chosen, folder)
    if not artifact.assembly:
        pytest.skip("needs nvdisasm (PyPI: nvidia-cuda-nvdisasm)")
    assert artifact.spills == 0
    guessed = [loop.body for loop in inner_loops(instructions(artifact)) if loop.multiplies and loop.counts["B2R"]]
    assert len(guessed) == 1
    names = [i.name for i in guessed[0]]
    asked = names.index("B2R")  # whether a row rose too far
    columns = chosen.tiling.tile_n // 2
    lines = 1 if score == "plain" else 2  # the scale's multiply-add, and the score mod's before it
    assert names[:asked].count("MUFU") == columns and names[:asked].count("FFMA") == lines * columns
    assert names[:asked].count("F2FP") == columns // 2 and names[:asked].count("FMNMX") <= 2
    assert "SHFL" not in names[:asked] and asked < (4 + 2 * lines) * columns
    assert sum(f"64x{d + 8}x16" in i.text for i in guessed[0]) == chosen.tiling.tile_n // 16


def test_batch_invariant_tiles_of_a_window_are_small_wherever_its_queries_stand() -> None:
    window = causal() & sliding_window(127)
    for mask in (window, window.shifted(q=torch.tensor(5)), window & document(torch.arange(8192) // 700)):
        assert {cut(64, n, mask, batch_invariant=True).tile_n for n in (1, 100, 8192)} == {64}
    assert cut(64, 8192, window, batch_invariant=True).blocks == 3
    others = {(64, causal() & sliding_window(4000)), (64, causal() & sliding_window(ca.scalar(127))), (128, window)}
    assert {cut(dim, n, mask, batch_invariant=True).tile_n for dim, mask in others for n in (1, 8192)} == {128}


def test_warpgroups_take_turns_up_to_d_192() -> None:
    assert [d for d in (64, 96, 128, 192, 256) if cut(d, 8192).pingpong and cut(d, 8192, causal()).pingpong] == [
        64, 96, 128, 192,
    ]  # fmt: skip


def test_small_windows_of_d_64_have_tiles_of_64_keys() -> None:
    windows = (causal() & sliding_window(left) for left in (127, 511, 1023))
    assert [cut(64, 8192, window).tile_n for window in windows] == [64, 128, 128]


def test_with_d_256_a_mask_takes_smaller_tiles() -> None:
    assert [cut(256, 8192, mask).tile_n for mask in (None, causal())] == [80, 64]


def test_heads_with_no_mask_come_one_after_the_other_up_to_8_mib_of_keys() -> None:
    assert [cut(128, length, None).heads_together for length in (1024, 16384, 32768)] == [1, 1, None]
    assert cut(128, 1024, causal()).heads_together is None
    assert cut(128, 1024, None, heads_together=3).heads_together == 3


def test_short_masked_calls_of_d_128_work_on_few_heads_at_a_time() -> None:
    assert [cut(128, length, causal()).heads_together for length in (256, 512, 513)] == [16, 32, None]
    assert cut(64, 256, causal()).heads_together is None
    assert cut(128, 256, causal(), heads_together=3).heads_together == 3


def test_up_to_d_96_a_block_stays_for_several_tiles() -> None:
    assert [cut(64, 8192, mask).persistent for mask in (None, causal())] == [True, True]
    assert [cut(64, length).persistent for length in (2048, 16384, 32768)] == [True, True, False]
    assert [cut(96, 1024, mask).persistent for mask in (None, causal())] == [True, True]
    masks = (None, causal(), sliding_window(256))
    assert [cut(96, 8192, mask).persistent for mask in masks] == [True, True, False], "none is drawn at D 96"


def test_small_blocks_of_d_64_stay_where_keys_are_few_and_nothing_is_read() -> None:
    few = [cut(64, length, mask) for length in (128, 256) for mask in (None, causal())] + [cut(64, 512, causal())]
    assert all((t.blocks, t.persistent, t.tile_n, t.q_stages) == (3, True, 64, 2) for t in few)
    left = cut(64, 512, causal(), persistent=False)
    assert not left.persistent and left.q_stages == 1
    assert cut(64, 512).warpgroups == 3, "whole tiles of 192 queries, but for an eighth"
    others = (
        cut(64, 600, causal(), batch_invariant=True),
        cut(64, 512, document(torch.arange(512) // 70)),
        cut(64, 512, batch_invariant=True),
    )
    assert not any(t.persistent for t in others)


def test_blocks_that_stay_have_room_for_two_tiles_of_queries_if_there_is_any() -> None:
    assert [cut(64, 8192).q_stages, cut(128, 512).q_stages, cut(128, 512, causal()).q_stages] == [2, 2, 2]
    assert [cut(64, 32768).q_stages, cut(128, 4096).q_stages, cut(256, 512, persistent=True).q_stages] == [1, 1, 1]


def test_with_d_128_a_block_stays_for_several_tiles_where_queries_see_few_keys() -> None:
    assert [cut(128, length, causal()).scheduler.draws for length in (256, 4096, 8192, 16384)] == [True] * 3 + [False]
    assert all(cut(128, length).persistent for length in (4096, 5000, 8192))
    assert not cut(128, 256, causal(), persistent=False).persistent
    assert not plan(mask="causal", length=2048, heads=8).tiling.persistent, "128 tiles, one an SM"
    assert cut(64, 256, causal(), persistent=True).persistent


def test_a_plan_is_named_by_its_content() -> None:
    assert content_hash(plan(mask="causal")) == content_hash(plan(mask="causal"))
    assert content_hash(plan("bias")) == content_hash(plan("bias"))
    others = [plan(), plan(mask="causal"), plan("alibi"), plan(dtype=torch.float16), plan(dv=64)]
    others.append(dataclasses.replace(plan(), return_lse=False))
    assert len({content_hash(p) for p in others}) == len(others)


def test_a_plan_prints_what_it_does() -> None:
    text = str(plan(mask="causal"))
    for word in ("forward_guessing on hopper", "128 queries", "resident 128", "bytes shared"):
        assert word in text
