"""2-D neighbourhoods in strips of an image's columns: results and gradients of the whole, in the emulator."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.analysis import strips as of_images
from composattn.backends.fused.planning.plan import ForwardPlan, plan_forward
from composattn.backends.fused.planning.plan_backward import plan_backward
from composattn.backends.fused.rewrites import image_costs, rewritten
from composattn.backends.fused.rewrites.posed import Posed
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.target import HOPPER
from composattn.call.problem import Problem
from composattn.call.schedule import Schedule
from composattn.emulator.mode import Mode, random_mode
from composattn.mods import causal, neighborhood, padding
from composattn.mods.mask import Mask
from composattn.testing.tolerance import Case, check
from tests.support import on_few_sms

BF16, FP16 = torch.bfloat16, torch.float16


SAME_COLUMN = Mask.of(lambda b, h, q, kv: q % 48 == kv % 48)  # of all rows


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small images have few tiles to leave out: by a model in which the whole ones are slow they are in strips."""
    slow = {of: cost._replace(pairs=1e6) for of, cost in image_costs.COSTS.items()}
    monkeypatch.setattr(image_costs, "COSTS", slow)


def of_distance(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Along rows and columns of an image of 48 columns."""
    return score - (q // 48 - kv // 48).abs() * (h + 1) / 16 - (q % 48 - kv % 48).abs() / 32


def case(generator: torch.Generator, sizes: tuple[int, ...], dtype: torch.dtype, mask: Any, score: Any = None) -> Case:
    """Four heads on two; queries lie as a projection leaves them (B, S, H, D). With gradients of out and of LSE."""
    batch, length, d, dv = sizes
    q = torch.randn(batch, length, 4, d, generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, 2, length, n, generator=generator).to(dtype) for n in (d, dv))
    dout = torch.randn(batch, 4, length, dv, generator=generator).to(dtype)
    dlse = torch.randn(batch, 4, length, generator=generator)
    return Case(q, k, v, score_mod=score, mask_mod=mask, dout=dout, dlse=dlse)


def planned(problem: Problem, **mods: Any) -> ForwardPlan:
    return plan_forward(problem, ca.Attention(**mods).program, HOPPER)


def in_strips(problem: Problem, direction: Any, **mods: Any) -> bool:
    posed = rewritten(Posed(problem, ca.Attention(**mods).program, HOPPER, direction)).posed
    return posed.problem.layout.strips is not None


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("backend", ["hopper-emulated", pytest.param("blackwell-emulated", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "dtype", "mask", "score"),
    [
        ((1, 9 * 48, 64, 64), BF16, neighborhood((9, 48), 5), None),
        ((2, 10 * 32, 128, 128), BF16, neighborhood((10, 32), (3, 17)), None),
        ((1, 9 * 48, 64, 64), BF16, SAME_COLUMN, None),
        pytest.param(
            (2, 10 * 48, 64, 48),
            FP16,
            neighborhood((10, 48), (7, 5), is_causal=(True, False)),
            of_distance,
            marks=pytest.mark.slow,
        ),
        pytest.param((1, 12 * 16, 32, 32), BF16, neighborhood((12, 16), (4, 3), (3, 1)), None, marks=pytest.mark.slow),
        ((1, 8 * 32, 256, 256), BF16, neighborhood((8, 32), 5), None),
        ((1, 9 * 41, 64, 64), BF16, neighborhood((9, 41), 5), None),
        pytest.param((2, 8 * 40, 128, 128), FP16, neighborhood((8, 40), (3, 7)), None, marks=pytest.mark.slow),
        ((1, 12 * 48, 64, 64), BF16, neighborhood((2, 6, 48), (1, 3, 5)), None),
        pytest.param((1, 16 * 33, 96, 96), BF16, neighborhood((4, 4, 33), 3), None, marks=pytest.mark.slow),
        pytest.param(
            (1, 8 * 32, 192, 192), BF16, neighborhood((8, 32), 7, is_causal=(False, True)), None, marks=pytest.mark.slow
        ),
        ((1, 13 * 36, 64, 64), BF16, neighborhood((13, 36), (5, 13)), None),  # keys begin 10 columns before
        # 16 before: the first strip has no columns alone
        ((1, 8 * 32, 64, 64), BF16, neighborhood((8, 32), (3, 13), is_causal=(False, True)), None),
    ],
)
def test_results_and_gradients_are_those_of_the_whole_image(
    sizes: tuple[int, ...], dtype: torch.dtype, mask: Any, score: Any, backend: str, generator: torch.Generator
) -> None:
    asked = case(generator, sizes, dtype, mask, score)
    shape = Problem.of(asked.q, asked.k, asked.v)
    assert in_strips(shape, "forward", mask_mod=mask, score_mod=score)
    two_blocks_share_keys = sizes[2] == 192  # each has half of a tile, which is no tile of a strip
    assert in_strips(shape, "backward", mask_mod=mask, score_mod=score) != two_blocks_share_keys
    with on_few_sms(backend, 2):  # else tiles of small images run at once, in blocks that leave
        check(partial(ca.attention, backend=backend), asked)


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    ("sizes", "dtype", "mask"),
    [
        ((1, 17 * 24, 64, 64), BF16, neighborhood((17, 24), 5)),
        pytest.param((1, 16 * 27, 128, 64), FP16, neighborhood((16, 27), (3, 7)), marks=pytest.mark.slow),
        pytest.param((1, 16 * 20, 64, 64), BF16, neighborhood((4, 4, 20), (3, 3, 5)), marks=pytest.mark.slow),
    ],
)
def test_strips_of_8_columns_give_results_and_gradients_of_the_whole_image(
    sizes: tuple[int, ...], dtype: torch.dtype, mask: Any, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(of_images, "WIDTHS", (8,))
    asked = case(generator, sizes, dtype, mask)
    for direction in ("forward", "backward"):
        posed = rewritten(Posed(Problem.of(asked.q, asked.k, asked.v), asked.program, HOPPER, direction)).posed
        assert posed.problem.layout.strips is not None and posed.problem.layout.strips.apart == 8
    check(partial(ca.attention, backend="hopper-emulated"), asked)


def of_distance_in_32(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - (q // 32 - kv // 32).abs() * (h + 1) / 16 - (q % 32 - kv % 32).abs() / 32


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    ("sizes", "dtype", "mask", "score"),
    [
        ((2, 14 * 32, 128, 128), BF16, neighborhood((14, 32), (7, 11)), None),
        ((1, 18 * 32, 64, 64), FP16, neighborhood((3, 6, 32), (1, 5, 11)), of_distance_in_32),
        pytest.param((1, 20 * 16, 96, 64), BF16, neighborhood((20, 16), (5, 9)), None, marks=pytest.mark.slow),
        pytest.param((2, 33 * 8, 64, 64), BF16, neighborhood((33, 8), 5), None, marks=pytest.mark.slow),
    ],
)
def test_a_narrow_image_as_one_strip_gives_its_results_and_gradients(
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    mask: Any,
    score: Any,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
) -> None:
    monkeypatch.setattr(of_images, "WIDTHS", ())
    asked = case(generator, sizes, dtype, mask, score)
    for direction in ("forward", "backward"):
        posed = rewritten(Posed(Problem.of(asked.q, asked.k, asked.v), asked.program, HOPPER, direction)).posed
        assert posed.problem.layout.strips is not None and posed.problem.layout.strips.is_whole
    check(partial(ca.attention, backend="hopper-emulated"), asked)
    check(partial(ca.attention, backend="hopper-emulated", deterministic=True), asked)


def by_slope(slopes: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score - (q // 48 - kv // 48).abs() * slopes[h]


def by_table(table: torch.Tensor) -> Any:
    """A bias of each distance along rows and columns, of each head."""
    return lambda score, b, h, q, kv: score + table[h, q // 48 - kv // 48 + 8, q % 48 - kv % 48 + 47]


def by_entry(table: torch.Tensor) -> Any:
    return lambda score, b, h, q, kv: score + table[b, q // 48]


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    ("score", "shape"),
    [(by_slope, (4,)), (by_table, (4, 17, 95)), pytest.param(by_entry, (2, 9), marks=pytest.mark.slow)],
)
def test_tensors_that_a_score_mod_reads_get_the_gradient_of_the_whole_image(
    score: Any, shape: tuple[int, ...], generator: torch.Generator
) -> None:
    tensor = torch.randn(shape, generator=generator).requires_grad_()
    batch = 2 if score is by_entry else 1
    asked = case(generator, (batch, 9 * 48, 64, 64), BF16, neighborhood((9, 48), 5), score(tensor))
    for direction in ("forward", "backward"):
        assert in_strips(
            Problem.of(asked.q, asked.k, asked.v), direction, mask_mod=asked.mask_mod, score_mod=asked.score_mod
        )
    check(partial(ca.attention, backend="hopper-emulated"), asked)


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("backend", ["hopper-emulated", pytest.param("blackwell-emulated", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "mask", "score"),
    [
        ((2, 13 * 32 + 7, 64, 64), neighborhood((14, 32), 3), None),
        ((1, 13 * 41 + 1, 128, 128), neighborhood((14, 41), (3, 5)), None),
        ((1, 12 * 36 + 31, 64, 64), neighborhood((13, 36), (5, 13)), None),  # keys begin 10 columns before
        pytest.param((1, 12 * 48 + 47, 64, 48), neighborhood((14, 48), 3), of_distance, marks=pytest.mark.slow),
        pytest.param((1, 16 * 24 + 9, 128, 128), neighborhood((17, 24), (5, 7)), None, marks=pytest.mark.slow),
        pytest.param((1, 16 * 40 + 16, 256, 256), neighborhood((17, 40), 3), None, marks=pytest.mark.slow),
        pytest.param((1, 21 * 33 + 32, 64, 64), neighborhood((3, 11, 33), 3), None, marks=pytest.mark.slow),
    ],
)
def test_images_whose_last_row_is_cut_are_strips_with_that_row(
    sizes: tuple[int, ...], mask: Any, score: Any, backend: str, generator: torch.Generator
) -> None:
    asked = case(generator, sizes, BF16, mask, score)
    for direction in ("forward", "backward"):
        found = rewritten(Posed(Problem.of(asked.q, asked.k, asked.v), asked.program, HOPPER, direction)).posed
        strips = found.problem.layout.strips
        assert strips is not None and strips.cut is not None
        assert (strips.cut.at, strips.cut.columns) == divmod(sizes[1], strips.columns)
    check(partial(ca.attention, backend=backend), asked)
    call = ca.Attention(mask_mod=mask, score_mod=score, backend=backend)
    exact = ca.Attention(mask_mod=mask, score_mod=score, backend="reference")
    qkv = asked.q, asked.k, asked.v
    out, lse, top = call(*qkv, return_lse=True, return_max_scores=True)
    _, wanted_lse, wanted = exact(*(t.double() for t in qkv), return_lse=True, return_max_scores=True)
    torch.testing.assert_close(top.double(), wanted.double(), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(lse.double(), wanted_lse.double(), atol=1e-3, rtol=1e-5)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(("columns", "rows", "d"), [(48, (9, 24), 64), (32, (8, 16), 128)])
def test_keys_that_no_query_sees_get_no_gradient(
    columns: int, rows: tuple[int, int], d: int, generator: torch.Generator
) -> None:
    """Blocks have several tiles, some with no query; of D 128 K has two places, through which dK leaves."""
    q, dout = (torch.randn(1, 4, rows[0] * columns, d, generator=generator).to(BF16) for _ in range(2))
    k, v = (torch.randn(1, 2, rows[1] * columns, d, generator=generator).to(BF16) for _ in range(2))

    def near(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return ((q // columns - kv // columns).abs() <= 2) & ((q % columns - kv % columns).abs() <= 3)

    asked = Problem.of(q, k, v), ca.Attention(mask_mod=near).program, HOPPER
    assert in_strips(asked[0], "backward", mask_mod=near)
    assert plan_backward(*asked).main.tiling.k_stages == d // 64
    with on_few_sms("hopper-emulated"):
        check(partial(ca.attention, backend="hopper-emulated"), Case(q, k, v, mask_mod=near, dout=dout))


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("mode", [random_mode(2), random_mode(3)], ids=str)
def test_who_adds_gradients_of_keys_waits_for_who_writes_them(mode: Mode, generator: torch.Generator) -> None:
    """Blocks run in an order in which both differ if it does not."""
    q, k, v, dout = (torch.randn(1, 1, 8 * 32, 64, generator=generator).to(BF16) for _ in range(4))
    with on_few_sms("hopper-emulated", 4), emulating(mode):
        check(
            partial(ca.attention, backend="hopper-emulated"),
            Case(q, k, v, mask_mod=neighborhood((8, 32), 5), dout=dout),
        )


@pytest.mark.usefixtures("few_tiles")
def test_a_gradient_stays_whole_where_no_copy_can_begin_behind_the_columns_before_the_image() -> None:
    sees = neighborhood((13, 36), (5, 13))  # behind 10 columns of 32 bytes a row no copy begins
    assert [in_strips(problem(13, 36, d=d), "backward", mask_mod=sees) for d in (64, 80, 128)] == [True, False, True]


CUT_IMAGES = [
    # (batch, query heads, key/value heads, positions, D), the whole image, kernel
    ((1, 4, 1, 531, 128), (32, 17), (5, 7)),  # the last row's tile would fill with rows of other heads
    ((4, 2, 2, 855, 96), (26, 34), (13, 5)),  # with the last row strips get tiles of 48 keys, without it of 64
    ((4, 8, 2, 6488, 64), (74, 88), (13, 7)),
    ((1, 8, 8, 6836, 96), (54, 127), (5, 3)),
]


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(("sizes", "image", "kernel"), CUT_IMAGES)
def test_a_cut_last_row_begins_tiles_of_one_head_of_the_call_that_is_planned(
    sizes: tuple[int, ...], image: tuple[int, int], kernel: tuple[int, int]
) -> None:
    batch, heads, kv_heads, length, d = sizes
    shape = Problem(batch, heads, kv_heads, length, length, d, d, BF16, torch.device("cpu"))
    plan = planned(shape, mask_mod=neighborhood(image, kernel))
    assert plan.strips is not None and plan.strips.cut is not None
    strips, cut, tiling = plan.strips, plan.strips.cut, plan.tiling
    assert cut.q_row * strips.apart % tiling.queries == cut.kv_row * strips.wide % tiling.tile_n == 0
    assert tiling.packed_heads == 1


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    ("sizes", "image", "kernel"), [CUT_IMAGES[0], pytest.param(*CUT_IMAGES[1], marks=pytest.mark.slow)]
)
def test_cut_images_are_right_where_their_last_row_would_change_the_tiles(
    sizes: tuple[int, ...], image: tuple[int, int], kernel: tuple[int, int], generator: torch.Generator
) -> None:
    batch, heads, kv_heads, length, d = sizes
    q, k, v = (torch.randn(batch, n, length, d, generator=generator).to(BF16) for n in (heads, kv_heads, kv_heads))
    check(partial(ca.attention, backend="hopper-emulated"), Case(q, k, v, mask_mod=neighborhood(image, kernel)))


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    ("sizes", "kernel", "missing"), [((9, 48), 5, 0), ((11, 32), (3, 17), 0), ((13, 40), (5, 7), 29)]
)
def test_gradients_in_a_fixed_order_are_right_and_have_the_same_bits(
    sizes: tuple[int, int], kernel: Any, missing: int, generator: torch.Generator
) -> None:
    asked = case(generator, (1, sizes[0] * sizes[1] - missing, 128, 128), BF16, neighborhood(sizes, kernel))
    call = partial(ca.attention, backend="hopper-emulated", deterministic=True)
    check(call, asked)
    found = []
    for _ in range(3):  # the third one takes the fast path
        leaves = [t.detach().requires_grad_() for t in (asked.q, asked.k, asked.v)]
        out = call(*leaves, mask_mod=asked.mask_mod)
        found.append(torch.autograd.grad(out, leaves, asked.dout))
    assert all(torch.equal(x, y) for x, y in zip(*found[:2], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(*found[1:], strict=True))


def problem(rows: int, columns: int, batch: int = 1, d: int = 64, **how: Any) -> Problem:
    length = rows * columns
    return Problem(batch, 4, 2, length, length, d, d, BF16, torch.device("cpu"), **how)


def test_a_call_whose_keys_would_be_split_stays_whole(few_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_images, "WIDTHS", (16,))
    mask = neighborhood((40, 48), 7)
    assert planned(problem(40, 48, d=192), mask_mod=mask).strips is None
    assert planned(problem(40, 48, d=128), mask_mod=mask).strips is not None


def test_largest_scores_and_outputs_alone_are_the_same(few_tiles: None, generator: torch.Generator) -> None:
    asked = case(generator, (2, 9 * 32, 64, 64), BF16, neighborhood((9, 32), 5))
    call = ca.Attention(mask_mod=asked.mask_mod, backend="hopper-emulated")
    exact = ca.Attention(mask_mod=asked.mask_mod, backend="reference")
    qkv = asked.q, asked.k, asked.v
    out, lse, top = call(*qkv, return_lse=True, return_max_scores=True)
    _, _, wanted = exact(*(t.double() for t in qkv), return_lse=True, return_max_scores=True)
    torch.testing.assert_close(top.double(), wanted.double(), atol=1e-3, rtol=1e-5)
    assert torch.equal(call(*qkv), out) and lse.is_contiguous()
    assert out.transpose(1, 2).is_contiguous()


def test_blocks_that_stay_draw_strips_from_a_table(few_tiles: None, generator: torch.Generator) -> None:
    asked = case(generator, (2, 20 * 32, 128, 128), BF16, neighborhood((20, 32), 7))
    qkv = asked.q, asked.k, asked.v
    stays = dataclasses.replace(Problem.of(*qkv), schedule=Schedule(order="longest_first", persistent=True))
    plan = plan_forward(stays, asked.program, dataclasses.replace(HOPPER, sms=3))
    assert plan.strips is not None and plan.work is not None and plan.tiling.scheduler.draws
    out, lse, _ = EmulatedForward(plan)(*qkv, 128**-0.5, [])
    wanted, wanted_lse = ca.attention(
        *(t.double() for t in qkv), mask_mod=asked.mask_mod, backend="reference", return_lse=True
    )
    torch.testing.assert_close(out.double(), wanted, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-3, rtol=1e-5)


IMAGE = neighborhood((16, 64), 5)
STAYS_WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another mask": ({"mask_mod": causal()}, {}),
    "a tensor in the mask": ({"mask_mod": IMAGE & padding(torch.tensor([900]))}, {}),
    "positions in the score": ({"mask_mod": IMAGE, "score_mod": lambda s, b, h, q, kv: s - q // 2}, {}),
    "the batch in the mask": ({"mask_mod": IMAGE & Mask.of(lambda b, h, q, kv: q // 64 >= b)}, {}),
    "sinks": ({"mask_mod": IMAGE, "sinks": torch.zeros(4)}, {}),
    "dropout": ({"mask_mod": IMAGE, "dropout_p": 0.1, "dropout_seed": 0}, {}),
    "keys in parts": ({"mask_mod": IMAGE}, {"schedule": Schedule(split_kv=2)}),
    "wide heads": ({"mask_mod": IMAGE}, {"d": 512}),
}


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("why", STAYS_WHOLE)
def test_a_call_stays_whole_where_strips_would_not_know_what_mods_ask(why: str) -> None:
    mods, how = STAYS_WHOLE[why]
    assert planned(problem(16, 64), mask_mod=IMAGE).strips is not None
    assert planned(problem(16, 64, **how), **mods).strips is None


def test_it_stays_whole_where_the_image_has_few_rows_or_another_size(few_tiles: None) -> None:
    of_rows = [planned(problem(rows, 64), mask_mod=neighborhood((rows, 64), 3)).strips for rows in (7, 8)]
    assert [found is None for found in of_rows] == [True, False]
    rectangle = Problem(1, 4, 2, 16 * 64, 15 * 64 + 8, 64, 64, BF16, torch.device("cpu"))
    assert planned(rectangle, mask_mod=IMAGE).strips is None


def test_strips_are_taken_where_they_take_less_time() -> None:
    sizes = [(128, 128, 7), (128, 128, 13), (256, 256, 7), (64, 64, 7), (64, 64, 13), (40, 20, 9)]
    many = partial(problem, batch=16)
    found = [planned(many(r, c), mask_mod=neighborhood((r, c), k)).strips is not None for r, c, k in sizes]
    in_backward = [in_strips(many(r, c), "backward", mask_mod=neighborhood((r, c), k)) for r, c, k in sizes]
    assert found == in_backward == [True, True, True, True, True, False]


@pytest.mark.parametrize(("size", "kernel", "whole", "cut"), [(128, 7, "7", "3"), (128, 13, "13", "4.88")])
def test_of_an_image_of_128_columns_strips_visit_half_of_the_tiles(
    size: int, kernel: int, whole: str, cut: str
) -> None:
    asked, program = problem(size, size, d=128), ca.Attention(mask_mod=neighborhood((size, size), kernel)).program
    said = rewritten(Posed(asked, program, HOPPER)).said["strips"]
    assert said.endswith(f"rows above; {cut} times 128 keys visited, not {whole}")


def test_plans_of_images_of_other_widths_are_others() -> None:
    wide, narrow = (planned(problem(128, c), mask_mod=neighborhood((128, c), 7)) for c in (256, 128))
    assert wide.key != narrow.key and "an image of 256" in str(wide)
