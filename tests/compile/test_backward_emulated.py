"""The backward kernels run by the emulator, with no GPU, against fp64: splits of dQ, mods, groups, ragged lengths."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import cutlass.cute as cute
from cutlass import Int32

from composattn.analysis.program import Program
from composattn.backends import reference
from composattn.backends.fused.kernels import dq_claims, dq_semaphore
from composattn.backends.fused.kernels.around import preprocess
from composattn.backends.fused.kernels.registers import dq_sender
from composattn.backends.fused.planning.cut import Cut
from composattn.backends.fused.planning.plan import Plan
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.running.emulated import captured
from composattn.backends.fused.running.launch_backward import BackwardLauncher
from composattn.backends.fused.tiles.target import HOPPER, Target
from composattn.backends.hopper.backward_wide import Side
from composattn.backends.hopper.key_tile import HopperBackwardBlock
from composattn.call.problem import Problem
from composattn.emulator.findings import SharedRace, UninitialisedGlobal
from composattn.emulator.launch import Stream
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.mods import document
from composattn.mods.mask import Mask
from composattn.mods.score import Score
from composattn.primitives.block_pair import BothWarps, PairSums
from composattn.primitives.pipelines import Warps
from composattn.testing import poisoned
from tests.compile.test_backward import retiled
from tests.support import outlier_normal, sampled

SLOPES, BIAS, DOCUMENT = torch.rand(4), torch.randn(4, 600), torch.arange(300) // 70
OFFSETS, OF_KEYS = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 70, 70, 85, 290], [0, 100, 140, 140, 250]))


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


MODS: dict[str, tuple[Any, Any]] = {
    "plain": (None, None),
    "causal": (None, causal),
    "hidden": (None, lambda b, h, q, kv: (q >= 20) & (kv < 30)),
    "window": (None, lambda b, h, q, kv: (q >= kv) & (q - kv < 30)),
    "halves": (None, lambda b, h, q, kv: (q >= h * 160) & (q < h * 160 + 160)),
    "two-runs": (None, lambda b, h, q, kv: ((q < 90) | (q >= 95)) & (q < 240)),
    "document": (None, lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv]),
    "offsets": (None, document(offsets=OFFSETS)),
    "causal-offsets": (None, document(offsets=OFFSETS) & causal),
    "two-offsets": (None, document(offsets=OFFSETS, kv_offsets=OF_KEYS)),
    "alibi": (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), causal),
    "softcap": (lambda s, b, h, q, kv: 5.0 * torch.tanh(s / 5.0), causal),
    "gentle-softcap": (lambda s, b, h, q, kv: 200.0 * torch.tanh(s / 200.0), causal),
    "relative": (lambda s, b, h, q, kv: s + BIAS[h, q - kv + 300], None),
    "choice": (lambda s, b, h, q, kv: s * torch.where(q > kv, 1.5, 0.5), None),
}

# mods, dtype, query heads, key heads, queries, keys, D, Dv, gradient through LSE, dQ in a fixed order
CASES = {
    "plain-d128": ("plain", torch.bfloat16, 1, 1, 128, 128, 128, 128, False, False),
    "plain-ragged": ("plain", torch.bfloat16, 1, 1, 100, 77, 128, 128, True, False),
    "plain-gqa2-d64-fp16": ("plain", torch.float16, 2, 1, 100, 177, 64, 64, True, False),
    "causal-d64": ("causal", torch.bfloat16, 1, 1, 200, 200, 64, 64, True, False),
    "hidden-rows-and-keys": ("hidden", torch.bfloat16, 1, 1, 60, 150, 128, 128, True, False),
    "window-d128": ("window", torch.bfloat16, 1, 1, 250, 250, 128, 128, False, False),
    "document-d32": ("document", torch.float16, 2, 2, 200, 200, 32, 32, False, False),
    "alibi-gqa2-d128": ("alibi", torch.bfloat16, 4, 2, 150, 150, 128, 128, True, False),
    "softcap-d128": ("softcap", torch.bfloat16, 1, 1, 150, 150, 128, 128, True, False),
    "gentle-softcap-d128": ("gentle-softcap", torch.bfloat16, 1, 1, 150, 150, 128, 128, True, False),
    "gentle-softcap-d256": ("gentle-softcap", torch.bfloat16, 1, 1, 100, 100, 256, 256, True, False),
    "plain-d256-clearing": ("plain", torch.bfloat16, 2, 1, 100, 150, 256, 256, True, False),
    "softcap-gqa2-d64": ("softcap", torch.bfloat16, 2, 1, 150, 150, 64, 64, False, False),
    "relative-d64": ("relative", torch.bfloat16, 2, 1, 150, 150, 64, 64, True, False),
    "choice-d80-dv40": ("choice", torch.float16, 1, 1, 150, 150, 80, 40, True, False),
    "causal-gqa2-d96": ("causal", torch.bfloat16, 2, 1, 200, 150, 96, 96, True, False),
    "plain-d160-dv96": ("plain", torch.float16, 1, 1, 130, 150, 160, 96, False, False),
    "causal-d128-in-order": ("causal", torch.bfloat16, 1, 1, 300, 300, 128, 128, False, True),
    "causal-d256": ("causal", torch.bfloat16, 1, 1, 150, 150, 256, 256, True, False),
    "softcap-d192-dv128": ("softcap", torch.float16, 1, 1, 150, 150, 192, 128, True, False),
    "relative-gqa2-d64-dv256": ("relative", torch.bfloat16, 2, 1, 130, 130, 64, 256, True, False),
    "window-d256-in-order": ("window", torch.bfloat16, 1, 1, 150, 150, 256, 256, False, True),
    "offsets-d64": ("offsets", torch.bfloat16, 2, 1, 290, 290, 64, 64, True, False),
    "two-offsets-d96": ("two-offsets", torch.float16, 1, 1, 290, 250, 96, 96, True, False),
    "two-offsets-d128-in-order": ("two-offsets", torch.bfloat16, 1, 1, 290, 280, 128, 128, True, True),
    "document-gqa2-d64-in-order": ("document", torch.bfloat16, 2, 1, 290, 290, 64, 64, True, True),
}


# three kernels to compile each, and what they have others have too: these run with the slow ones
SELDOM = {
    "plain-d128", "window-d128", "softcap-d128", "softcap-gqa2-d64", "two-offsets-d96", "last-cut-d128",
    "stay-d64", "stay-d96", "stay-in-order", "stay-cut", "stay-bulk",
    "stay-bulk-cut",
    "causal-d64", "plain-ragged", "stay-bulk-gqa2-dv64",
    "clearing-blocks-that-leave",
}  # fmt: skip
# whoever runs ahead shows what no wait holds back; in the order of the program others find as much
MODES = [pytest.param(EAGER, marks=pytest.mark.slow), LATE, random_mode(1)]


def often(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(case, marks=[pytest.mark.slow] if case in SELDOM else []) for case in cases]


@pytest.mark.parametrize("case", often(CASES))
def test_emulated_gradients_match_fp64(case: str, folder: Path, generator: torch.Generator) -> None:
    check(case, folder, generator)


# pairs that exchange dS, one block with one stage of dO, pairs with half of the columns, 64 keys a warpgroup
@pytest.mark.parametrize(
    "facts",
    [
        ("causal", torch.bfloat16, 1, 1, 250, 150, 256, 256, True, False),
        ("causal", torch.bfloat16, 1, 1, 250, 150, 256, 256, False, True),
        ("causal", torch.bfloat16, 1, 1, 250, 150, 320, 320, False, False),
        ("causal", torch.bfloat16, 1, 1, 250, 150, 128, 128, False, False),
    ],
    ids=["d256", "d256-in-order", "d320", "d128"],
)
def test_no_copy_overtakes_a_read_of_row_statistics(
    facts: tuple[Any, ...], folder: Path, generator: torch.Generator
) -> None:
    check(facts, folder, generator, mode=Mode(fenced_reads=True))


FEW = dataclasses.replace(HOPPER, sms=2)
STAY, LEAVE = {"persistent": True, "dq_begins": "before"}, {"persistent": False, "dq_begins": "before"}
CLEARING = {"dq_begins": "beside"}
BULK: dict[str, Any] = {"tile_m": 80, "persistent": False, "dq_leaves": "in bulk"}
# facts as above, changes of the tiling, which tiles are cut: (tiles, whole ones, pieces of the others)
SHARED: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[int, int, int] | None]] = {
    "all-cut-gqa4-d64": (("causal", torch.bfloat16, 4, 1, 150, 200, 64, 64, True, False), LEAVE, (2, 0, 2)),
    "all-cut-in-order": (("window", torch.float16, 2, 1, 200, 200, 128, 96, False, True), LEAVE, (2, 0, 3)),
    "last-cut-d128": (("plain", torch.bfloat16, 2, 2, 250, 170, 128, 128, False, False), LEAVE, (4, 3, 3)),
    "last-cut-d256": (("causal", torch.bfloat16, 2, 1, 150, 150, 256, 256, True, False), LEAVE, (2, 1, 2)),
    "last-cut-d320": (("causal", torch.bfloat16, 2, 1, 150, 150, 320, 264, True, False), LEAVE, (3, 2, 2)),
    "exchange-last-cut": (("causal", torch.bfloat16, 2, 1, 150, 300, 192, 128, True, False), {}, (3, 2, 2)),
    "exchange-clearing": (("plain", torch.bfloat16, 2, 2, 250, 270, 192, 128, False, False), CLEARING, None),
    "exchange-stays": (("causal", torch.bfloat16, 4, 2, 150, 300, 192, 128, True, False), STAY, None),
    "exchange-stays-d256": (("window", torch.float16, 2, 2, 200, 300, 256, 256, False, False), STAY, None),
    "exchange-stays-in-order": (("plain", torch.bfloat16, 2, 2, 150, 290, 192, 128, True, True), STAY, None),
    "exchange-stays-clearing": (
        ("plain", torch.bfloat16, 2, 2, 250, 270, 192, 128, False, False),
        STAY | CLEARING,
        None,
    ),
    "exchange-stays-cut": (("causal", torch.bfloat16, 2, 1, 150, 300, 192, 128, True, False), STAY, (3, 2, 2)),
    "exchange-stays-d160": (("causal", torch.float16, 2, 2, 300, 300, 160, 160, True, False), STAY, None),
    "stay-d64": (("causal", torch.bfloat16, 2, 1, 300, 300, 64, 64, True, False), STAY, None),
    "stay-d96": (("window", torch.float16, 3, 3, 150, 270, 96, 80, False, False), STAY, None),
    "stay-d128": (("causal", torch.bfloat16, 3, 3, 300, 300, 128, 128, True, False), STAY, None),
    "stay-in-order": (("causal", torch.bfloat16, 2, 2, 300, 300, 64, 64, False, True), STAY, None),
    "stay-cut": (("plain", torch.bfloat16, 4, 2, 200, 270, 64, 64, False, False), STAY, (6, 4, 2)),
    "stay-bulk": (("causal", torch.bfloat16, 3, 3, 300, 300, 128, 128, True, False), BULK | STAY, None),
    "stay-bulk-gqa2-dv64": (("window", torch.float16, 4, 2, 250, 400, 128, 64, True, False), BULK | STAY, None),
    "heads-a-piece": (
        ("causal", torch.bfloat16, 4, 1, 250, 270, 128, 128, True, False),
        BULK | STAY | CLEARING | {"heads_a_piece": 2, "heads_together": 1},
        (3, 0, 2),
    ),
    "stay-bulk-cut": (("plain", torch.bfloat16, 4, 2, 250, 270, 128, 128, False, False), BULK | STAY, (6, 4, 2)),
    "clearing-d64": (("causal", torch.bfloat16, 4, 2, 300, 300, 64, 64, True, False), STAY | CLEARING, None),
    "clearing-bulk-cut": (
        ("plain", torch.bfloat16, 4, 2, 250, 270, 128, 128, False, False),
        BULK | STAY | CLEARING,
        (6, 4, 2),
    ),
    "clearing-blocks-that-leave": (
        ("window", torch.float16, 2, 1, 250, 300, 96, 96, True, False),
        LEAVE | CLEARING,
        None,
    ),
    "stay-cut-in-order": (("causal", torch.bfloat16, 1, 1, 300, 400, 64, 64, False, True), STAY, (4, 2, 2)),
}


def check_shared(case: str, folder: Path, generator: torch.Generator, mode: Mode = EAGER) -> None:
    """One of these, on two SMs, so that blocks that stay walk over several tiles each."""
    facts, changes, cut = SHARED[case]
    check(facts, folder, generator, FEW, None if cut is None else Cut(*cut), mode, **changes)


@pytest.mark.parametrize("case", often(SHARED))
def test_whoever_computes_a_tile_it_is_the_same(case: str, folder: Path, generator: torch.Generator) -> None:
    check_shared(case, folder, generator)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [LATE, random_mode(1)], ids=str)
@pytest.mark.parametrize("case", [name for name in SHARED if "exchange-stays" in name])
def test_both_blocks_of_a_pair_that_stays_hear_the_same_tiles(
    case: str, mode: Mode, folder: Path, generator: torch.Generator
) -> None:
    check_shared(case, folder, generator, mode)


@pytest.mark.slow
def test_the_next_keys_come_to_a_pair_that_stays_when_dk_and_dv_have_left(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Side, "drain_stores", lambda self: None)
    with pytest.raises(SharedRace):
        check_shared("exchange-stays", tmp_path, generator, LATE)


@pytest.mark.parametrize("mode", [LATE, random_mode(1)], ids=str)
@pytest.mark.parametrize("case", sampled(name for name in SHARED if "clearing" in name))
def test_nobody_adds_to_dq_before_it_is_clear(case: str, mode: Mode, folder: Path, generator: torch.Generator) -> None:
    check_shared(case, folder, generator, mode)


def test_counters_that_nobody_has_set_are_found(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "_clear_share", lambda *_: None)
    with pytest.raises(UninitialisedGlobal, match="a count that nobody has set"):
        check_shared("clearing-d64", tmp_path, generator)


BULK_CASES: dict[str, tuple[Any, ...]] = {
    "plain-ragged": ("plain", torch.bfloat16, 1, 1, 250, 177, 128, 128, True, False),
    "causal-gqa2": ("causal", torch.bfloat16, 4, 2, 200, 200, 128, 128, False, False),
    "window": ("window", torch.float16, 1, 1, 300, 300, 128, 128, False, False),
    "hidden": ("hidden", torch.bfloat16, 1, 1, 60, 150, 128, 128, True, False),
    "causal-gqa2-in-order": ("causal", torch.bfloat16, 4, 2, 200, 300, 128, 128, False, True),
    "window-in-order": ("window", torch.float16, 1, 1, 300, 300, 128, 128, True, True),
}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", sampled(BULK_CASES))
def test_dq_that_leaves_in_bulk_matches_fp64(case: str, mode: Mode, folder: Path, generator: torch.Generator) -> None:
    check(BULK_CASES[case], folder, generator, mode=mode, **BULK)


IN_ORDER_CASES: dict[str, tuple[Any, ...]] = {
    "plain-d64": ("plain", torch.bfloat16, 2, 1, 250, 270, 64, 64, True, True),
    "causal-d64": ("causal", torch.bfloat16, 2, 1, 300, 300, 64, 64, True, True),
    "plain-d96": ("plain", torch.bfloat16, 1, 1, 200, 270, 96, 96, False, True),
    "causal-gqa2-d96": ("causal", torch.bfloat16, 4, 2, 200, 300, 96, 96, False, True),
    "window-d96-dv80": ("window", torch.float16, 1, 1, 300, 300, 96, 80, True, True),
    "causal-gqa2-d192": ("causal", torch.bfloat16, 2, 1, 200, 200, 192, 192, True, True),
    "plain-ragged-d192": ("plain", torch.bfloat16, 1, 1, 100, 130, 192, 192, True, True),
}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", sampled(IN_ORDER_CASES))
def test_dq_in_a_fixed_order_leaves_in_bulk_too(
    case: str, mode: Mode, folder: Path, generator: torch.Generator
) -> None:
    check(IN_ORDER_CASES[case], folder, generator, mode=mode)


# facts as above, which tiles are cut (by heads of their group)
BACKWARDS_CASES: dict[str, tuple[tuple[Any, ...], tuple[int, int, int] | None]] = {
    "causal-d128": (("causal", torch.bfloat16, 3, 3, 300, 300, 128, 128, True, True), None),
    "causal-gqa2-d64": (("causal", torch.bfloat16, 4, 2, 400, 400, 64, 64, True, True), None),
    "window-d96": (("window", torch.float16, 2, 2, 300, 300, 96, 96, True, True), None),
    "causal-d192": (("causal", torch.bfloat16, 2, 2, 200, 270, 192, 192, True, True), None),
    "causal-d256": (("causal", torch.bfloat16, 2, 2, 150, 300, 256, 256, True, True), None),
    "softcap-gqa2-d128": (("softcap", torch.bfloat16, 4, 2, 200, 200, 128, 128, False, True), None),
    "all-cut-gqa2-d128": (("causal", torch.bfloat16, 4, 2, 300, 270, 128, 128, True, True), (6, 0, 2)),
    "last-cut-gqa2-d256": (("causal", torch.bfloat16, 4, 2, 200, 270, 256, 256, True, True), (6, 4, 2)),
    "cut-in-three-of-two-d96": (("causal", torch.bfloat16, 4, 2, 300, 270, 96, 96, True, True), (6, 0, 3)),
}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", sampled(BACKWARDS_CASES))
def test_a_fixed_order_that_ends_backwards_is_as_right(
    case: str, mode: Mode, folder: Path, generator: torch.Generator
) -> None:
    """A section has one head, so the last one goes from the first keys to the last; memory nobody writes is NaN."""
    facts, cut = BACKWARDS_CASES[case]
    backwards = {"heads_together": 1, "heads_at_last": 0}
    check(facts, folder, generator, cut=None if cut is None else Cut(*cut), mode=mode, **backwards)


# facts as above, heads of a section and of the last one
LAST_SECTIONS: dict[str, tuple[tuple[Any, ...], int, int]] = {
    "one-one-two-gqa2-d128": (("causal", torch.bfloat16, 8, 4, 270, 270, 128, 128, False, True), 1, 2),
    "one-two-two-one-d64": (("causal", torch.bfloat16, 6, 6, 200, 300, 64, 64, True, True), 2, 1),
    "all-in-the-last-gqa2-d96": (("causal", torch.float16, 6, 3, 270, 270, 96, 96, True, True), 1, 4),
    "one-two-d256": (("causal", torch.bfloat16, 3, 3, 150, 300, 256, 256, False, True), 1, 2),
}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", sampled(LAST_SECTIONS))
def test_the_last_section_of_a_fixed_order_has_heads_of_its_own(
    case: str, mode: Mode, folder: Path, generator: torch.Generator
) -> None:
    facts, together, at_last = LAST_SECTIONS[case]
    sections = {"heads_together": together, "heads_at_last": at_last}
    check(facts, folder, generator, cut=None, mode=mode, **sections)


CLAIMED: dict[str, Any] = BULK | STAY | {"dq_begins": "claim"}
# facts as above, changes of the tiling, which tiles are cut, batch
CLAIMED_CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[int, int, int] | None, int]] = {
    "plain-ragged": (("plain", torch.bfloat16, 2, 2, 250, 270, 128, 128, True, False), CLAIMED, None, 1),
    "causal-gqa2-batch2": (("causal", torch.bfloat16, 4, 2, 200, 300, 128, 128, True, False), CLAIMED, None, 2),
    "plain-cut-batch2": (("plain", torch.bfloat16, 2, 1, 250, 270, 128, 128, False, False), CLAIMED, (6, 2, 2), 2),
    "blocks-that-leave": (
        ("plain", torch.float16, 1, 1, 170, 400, 128, 128, False, False),
        CLAIMED | {"persistent": False},
        None,
        1,
    ),
    "short-causal": (
        ("causal", torch.bfloat16, 2, 2, 170, 170, 128, 128, False, False),
        CLAIMED | {"tile_m": 64},
        None,
        1,
    ),
    "many-queries-on-few-keys": (
        ("plain", torch.bfloat16, 1, 1, 330, 150, 72, 72, False, False),
        CLAIMED | {"persistent": False, "tile_m": 64},
        None,
        1,
    ),
}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", sampled(CLAIMED_CASES))
def test_who_comes_first_writes_dq_in_any_order(
    case: str, mode: Mode, folder: Path, generator: torch.Generator
) -> None:
    facts, changes, cut, batch = CLAIMED_CASES[case]
    target = dataclasses.replace(HOPPER, sms=3)
    check(facts, folder, generator, target, None if cut is None else Cut(*cut), mode, batch, **changes)


def test_who_writes_where_another_one_was_is_found(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dq_claims, "_claim", lambda place, condition: Int32(1))
    facts, changes, _, _ = CLAIMED_CASES["blocks-that-leave"]
    with pytest.raises(AssertionError, match="dq"):
        check(facts, tmp_path, generator, mode=random_mode(3), **changes)


def test_who_adds_where_another_one_has_not_written_yet_is_found(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims are made before the part is there, so that there is time for it."""

    def claim(place: Any) -> Any:
        return cute.arch.make_warp_uniform(dq_claims._claim(place, cute.arch.lane_idx() == 0))

    monkeypatch.setattr(dq_sender, "look", claim)
    monkeypatch.setattr(dq_sender, "is_first", lambda place, first, lane: first)
    facts, changes, _, _ = CLAIMED_CASES["blocks-that-leave"]
    with pytest.raises(AssertionError, match="dq"):
        check(facts, tmp_path, generator, mode=random_mode(3), **changes)


def test_whose_turn_is_not_the_first_does_not_write_over_dq(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HopperBackwardBlock, "is_first", lambda self, slot: Int32(1))
    with pytest.raises(AssertionError, match="dq"):
        check(("plain", torch.bfloat16, 1, 1, 100, 270, 96, 96, True, True), tmp_path, generator)


@pytest.mark.parametrize("mods", ["halves", "two-runs"])
def test_queries_that_no_key_is_seen_by_have_no_gradient(mods: str, folder: Path, generator: torch.Generator) -> None:
    """Heads, or runs of queries, have as many tiles together as there are, but nobody writes to some of dQ."""
    check((mods, torch.bfloat16, 2, 2, 320, 150, 128, 128, False, True), folder, generator)


# facts as above: in bulk with a warp that waits, pairs, and with consumers that do
FIXED_ORDER: dict[str, tuple[Any, ...]] = {
    "bulk-d96": ("plain", torch.float16, 1, 1, 200, 400, 96, 96, False, True),
    "pairs-d256": ("plain", torch.float16, 1, 1, 100, 500, 256, 256, False, True),
    "registers-d64": ("relative", torch.float16, 1, 1, 150, 400, 64, 64, False, True),
}
ORDERS = EAGER, LATE, random_mode(1), random_mode(2)  # other blocks go on first


@pytest.mark.parametrize("case", sampled(FIXED_ORDER))
def test_a_fixed_order_gives_the_same_bits_whichever_block_goes_on(
    case: str, folder: Path, generator: torch.Generator
) -> None:
    assert not _differ(case, folder, generator)


@pytest.mark.parametrize("case", sampled(FIXED_ORDER))
def test_who_does_not_wait_for_its_turn_gives_other_bits(
    case: str, tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dq_semaphore, "wait_for", lambda turn, wanted: None)
    assert _differ(case, tmp_path, generator)


def test_who_adds_before_the_first_has_written_is_found(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that stay draw their tiles as they begin, so only where one is overtaken behind that."""
    monkeypatch.setattr(dq_semaphore, "wait_for", lambda turn, wanted: None)
    with pytest.raises(AssertionError, match="dq"):
        for number in range(1, 9):
            check(FIXED_ORDER["bulk-d96"], tmp_path, generator, mode=random_mode(number))


def _differ(case: str, folder: Path, generator: torch.Generator) -> list[str]:
    """The modes in which gradients have other bits than in eager mode."""
    state, facts, adding = generator.get_state(), FIXED_ORDER[case], {"dq_begins": "before"}
    first, *others = (check(facts, folder, generator.set_state(state), mode=mode, **adding) for mode in ORDERS)
    pairs = zip(ORDERS[1:], others, strict=True)
    return [str(mode) for mode, found in pairs if not all(map(torch.equal, first, found))]


PAIR_CASES: dict[str, tuple[Any, ...]] = {
    "plain-ragged-d512": ("plain", torch.bfloat16, 1, 1, 70, 77, 512, 512, True, False),
    "causal-gqa2-d320-dv264": ("causal", torch.bfloat16, 2, 1, 150, 150, 320, 264, True, False),
    "window-d512-in-order": ("window", torch.float16, 1, 1, 200, 200, 512, 512, False, True),
    "softcap-gqa2-d512-dv64": ("softcap", torch.bfloat16, 2, 1, 130, 130, 512, 64, True, False),
    "relative-d40-dv512": ("relative", torch.bfloat16, 1, 1, 100, 130, 40, 512, True, False),
    "hidden-d264-dv8": ("hidden", torch.bfloat16, 1, 1, 60, 150, 264, 8, True, False),
}


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("case", sampled(PAIR_CASES))
def test_pairs_of_blocks_with_half_of_the_columns_match_fp64(
    case: str, mode: Mode, folder: Path, generator: torch.Generator
) -> None:
    check(PAIR_CASES[case], folder, generator, mode=mode)


EXCHANGE_CASES: dict[str, tuple[Any, ...]] = {
    "plain-ragged-d256": ("plain", torch.bfloat16, 2, 1, 100, 150, 256, 256, True, False),
    "plain-ragged-d144": ("plain", torch.bfloat16, 1, 1, 100, 150, 144, 144, True, False),
    "causal-gqa2-d192-dv128": ("causal", torch.bfloat16, 4, 2, 150, 300, 192, 128, True, False),
    "window-d192-dv128": ("window", torch.float16, 2, 2, 200, 200, 192, 128, False, False),
    "hidden-d192-dv128": ("hidden", torch.bfloat16, 1, 1, 60, 150, 192, 128, True, False),
    "keys-of-one-block-d256": ("plain", torch.bfloat16, 1, 1, 100, 50, 256, 256, False, False),
    "softcap-gqa2-d256": ("softcap", torch.bfloat16, 2, 1, 150, 150, 256, 256, True, False),
    "alibi-d192-dv128": ("alibi", torch.float16, 2, 2, 150, 200, 192, 128, True, False),
    "causal-gqa2-d256-in-order": ("causal", torch.bfloat16, 2, 1, 200, 300, 256, 256, True, True),
    "plain-ragged-d192-dv128-in-order": ("plain", torch.bfloat16, 2, 2, 150, 290, 192, 128, True, True),
    "window-d192-dv128-in-order": ("window", torch.float16, 1, 1, 330, 330, 192, 128, False, True),
}


@pytest.mark.parametrize("mode", [*MODES[:1], pytest.param(LATE, marks=pytest.mark.slow), *MODES[2:]], ids=str)
@pytest.mark.parametrize("case", sampled(EXCHANGE_CASES))
def test_pairs_of_blocks_that_exchange_gradients_match_fp64(
    case: str, mode: Mode, folder: Path, generator: torch.Generator
) -> None:
    check(EXCHANGE_CASES[case], folder, generator, mode=mode)


def test_gradients_are_sent_to_the_other_block_when_it_has_read_the_last_ones(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own block's reads are not enough."""

    def arrive_here(self: BothWarps, barriers: Any, stage: Any, lane: Any) -> None:
        Warps(self.count).arrive(barriers, stage, lane)

    monkeypatch.setattr(BothWarps, "arrive", arrive_here)
    monkeypatch.setattr(BothWarps, "arrivals", property(lambda self: self.count))
    with pytest.raises(SharedRace, match="that nothing orders before this access"):
        check(("plain", torch.bfloat16, 1, 1, 300, 150, 256, 256, False, False), tmp_path, generator, mode=LATE)


def test_a_part_of_the_scores_waits_until_the_one_before_was_read(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other block may still add it up."""
    add = PairSums.add

    def hasty(self: PairSums, *given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self.edge, "wait_empty", lambda slot: None)
            add(self, *given)

    monkeypatch.setattr(PairSums, "add", hasty)
    with pytest.raises(SharedRace, match="that nothing orders before this access"):
        check(PAIR_CASES["plain-ragged-d512"], tmp_path, generator, mode=random_mode(1))


def check(
    case: Any,
    folder: Path,
    generator: torch.Generator,
    target: Target = HOPPER,
    cut: Cut | Literal["auto"] | None = "auto",
    mode: Mode = EAGER,
    batch: int = 1,
    **changes: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients, which are as close to fp64 as they have to be."""
    mods, dtype, heads, kv_heads, q_len, kv_len, d, dv, through_lse, in_order = (
        CASES[case] if isinstance(case, str) else case
    )
    score, mask = MODS[mods]
    program = Program(None if score is None else Score.of(score).expr, None if mask is None else Mask.of(mask).expr)

    def draw(*shape: int) -> torch.Tensor:
        return outlier_normal(batch, *shape, generator=generator, dtype=dtype)

    q, k, v = draw(heads, q_len, d), draw(kv_heads, kv_len, d), draw(kv_heads, kv_len, dv)
    dout, dlse = draw(heads, q_len, dv), torch.randn(batch, heads, q_len, generator=generator)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    scale = d**-0.5
    out, lse = reference.attention(*exact, score=program.score, mask=program.mask, scale=scale)
    loss = (out * dout.double()).sum()
    if through_lse:
        loss = loss + torch.where(lse == -math.inf, 0.0, lse * dlse.double()).sum()
    wanted = torch.autograd.grad(loss, exact)

    stream = Stream()

    def kernel_of(plan: Plan) -> Any:
        kernel = captured(plan, folder)
        return lambda *given: stream.run(kernel.program, kernel.launch(*given, dynamic_shared=plan.shared_memory), mode)

    given: dict[str, Any] = {"has_dlse": through_lse, "deterministic": in_order, "cut": cut}
    plans = plan_backward(Problem.of(q, k, v), program, target, **given)
    if changes:
        tiling = retiled(plans.main.tiling, changes)
        plans = plan_backward(Problem.of(q, k, v), program, target, **given, tiling=tiling)
    with poisoned():
        found = BackwardLauncher(plans, kernel_of)(
            q, k, v, out.detach().to(dtype), lse.detach().float(), dout, dlse if through_lse else None, scale,
            [c.tensor for c in program.captures], [s.value for s in program.scalars],
        )  # fmt: skip
    for name, got, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        error = float((got.double() - want).norm() / want.norm())
        # P, dS, O and the result are rounded to the type, each by at most eps / 2 of itself
        print(name, f"{error:.2e}", end=" ")
        assert error <= 2 * torch.finfo(dtype).eps, f"{name}: {error:.2e}"
    return found
