"""The Hopper forward whose products are of 8 bits, in the emulator: right with all mods, and planted bugs are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

from cutlass import Float32

import composattn as ca
from composattn.analysis.program import Program
from composattn.backends.fused.compiling.generated import kernel_of as generated
from composattn.backends.fused.compiling.passes import switches
from composattn.backends.fused.kernels.registers.group_rows import GroupRows
from composattn.backends.fused.planning.plan import Plan, plan_forward
from composattn.backends.fused.running import emulated
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.target import HOPPER
from composattn.backends.hopper import eight_bits, forward, forward_fp8, fp8_tiling, promoting_rows, turning, wgmma
from composattn.backends.hopper.fp8_tiling import FP8, LARGEST, Fp8Tiling
from composattn.call.problem import Problem
from composattn.call.scales import rows_of, scaled_values
from composattn.emulator.capture import Captured
from composattn.emulator.findings import Finding
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.emulator.text import compile_ptx
from composattn.graph.factors import scales_of
from composattn.mods import alibi, causal, document, sliding_window, softcap
from composattn.primitives import emit_scales
from composattn.primitives.rescale_threshold import ALWAYS_RESCALE, RescaleThreshold
from composattn.testing.tolerance import Case, check

Planted = tuple[type, str, Callable[[Any], Any]]  # where, which method, and what it is in place of the right one

E4M3 = torch.float8_e4m3fn
HQ, H = 4, 2
attention = partial(ca.attention, backend="hopper-emulated")


def fp8_case(
    d: int = 64,
    dv: int | None = None,
    lengths: tuple[int, int] = (150, 200),
    mean: float = 1.0,
    grows: float = 1.0,
    how: dict[str, Any] | None = None,
    **given: Any,
) -> Case:
    """A call of what ca.quantize makes, a scale for each head unless `how` says otherwise.

    V has a mean, which sums of few bits would lose. Keys and values of each 32 rows are `grows` times as large as those
    before, so that scales of blocks differ.
    """
    make = torch.Generator().manual_seed(d)
    q = torch.randn(1, HQ, lengths[0], d, generator=make)
    k = torch.randn(1, H, lengths[1], d, generator=make)
    v = torch.randn(1, H, lengths[1], dv or d, generator=make) + mean
    sizes = grows ** (torch.arange(lengths[1]) // 32)[:, None]
    made = ca.quantize(q, k * sizes, v * sizes.flip(0), center=False, **how or {})
    of = tuple(x.scale[:, :, 0, 0] if how is None else x.scale for x in made if x.scale is not None)
    return dataclasses.replace(
        Case(*(x.data for x in made), scales=of, out_dtype=torch.bfloat16),  # type: ignore[arg-type]
        **given,
    )


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of the forward plans that are launched."""
    steps: list[str] = []
    made = EmulatedForward.__init__

    def noted(self: Any, plan: Any, *more: Any) -> None:
        steps.append(plan.step)
        made(self, plan, *more)

    monkeypatch.setattr(EmulatedForward, "__init__", noted)
    return steps


@pytest.fixture
def by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are divided by sums of rounded weights, which products add up: a form that no call gets."""
    monkeypatch.setattr(fp8_tiling, "MOST_ROUNDED", 1024)


MODS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask_mod": causal()},
    "a window of ALiBi": {"mask_mod": causal() & sliding_window(60), "score_mod": alibi(HQ)},
    "a soft cap": {"mask_mod": causal(), "score_mod": softcap(3.0)},
    "documents": {"mask_mod": document(torch.arange(200) // 70)},
    "sinks": {"sinks": torch.linspace(-1.0, 2.0, HQ), "mask_mod": causal()},
    "dropout": {"dropout": (0.25, 3)},
}


@pytest.mark.parametrize("mods", MODS.values(), ids=MODS)
def test_mods_see_true_scores(mods: dict[str, Any], multiplied: list[str]) -> None:
    check(attention, fp8_case(**mods))
    assert multiplied == [FP8]


DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (80, 48)]


@pytest.mark.parametrize(
    "d,dv", [pytest.param(*dims, marks=[] if dims[0] in (80, 256) else pytest.mark.slow) for dims in DIMS]
)
def test_every_head_dimension_is_right(d: int, dv: int, multiplied: list[str]) -> None:
    check(attention, fp8_case(d, dv, (130, 300), mask_mod=causal()))
    assert multiplied == [FP8]


def test_packed_sequences_are_right(multiplied: list[str]) -> None:
    case = fp8_case()
    ends = torch.tensor([0, 40, 150], dtype=torch.int32)
    q, k, v = (t[0, :, :150].transpose(0, 1).contiguous() for t in (case.q, case.k, case.v))
    scales = tuple(s[0] for s in case.scales)
    packed = dataclasses.replace(case, q=q, k=k, v=v, scales=scales, varlen=ca.Varlen(ends))
    check(attention, packed)
    assert multiplied == [FP8]


def test_an_output_of_fp16_is_that_of_bf16_with_more_digits() -> None:
    case = fp8_case()
    given: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), case.scales, strict=True))
    wide, narrow = (
        attention(case.q, case.k, case.v, **given, out_dtype=dtype) for dtype in (torch.float16, torch.bfloat16)
    )
    assert wide.dtype is torch.float16 and narrow.dtype is torch.bfloat16
    assert (wide - narrow).abs().max() <= 2.0**-8 * narrow.abs().max()


@pytest.mark.parametrize("mode", [LATE, random_mode(1), random_mode(2)], ids=["late", "random 1", "random 2"])
def test_no_order_of_warps_changes_the_output(mode: Mode) -> None:
    case = fp8_case(mask_mod=causal())
    with emulating(EAGER):
        expected = attention(case.q, case.k, case.v, q_scale=1.0, mask_mod=causal())
    with emulating(mode):
        assert torch.equal(attention(case.q, case.k, case.v, q_scale=1.0, mask_mod=causal()), expected)


def test_scales_of_channels_of_v_are_right() -> None:
    case = fp8_case(80, 48)
    of_channels = torch.linspace(0.5, 1.5, H * 48).view(1, H, 48)
    check(attention, dataclasses.replace(case, scales=(*case.scales[:2], of_channels)))


def without_lse(*tensors: torch.Tensor, return_lse: bool, **how: Any) -> Any:
    """The output by sums of rounded probabilities, which products add up; an LSE that is right beside it."""
    assert return_lse
    return attention(*tensors, **how), ca.attention(*tensors, **how, return_lse=True, backend="reference")[1]


ROUNDED = [name for name in MODS if name != "dropout"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "sinks" else pytest.mark.slow) for n in ROUNDED])
def test_exponentials_of_degree_1_are_as_near_as_p_of_e4m3(name: str, multiplied: list[str], by_products: None) -> None:
    check(without_lse, fp8_case(**MODS[name]))
    assert multiplied == [FP8]


@pytest.mark.slow
@pytest.mark.parametrize("d", [96, 128, 192])
def test_exponentials_of_degree_1_are_right_at_other_head_dimensions(
    d: int, multiplied: list[str], by_products: None
) -> None:
    check(without_lse, fp8_case(d, lengths=(130, 300), mask_mod=causal()))
    assert multiplied == [FP8]


def test_no_rows_are_divided_by_rounded_weights() -> None:
    """Equal ones are rounded alike, and small ones lost (`benchmarks/eight_bits.py --shares`)."""

    def rounds_sums(keys: int, lse: bool) -> bool:
        problem = Problem(1, HQ, H, keys, keys, 64, 64, torch.bfloat16, torch.device("cpu"), narrow=(E4M3,) * 3)
        return plan_forward(problem, Program(None, None), HOPPER, return_lse=lse).tiling.rounds_sums

    assert not any(rounds_sums(keys, lse) for keys in (100, 1024, 131072) for lse in (False, True))


@pytest.mark.parametrize(
    "d", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(192, marks=pytest.mark.slow)]
)
def test_rows_divided_by_all_weights_are_right_where_no_lse_is_asked_for(d: int, multiplied: list[str]) -> None:
    check(without_lse, fp8_case(d, lengths=(130, 300), mask_mod=causal()))
    assert multiplied == [FP8]


BLOCKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of 64": ({"block": 64}, {}),
    "of 32 keys, causal": ({"block": 32}, {"mask_mod": causal()}),
    "of 128, powers of two": ({"block": 128, "power_of_two": True}, {"d": 80, "dv": 48, "lengths": (130, 300)}),
    "of 128 under ALiBi": ({"block": 128}, {"mask_mod": causal(), "score_mod": alibi(HQ), "lengths": (200, 300)}),
    "of 64 under ALiBi": ({"block": 64}, {"mask_mod": causal(), "score_mod": alibi(HQ)}),
    "of 64 in tiles of 96 keys": ({"block": 64}, {"d": 192, "dv": 128, "lengths": (130, 300)}),
}


@pytest.mark.parametrize(
    "name", [name if name == "of 64" else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]
)
def test_scales_of_blocks_are_right(name: str, multiplied: list[str]) -> None:
    how, given = BLOCKS[name]
    check(without_lse, fp8_case(grows=2.0, how={"scale": "block", "power_of_two": False, **how}, **given))
    assert multiplied == [FP8]


def test_scales_of_blocks_are_right_where_the_softmax_adds_up(multiplied: list[str]) -> None:
    """In parts of the keys, with LSE and the largest scores, which are those of scores alone."""
    case = fp8_case(grows=2.0, lengths=(70, 400), how={"scale": "block"}, sinks=torch.linspace(-1.0, 2.0, HQ))
    check(partial(attention, schedule=ca.Schedule(split_kv=2)), case)
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), case.scales, strict=True))
    top, exact = (
        ca.attention(case.q, case.k, case.v, **scales, return_max_scores=True, backend=backend)[1]
        for backend in ("hopper-emulated", "reference")
    )
    assert (top - exact).abs().max() < 2e-3 * exact.abs().max()
    assert set(multiplied) == {FP8}


def test_scales_of_blocks_are_right_where_heads_share_a_tile(multiplied: list[str]) -> None:
    """16 query heads of 2, 20 queries each: a thread has rows of several heads, whose keys are the same."""
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, n, 64, generator=make) for h, n in ((16, 20), (2, 200), (2, 200)))
    sizes = 2.0 ** (torch.arange(200) // 32)[:, None]
    made = ca.quantize(q, k * sizes.sqrt(), v * sizes.flip(0) + 1.0, center=False, scale="block", power_of_two=False)
    case = Case(*(x.data for x in made), scales=tuple(x.scale for x in made), out_dtype=torch.bfloat16)
    check(attention, case)
    assert multiplied == [FP8]


def test_blocks_with_no_value_but_0_and_scales_of_0_are_right() -> None:
    case = fp8_case(how={"scale": "block"})
    q_scale, k_scale, v_scale = (scale.clone() for scale in case.scales)
    v_scale[:, :, 1], k_scale[:, :, 0], q_scale[:, :, 2] = 0.0, 0.0, 0.0
    case = dataclasses.replace(case, scales=(q_scale, k_scale, v_scale))
    check(attention, case)
    check(without_lse, case)


BY_ROW = {"scale": "token", "power_of_two": False}
TOKENS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal ALiBi": {"mask_mod": causal(), "score_mod": alibi(HQ)},
    "a soft cap": {"score_mod": softcap(3.0)},
    "dropout and sinks": {"dropout": (0.25, 3), "sinks": torch.linspace(-1.0, 2.0, HQ)},
    "D 192 and 128": {"d": 192, "dv": 128, "lengths": (130, 300)},
    "D 256": {"d": 256, "lengths": (130, 200)},
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("full", "causal ALiBi") else pytest.param(name, marks=pytest.mark.slow) for name in TOKENS],
)
def test_scales_of_each_row_are_right(name: str, multiplied: list[str]) -> None:
    check(attention, fp8_case(grows=2.0, how=BY_ROW, **TOKENS[name]))
    assert multiplied == [FP8]


@pytest.mark.parametrize("of_k", ["k by row", "k by head"])
@pytest.mark.parametrize("of_v", ["v by row", "v by head"])
def test_scales_of_some_rows_and_some_heads_are_right(of_k: str, of_v: str, multiplied: list[str]) -> None:
    by_row, by_head = fp8_case(grows=2.0, how=BY_ROW), fp8_case(grows=2.0)
    k, v = (by_row if "row" in of else by_head for of in (of_k, of_v))
    scales = by_head.scales[0], k.scales[1], v.scales[2]
    case = dataclasses.replace(by_head, k=k.k, v=v.v, scales=scales, mask_mod=causal())
    check(without_lse, case)
    check(without_lse, dataclasses.replace(case, scales=(by_row.scales[0], *scales[1:]), q=by_row.q))
    assert set(multiplied) == {FP8}


def test_scales_of_each_row_are_right_in_packed_sequences(multiplied: list[str]) -> None:
    case = fp8_case(grows=2.0, how=BY_ROW)
    ends = torch.tensor([0, 40, 150], dtype=torch.int32)
    q, k, v, *scales = (t[0, :, :150].transpose(0, 1).contiguous() for t in (case.q, case.k, case.v, *case.scales))
    check(attention, dataclasses.replace(case, q=q, k=k, v=v, scales=tuple(scales), varlen=ca.Varlen(ends)))
    assert multiplied == [FP8]


def test_scales_of_each_row_are_right_in_parts_of_the_keys_and_of_heads_that_share_a_tile(
    multiplied: list[str],
) -> None:
    """With LSE and the largest scores, which are those of scores alone."""
    make = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, h, n, 64, generator=make) for h, n in ((16, 20), (2, 400), (2, 400)))
    sizes = 2.0 ** (torch.arange(400) // 32 % 8)[:, None]
    made = ca.quantize(q, k * sizes.sqrt(), v * sizes.flip(0) + 1.0, center=False, scale="token")
    case = Case(*(x.data for x in made), scales=tuple(x.scale for x in made), out_dtype=torch.bfloat16)
    check(partial(attention, schedule=ca.Schedule(split_kv=2)), case)
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), case.scales, strict=True))
    top, exact = (
        ca.attention(case.q, case.k, case.v, **scales, return_max_scores=True, backend=backend)[1]
        for backend in ("hopper-emulated", "reference")
    )
    assert (top - exact).abs().max() < 2e-3 * exact.abs().max()
    assert set(multiplied) == {FP8}


@pytest.mark.parametrize("mode", [LATE, random_mode(1), random_mode(2)], ids=["late", "random 1", "random 2"])
def test_no_order_of_warps_changes_what_scales_of_each_key_give(mode: Mode) -> None:
    """Scales of five tiles come to memory of four, read behind the release of K's stage."""
    case = fp8_case(grows=2.0, lengths=(130, 600), how=BY_ROW)
    given: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), case.scales, strict=True))
    given["schedule"] = ca.Schedule(split_kv=1)
    with emulating(EAGER):
        expected = attention(case.q, case.k, case.v, **given)
    with emulating(mode):
        assert torch.equal(attention(case.q, case.k, case.v, **given), expected)
    check(partial(attention, schedule=ca.Schedule(split_kv=1)), case)


def test_values_that_are_0_leave_room_for_others() -> None:
    """Where 64 rows of V are 0, products of 8 bits hold the others', which are small, by row and by block."""
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, n, 64, generator=make) for h, n in ((HQ, 150), (H, 200), (H, 200)))
    v = (v + 1) * 2.0**-16
    v[:, :, :128] = 0
    for how in ({"scale": "token"}, {"scale": "block"}, {"scale": "block", "block": 128}):
        made = ca.quantize(q, k, v, center=False, **how)
        case = Case(*(x.data for x in made), scales=tuple(x.scale for x in made), out_dtype=torch.bfloat16)
        check(attention, case)
        check(without_lse, case)


FACTORS: dict[str, tuple[torch.Tensor, Any]] = {
    "of heads": (torch.tensor([1.0, -0.5, 2.0, -1.0]), lambda w: lambda s, b, h, q, kv: s * w[h]),
    "of rows": (torch.linspace(-1.0, 1.0, 150), lambda w: lambda s, b, h, q, kv: s * w[q]),
    "of keys": (torch.linspace(1.0, -1.0, 200), lambda w: lambda s, b, h, q, kv: w[kv] * s),
    "of blocks of keys": (torch.tensor([1.0, -1.0, 0.5, -2.0]), lambda w: lambda s, b, h, q, kv: s * w[kv // 64]),
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("given", ["q_scale and k_scale", "k_scale", "no scale"])
def test_what_a_users_own_mod_multiplies_by_may_be_negative(
    factor: tuple[torch.Tensor, Any], given: str, multiplied: list[str]
) -> None:
    """It is no scale, whose softmax would take none below 0."""
    weights, mod = factor
    made = fp8_case(score_mod=mod(weights))
    scales = tuple(x if f"{name}_scale" in given else None for name, x in zip("qkv", made.scales, strict=True))
    check(attention, dataclasses.replace(made, scales=scales))
    assert multiplied == [FP8]


def test_a_negative_scale_is_seen_by_all() -> None:
    case = fp8_case()
    for given in ({"q_scale": -1.0}, {"v_scale": -0.5}):
        with pytest.raises(ca.errors.InvalidScale, match="has -"):
            attention(case.q, case.k, case.v, **given)
    assert attention(case.q, case.k, case.v, q_scale=torch.tensor(-1.0)).isnan().all()
    of_blocks = torch.ones(1, H, 4)
    of_blocks[:, :, 1] = -1.0
    assert attention(case.q, case.k, case.v, q_scale=1.0, k_scale=of_blocks).isnan().all()
    assert attention(case.q, case.k, case.v, q_scale=1.0, v_scale=of_blocks[..., None]).isnan().all()
    with ca.debug_checks(), pytest.raises(ca.errors.InvalidScale, match="k_scale has -1"):
        attention(case.q, case.k, case.v, q_scale=1.0, k_scale=of_blocks)


def test_who_asks_for_lse_gets_that_of_probabilities_before_they_are_rounded() -> None:
    case = fp8_case()
    given: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), case.scales, strict=True))
    out, lse, top = attention(case.q, case.k, case.v, **given, return_lse=True, return_max_scores=True)
    exact = ca.attention(case.q, case.k, case.v, **given, return_lse=True, return_max_scores=True, backend="reference")
    assert (lse - exact[1]).abs().max() < 2e-3 and (top - exact[2]).abs().max() < 2e-3
    assert (out - attention(case.q, case.k, case.v, **given)).abs().max() < 0.05


# --- which calls ---------------------------------------------------------------------------------------------------


def asked(**changes: Any) -> Problem:
    fields: dict[str, Any] = {"narrow": (E4M3,) * 3} | changes
    sizes = [fields.pop(name, size) for name, size in (("q_len", 4096), ("head_dim", 128))]
    return Problem(1, HQ, H, sizes[0], 4096, sizes[1], 128, torch.bfloat16, torch.device("cpu"), **fields)


@pytest.mark.parametrize(
    "changes",
    [{"q_len": 1}, {"head_dim": 120}, {"head_dim": 512}, {"narrow": (torch.float8_e5m2,) * 3},
     {"schedule": ca.Schedule(batch_invariant=True)}],
    ids=str,
)  # fmt: skip
def test_calls_with_no_products_of_8_bits_have_their_queries_widened(changes: dict[str, Any]) -> None:
    assert eight_bits.multiplies_eight_bits(asked())
    assert not eight_bits.multiplies_eight_bits(asked(**changes))


@pytest.mark.parametrize(("keys", "run"), [(1, 1), (16, 1), (32, 32), (2048, 128)])
def test_scales_of_32_keys_or_more_are_those_of_runs_of_keys(keys: int, run: int) -> None:
    tensors = [torch.empty(1, H, 4096, 8)] * 3
    values = scaled_values(rows_of(*tensors, None, None)[2], torch.ones(1, H, 4096 // keys, 1))
    assert scales_of(None, values.expr, 128, lambda node: node.rate)[1].keys == run


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_sums_of_8_bits_are_promoted_every_192_keys(d: int) -> None:
    for mask in (None, causal().expr):
        plan = plan_forward(asked(head_dim=d), Program(None, mask), HOPPER)
        assert isinstance(plan.tiling, Fp8Tiling)
        assert plan.tiling.tile_n <= (192 if d == 64 else 128)


@pytest.mark.parametrize("lag", [0.0, 0.8, 3.0, 4.0, 8.0])
def test_p_fits_into_e4m3_where_its_maximum_lags(lag: float) -> None:
    plan = plan_forward(asked(), Program(), HOPPER)
    tiling = dataclasses.replace(plan.tiling, threshold=RescaleThreshold(lag))
    assert 2.0 ** (tiling.offset + lag) <= LARGEST


# --- planted -------------------------------------------------------------------------------------------------------


@pytest.fixture
def unkept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are made anew and forgotten: a plan says nothing of what a test does to the code."""

    def captured(plan: Plan, folder: Any = None) -> Captured:
        text = compile_ptx(*generated(plan), plan.target.arch, switches(plan))
        return Captured(*generated(plan), plan.target.arch, text)

    monkeypatch.setattr(emulated, "captured", captured)
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("unkept")
def test_warpgroups_pass_by_tiles_that_only_others_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """430 rows, so that of the last tile's two warpgroups have none: the output has the same bits, in any order."""
    mask = causal() & sliding_window(60)
    case = fp8_case(lengths=(430, 430))
    given: dict[str, Any] = dict(zip(("q_scale", "k_scale", "v_scale"), case.scales, strict=True))
    apart: list[bool] = []
    begun = forward.HopperForwardApart.__init__

    def noted(self: Any, plan: Any) -> None:
        begun(self, plan)
        apart.append(self.apart)

    monkeypatch.setattr(forward.HopperForwardApart, "__init__", noted)
    found = []
    for mode in (EAGER, random_mode(1)):
        with emulating(mode):
            found.append(attention(case.q, case.k, case.v, **given, mask_mod=mask))
    assert all(apart)
    monkeypatch.setattr(forward, "BandTiles", ())  # nobody passes by any
    found.append(attention(case.q, case.k, case.v, **given, mask_mod=mask))
    assert not apart[-1]
    for out in found:
        assert torch.equal(out, found[0])


@pytest.mark.usefixtures("unkept")
def test_probabilities_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = wgmma.round_to_e4m3

    def in_columns_order(left: Any, sums: Any, units: Any) -> None:
        swapped = {4: 8, 8: 4, 5: 9, 9: 5}

        class Other:
            def __getitem__(self, at: int) -> Any:
                return sums[at - at % 16 + swapped.get(at % 16, at % 16)]

        right(left, Other(), units)

    monkeypatch.setattr(promoting_rows, "round_to_e4m3", in_columns_order)
    with pytest.raises(AssertionError, match="out is off"):
        check(attention, fp8_case())


@pytest.mark.usefixtures("unkept")
def test_values_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "ODD", turning.EVEN)
    with pytest.raises(AssertionError, match="out is off"):
        check(attention, fp8_case())


@pytest.mark.usefixtures("unkept")
def test_a_fence_that_is_missing_behind_the_turning_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "fence_view_async_shared", lambda: None)
    with pytest.raises(Finding, match=r"fence\.proxy\.async"):
        check(attention, fp8_case())


def without_rows(right: Any) -> Any:
    def wrong(self: Any, scale: Any) -> Any:
        self.of_rows = [None for _ in self.of_rows]
        return right(self, scale)

    return wrong


def with_first_runs(read: emit_scales.ReadScales) -> emit_scales.ReadScales:
    of_runs = read.factors, read.lifts, read.back
    return emit_scales.ReadScales(*(of[:1] * len(of) for of in of_runs))


WRONG_BLOCKS: dict[str, Planted] = {
    "k's and v's of the first block for all": (
        emit_scales.RunScales,
        "get",
        lambda right: lambda self, slot, lane: with_first_runs(right(self, slot, lane)),
    ),
    "scales beside another tile": (
        emit_scales.RunScales,
        "put",
        lambda right: lambda self, found, lane, slot: right(self, found, lane, slot.next()),
    ),
    "none of q": (emit_scales.BoundScales, "of_softmax", without_rows),
    "v's are not taken back": (
        emit_scales.RunScales,
        "get",
        lambda right: lambda self, slot, lane: dataclasses.replace(right(self, slot, lane), back=[Float32(1.0)] * 2),
    ),
}
WRONG_TILES: dict[str, Planted] = {
    "beside another tile": (
        emit_scales.TileScales,
        "put",
        lambda right: lambda self, found, lane, slot: right(self, found, lane, slot.next()),
    ),
    "an output that keeps its unit": (
        emit_scales.TileScales,
        "get",
        lambda right: lambda self, slot, lane: dataclasses.replace(right(self, slot, lane), change=Float32(1.0)),
    ),
    "an output in the unit of the first": (
        emit_scales.TileScales,
        "get",
        lambda right: lambda self, slot, lane: dataclasses.replace(right(self, slot, lane), unit=Float32(1.0)),
    ),
    "none of q": (emit_scales.BoundScales, "of_softmax", without_rows),
}


def hold_found(planted: Planted, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Fails unless a call whose kernel has a planted fault is found."""
    where, method, wrong = planted
    monkeypatch.setattr(where, method, wrong(getattr(where, method)))
    with pytest.raises((AssertionError, Finding), match=r"out is off|that nothing orders"):
        check(without_lse, case)


@pytest.mark.usefixtures("unkept")
@pytest.mark.parametrize("name", WRONG_BLOCKS)
def test_a_scale_of_another_block_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_found(WRONG_BLOCKS[name], monkeypatch, fp8_case(grows=2.0, how={"scale": "block", "power_of_two": False}))


@pytest.mark.usefixtures("unkept")
@pytest.mark.parametrize("name", WRONG_TILES)
def test_a_scale_of_another_tile_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_found(
        WRONG_TILES[name], monkeypatch, fp8_case(grows=1.2, lengths=(130, 300), how={"scale": "block", "block": 128})
    )


WRONG_KEYS: dict[str, Planted] = {
    "in the order of keys": (
        emit_scales.OfKeys,
        "_four",
        lambda right: lambda self, i, first: right(self, i, first)[::-1],
    ),
    "of the first 16 for all": (
        emit_scales.OfKeys,
        "_four",
        lambda right: lambda self, i, first: right(self, i, 0),
    ),
    "where K's stage is": (emit_scales.KeyScales, "_stage", lambda right: lambda self, slot: slot.index),
    "v's are not taken back": (
        emit_scales.OfKeys,
        "back",
        lambda right: lambda self, first: [Float32(1.0)] * self.together,
    ),
    "none of q": (emit_scales.BoundScales, "of_softmax", without_rows),
}


@pytest.mark.usefixtures("unkept")
@pytest.mark.parametrize("name", WRONG_KEYS)
def test_a_scale_of_another_key_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating(LATE):
        hold_found(WRONG_KEYS[name], monkeypatch, fp8_case(grows=1.1, lengths=(130, 600), how=BY_ROW))


class NeverPromotingRows(GroupRows):
    """Rows whose output is summed by the unit over all keys."""

    def round(self, probabilities: Any) -> None:
        wgmma.round_to_e4m3(self.tOrP, probabilities, self.units)


@pytest.mark.usefixtures("unkept")
def test_a_promotion_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case, at_once = fp8_case(lengths=(70, 2000)), partial(attention, schedule=ca.Schedule(split_kv=1))
    check(at_once, case)
    monkeypatch.setattr(forward_fp8.HopperForwardFp8, "group_rows", NeverPromotingRows)
    with pytest.raises(AssertionError, match="out is off"):
        check(at_once, case)


@pytest.mark.usefixtures("unkept")
def test_a_maximum_that_lags_too_far_for_the_offset_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores rise by up to 2^4 from tile to tile, of which the last keys come first."""
    q, k = torch.zeros(1, 1, 70, 64), torch.zeros(1, 1, 600, 64)
    q[..., 0], k[..., 0] = 8.0, torch.arange(599, -1, -1) // 100 * 2.0
    v = torch.randn(1, 1, 600, 64, generator=torch.Generator().manual_seed(0))
    case = Case(*(t.to(E4M3) for t in (q, k, v)), scales=(1.0, 1.0, 1.0), out_dtype=torch.bfloat16)
    lagging = RescaleThreshold(4.0)
    monkeypatch.setattr(fp8_tiling, "ALWAYS_RESCALE", lagging)
    check(attention, case)
    monkeypatch.setattr(Fp8Tiling, "offset", 8.0)
    with pytest.raises(AssertionError, match="out is off"):
        check(attention, case)


def test_a_scale_of_another_head_is_found() -> None:
    case = fp8_case()
    q_scale, k_scale, v_scale = case.scales
    for wrong in ((q_scale, k_scale.flip(1) * 1.05, v_scale), (q_scale, k_scale, v_scale.flip(1) * 1.05)):
        names = ("q_scale", "k_scale", "v_scale")
        of_others = dict(zip(names, wrong, strict=True))
        with pytest.raises(AssertionError, match="is off"):
            check(lambda *t, of_others=of_others, **how: attention(*t, **{**how, **of_others}), case)


def test_the_rescale_is_not_left_out() -> None:
    plan = plan_forward(asked(), Program(), HOPPER)
    assert plan.tiling.threshold == ALWAYS_RESCALE and plan.tiling.offset == 8.0
