"""The forward of warps, emulated in three modes: right by fp64, and the same bits in each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn import errors
from composattn.backends.fused.planning.facts import FORWARD, Facts
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.target import ADA, AMPERE, TARGETS, Target
from composattn.backends.warp.tiling import TABLES, forward_of
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods.masks import causal, document, sliding_window
from composattn.mods.scores import alibi, softcap
from composattn.testing import Case, assert_attention_close, check, make_case, make_paged_case, make_varlen_case, run
from tests.byte_keys import cases as cases_of_bytes
from tests.support import outlier_normal, planned_as

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
MODES = (EAGER, LATE, random_mode(1))
BIAS, DOCUMENTS, PAIRS = torch.randn(2, 333), torch.arange(333) // 90, torch.randn(333, 333)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask_mod": causal()},
    "window, ALiBi, soft cap": {"score_mod": alibi(2) >> softcap(30.0), "mask_mod": causal() & sliding_window(100)},
    "captured": {"score_mod": lambda s, b, h, q, kv: s + BIAS[h, kv]},
    "pairs": {"score_mod": lambda s, b, h, q, kv: s + PAIRS[q, kv]},
    "documents": {"mask_mod": document(DOCUMENTS) & causal()},
    "listed": {"mask_mod": lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv]},
    "sinks": {"mask_mod": causal(), "sinks": torch.tensor([0.5, -1.0])},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
}
SIZES = {
    "64": (333, 64, 64), "128": (200, 128, 128), "256": (200, 256, 256), "192/128": (200, 192, 128),
    "72/40": (100, 72, 40),
}  # fmt: skip
DEFAULT = {("plain", "72/40"), ("causal", "128"), ("window, ALiBi, soft cap", "72/40")}
ALL = [
    pytest.param(mods, size, marks=[] if (mods, size) in DEFAULT else [pytest.mark.slow])
    for mods in CASES
    for size in SIZES
]


@pytest.mark.parametrize(("mods", "size"), ALL)
def test_all_modes_give_the_same_right_numbers(mods: str, size: str, generator: torch.Generator) -> None:
    length, d, dv = SIZES[size]
    dtype = torch.float16 if size == "72/40" else torch.bfloat16
    draw = functools.partial(outlier_normal, generator=generator, dtype=dtype)
    q, k, v = draw(1, 2, length, d), draw(1, 1, length, d), draw(1, 1, length, dv)
    results = []
    for mode in MODES:
        with emulating(mode):
            results.append(ca.attention(q, k, v, **CASES[mods], backend="warp-emulated", return_lse=True))
    out, lse = results[0]
    wanted = dict(CASES[mods])
    dropout = wanted.pop("dropout_p", 0.0), wanted.pop("dropout_seed", 0)
    assert_attention_close({"out": out, "lse": lse}, Case(q, k, v, **wanted, dropout=dropout))
    for other, its_lse in results:
        assert torch.equal(other, out) and torch.equal(its_lse, lse)


LAYOUTS: dict[str, Callable[[], Case]] = {
    "packed": lambda: make_varlen_case(
        0, [150, 0, 300, 37], [150, 20, 300, 5], heads=4, kv_heads=2, mask_mod=causal(), **BF16
    ),
    "packed, few queries": lambda: make_varlen_case(0, [15, 0, 30, 37], heads=8, kv_heads=2, **BF16),
    "pages": lambda: make_paged_case(0, [300, 0, 37], page_size=64, q_len=5, heads=4, kv_heads=2, **BF16),
    "small pages": lambda: make_paged_case(1, [150, 17], page_size=16, q_len=70, mask_mod=causal(), **BF16),
    "parts": lambda: make_case(0, heads=4, kv_heads=1, q_len=3, kv_len=700, **BF16),
    "three heads a group": lambda: make_case(0, heads=6, kv_heads=2, q_len=11, kv_len=130, **BF16),
}


@pytest.mark.parametrize(
    "lies", [pytest.param(name, marks=[] if name == "small pages" else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_sequences_lie_as_they_like(lies: str) -> None:
    case = LAYOUTS[lies]()
    schedule = ca.Schedule(split_kv=3 if lies == "parts" else "auto")
    attend = functools.partial(ca.attention, backend="warp-emulated", schedule=schedule)
    for mode in MODES:
        with torch.no_grad(), emulating(mode):
            check(attend, dataclasses.replace(case, dout=None, dlse=None))


MORE: tuple[dict[str, Any], ...] = (
    {"tile_m": 64, "tile_n": 32, "warp_rows": 16, "stages": 2},
    {"tile_m": 128, "tile_n": 32, "warp_rows": 32, "stages": 2},
)
"""Tiles that the table may come to have."""


@pytest.mark.slow
@pytest.mark.parametrize("said", [*MORE, *(row.says for row in TABLES["forward"])], ids=str)
def test_every_tile_gives_right_numbers(said: dict[str, Any], generator: torch.Generator) -> None:
    d = 64  # 32 keys of fewer columns are less than eight warps copy at once
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 2, 150, d), draw(1, 1, 300, d), draw(1, 1, 300, d)
    problem = Problem.of(q, k, v)
    program = ca.Attention(mask_mod=causal()).program
    tiling = forward_of(said, Facts(FORWARD, problem, program))
    plan = plan_forward(problem, program, AMPERE, tiling=tiling)
    for mode in MODES:
        with emulating(mode):
            out, lse, _ = EmulatedForward(plan)(q, k, v, d**-0.5, [])
        assert_attention_close({"out": out, "lse": lse}, Case(q, k, v, mask_mod=causal()))


FEW = dataclasses.replace(AMPERE, sms=3)  # so that persistent blocks walk over several tiles each


def test_persistent_blocks_give_the_bits_of_a_block_a_tile(generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 3, 300, 64), draw(1, 1, 300, 64), draw(1, 1, 300, 64)
    program, found = ca.Attention(mask_mod=causal() & sliding_window(130)).program, []
    for persistent in (False, True):
        problem = dataclasses.replace(Problem.of(q, k, v), schedule=ca.Schedule(persistent=persistent))
        plan = plan_forward(problem, program, FEW)
        assert plan.tiling.persistent is persistent
        for mode in MODES[:2]:
            with emulating(mode):
                found.append(EmulatedForward(plan)(q, k, v, 0.125, [])[:2])
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


IN_BULK = dataclasses.replace(TARGETS[12, 0], sms=3)
LIES = {name: made for name, made in LAYOUTS.items() if "pages" not in name}
STAYS = ca.Schedule(persistent=True)
BULK_CALLS: dict[str, tuple[Callable[[], Case], ca.Schedule]] = {
    "causal, D 72/40": (lambda: make_case(0, q_len=150, dim=72, v_dim=40, mask_mod=causal(), **BF16), ca.Schedule()),
    "blocks that stay": (lambda: make_case(0, batch=2, q_len=300, dim=64, mask_mod=causal(), **BF16), STAYS),
    "few queries, blocks that stay": (lambda: make_case(0, heads=8, q_len=3, kv_len=300, dim=64, **BF16), STAYS),
    "a window, D 128": (
        lambda: make_case(0, batch=1, q_len=200, dim=128, mask_mod=sliding_window(70), **BF16), ca.Schedule()
    ),
    **{name: (made, ca.Schedule(split_kv=3 if name == "parts" else "auto")) for name, made in LIES.items()},
}  # fmt: skip


@pytest.mark.parametrize(
    "call", [pytest.param(n, marks=[] if n == "blocks that stay" else [pytest.mark.slow]) for n in BULK_CALLS]
)
def test_tiles_in_bulk_give_the_bits_of_tiles_by_lines(call: str) -> None:
    make, schedule = BULK_CALLS[call]
    case, found = make().without_gradients(), []
    attend = functools.partial(ca.attention, backend="warp-emulated", schedule=schedule)
    for in_bulk, modes in ((False, MODES[:1]), (True, MODES)):
        with planned_as("warp-emulated", dataclasses.replace(IN_BULK, copies_in_bulk=in_bulk)):
            for mode in modes:
                with torch.no_grad(), emulating(mode):
                    found.append(run(attend, case))
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


WARP = [t for t in TARGETS.values() if t.backend == "warp"]


@pytest.mark.parametrize("target", WARP, ids=lambda t: t.arch)
def test_tiles_fit_into_an_sm_of_every_gpu(target: Target) -> None:
    for d in range(8, 257, 8):
        for queries in (1, 8, 4096):
            problem = Problem(2, 16, 4, queries, 8192, d, 264 - d, torch.bfloat16, torch.device("cpu"))
            tiling = plan_forward(problem, ca.Attention(mask_mod=causal()).program, target).tiling
            assert tiling.fits(target)
            assert tiling.shared_memory <= target.shared_memory


@pytest.mark.parametrize(("d", "dv"), [(200, 200), (232, 24)])
def test_lines_of_fewer_columns_than_eight_warps_copy_have_blocks_of_four(
    d: int, dv: int, generator: torch.Generator
) -> None:
    """In 99 KB tiles of so many columns have 32 keys: eight warps would copy 64 rows at once."""
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 1, 100, d), draw(1, 1, 70, d), draw(1, 1, 70, dv)
    plan = plan_forward(Problem.of(q, k, v), ca.Attention(mask_mod=causal()).program, ADA)
    assert (plan.tiling.tile_n, plan.tiling.warps) == (32, 4)  # type: ignore[attr-defined]
    out, lse, _ = EmulatedForward(plan)(q, k, v, d**-0.5, [])
    assert_attention_close({"out": out, "lse": lse}, Case(q, k, v, mask_mod=causal()))


EIGHT_BITS = cases_of_bytes(300, "cpu")
IN_PAGES = [name for name in EIGHT_BITS if "pages" in name]
AS_SIXTEEN = ("one query, D 128", "parts of kv, fp16, e5m2", "a batch-invariant query", "packed")


@pytest.mark.parametrize("name", AS_SIXTEEN)
def test_keys_and_values_of_8_bits_are_made_16_bit_numbers_before_the_kernel(name: str) -> None:
    case, options = EIGHT_BITS[name]()
    check(functools.partial(ca.attention, backend="warp-emulated", **options), case)


@pytest.mark.parametrize("name", IN_PAGES)
def test_keys_and_values_of_8_bits_in_pages_are_refused_with_what_would_work(name: str) -> None:
    case, options = EIGHT_BITS[name]()
    with pytest.raises(errors.UnsupportedDType, match=r"in pages have no kernel on warp yet; dequantise.*streaming"):
        check(functools.partial(ca.attention, backend="warp-emulated", **options), case)


def test_an_image_is_not_cut_into_strips_and_explain_says_why(generator: torch.Generator) -> None:
    side = 24
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = (draw(1, 1, side * side, 64) for _ in range(3))

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q % side - kv % side).abs() <= 3) & ((q // side - kv // side).abs() <= 3)

    attend = ca.Attention(mask_mod=near, backend="warp-emulated")
    said = str(ca.Attention(mask_mod=near, backend="warp").explain(q, k, v))
    assert "strips: nothing, as the copies of warp bring no boxes of an image" in said
    assert_attention_close({"out": attend(q, k, v)}, Case(q, k, v, mask_mod=near))


def test_more_columns_than_256_are_refused() -> None:
    q = torch.randn(1, 1, 8, 264, dtype=torch.bfloat16)
    with pytest.raises(errors.UnsupportedHeadDim, match="up to 256, got 264"):
        ca.attention(q, q, q, backend="warp-emulated")


def test_a_row_has_the_same_bits_alone_and_among_many(generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 2, 150, 64), draw(1, 1, 150, 64), draw(1, 1, 150, 64)
    attend = functools.partial(
        ca.attention,
        backend="warp-emulated",
        schedule=ca.Schedule(batch_invariant=True),
        mask_mod=causal("bottom_right"),
    )
    assert torch.equal(attend(q[:, :, -1:], k, v), attend(q, k, v)[:, :, -1:])
