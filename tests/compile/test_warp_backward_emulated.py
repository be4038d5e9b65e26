"""The backward of warps, emulated: gradients right by fp64 for each tiling, mod and layout, and repeatable in order."""

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
from composattn.backends.fused.planning import facts
from composattn.backends.fused.planning.plan_backward import BackwardPlans, plan_backward
from composattn.backends.fused.running.emulated import EmulatedKernel, emulating
from composattn.backends.fused.running.launch_backward import BackwardLauncher
from composattn.backends.fused.tiles import segments
from composattn.backends.fused.tiles.target import AMPERE, TARGETS, Target
from composattn.backends.warp.tiling import TABLES, Part, backward_of, choose_backward
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, Mode, random_mode
from composattn.mods.masks import causal, document, sliding_window
from composattn.mods.scores import alibi, softcap
from composattn.testing import Case, check, make_case, make_varlen_case
from tests.support import outlier_normal

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
SLOPES, TABLE = torch.tensor([0.1, 0.5], requires_grad=True), torch.randn(2, 600, requires_grad=True)
OF_KEYS, PAIRS = torch.randn(2, 200, requires_grad=True), torch.randn(200, 200, requires_grad=True)
DOCUMENTS, BLOCKS = torch.arange(200) // 70, torch.rand(4, 4) < 0.6
MODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask_mod": causal()},
    "window, ALiBi, soft cap": {"score_mod": alibi(2) >> softcap(30.0), "mask_mod": causal() & sliding_window(60)},
    "learned slopes": {"score_mod": lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv), "mask_mod": causal()},
    "learned bias of keys": {"score_mod": lambda s, b, h, q, kv: s + OF_KEYS[h, kv]},
    "learned bias by distance": {"score_mod": lambda s, b, h, q, kv: s + TABLE[h, q - kv + 300]},
    "learned bias of pairs": {"score_mod": lambda s, b, h, q, kv: s + PAIRS[q, kv]},
    "documents": {"mask_mod": document(DOCUMENTS) & causal()},
    "blocks": {"mask_mod": lambda b, h, q, kv: BLOCKS[q // 64, kv // 64]},
    "window": {"mask_mod": causal() & sliding_window(60)},
}
DIMS = {"64": (64, 64), "96": (96, 96), "128": (128, 128), "192/128": (192, 128), "256": (256, 256), "72/40": (72, 40)}
BY_DAY = {("causal", "128"), ("learned bias by distance", "64"), ("plain", "256"), ("blocks", "72/40")}
ALL = [
    pytest.param(mods, dims, marks=[] if (mods, dims) in BY_DAY else [pytest.mark.slow])
    for mods in MODS
    for dims in DIMS
]


def checked(case: Case, mode: Mode, **given: Any) -> None:
    with emulating(mode):
        check(functools.partial(ca.attention, backend="warp-emulated", **given), case)


@pytest.mark.parametrize(("mods", "dims"), ALL)
def test_gradients_are_those_of_fp64(mods: str, dims: str) -> None:
    dtype = torch.float16 if dims == "72/40" else torch.bfloat16
    sizes: dict[str, Any] = dict(zip(("dim", "v_dim"), DIMS[dims], strict=True))
    case = make_case(0, batch=1, heads=2, kv_heads=1, q_len=150, kv_len=190, dtype=dtype, **sizes, **MODS[mods])
    checked(case, LATE)


def test_documents_that_tiles_begin_with_have_dq_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """By day: ids that fall apart have a row of their own, by which a warp's part of dQ leaves in two, by a loop."""
    monkeypatch.setattr(segments, "LONG", 128)  # rows that a sequence has at least
    monkeypatch.setattr(segments, "MANY", 128)
    ids = torch.arange(130) // 70
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "q_len": 130, "dim": 128}
    case = make_case(0, **sizes, mask_mod=document(ids) & causal(), **BF16)
    chosen = choose_backward(Problem.of(case.q, case.k, case.v), case.program, AMPERE, False)
    assert facts.MASKS["documents"][0] in chosen.words and chosen.tiling.dq_pieces == 2
    checked(case, LATE)


LAYOUTS: dict[str, Callable[[], Case]] = {
    "packed": lambda: make_varlen_case(
        0, [150, 0, 300, 37], [150, 20, 300, 5], heads=4, kv_heads=2, mask_mod=causal(), **BF16
    ),
    "four heads a group": lambda: make_case(0, batch=1, heads=4, kv_heads=1, q_len=90, kv_len=150, **BF16),
    "one query": lambda: make_case(0, batch=1, heads=2, kv_heads=1, q_len=1, kv_len=200, **BF16),
    "one key": lambda: make_case(0, batch=1, heads=2, kv_heads=1, q_len=200, kv_len=1, **BF16),
}


@pytest.mark.parametrize(
    "lies", [pytest.param(name, marks=[] if name == "packed" else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_sequences_lie_as_they_like(lies: str) -> None:
    for mode in (EAGER, LATE, random_mode(1)):
        checked(LAYOUTS[lies](), mode)


def test_sinks_and_dropout_have_gradients() -> None:
    case = make_case(0, batch=1, heads=2, kv_heads=1, q_len=70, kv_len=70, mask_mod=causal(), **BF16)
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    checked(dataclasses.replace(case, sinks=sinks), LATE)
    checked(dataclasses.replace(case, dropout=(0.3, 7)), LATE)


MASKS: dict[str, Any] = {"causal": causal(), "blocks": lambda b, h, q, kv: BLOCKS[q // 64 % 4, kv // 64 % 4]}


@pytest.mark.parametrize("dim", [64, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mask", MASKS)
def test_sums_in_a_fixed_order_have_the_same_bits_in_each_mode(mask: str, dim: int, generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v, dout = draw(1, 2, 300, dim), draw(1, 1, 300, dim), draw(1, 1, 300, dim), draw(1, 2, 300, dim)
    found = []
    for mode in (EAGER, LATE, random_mode(1)):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        with emulating(mode):
            out = ca.attention(*inputs, mask_mod=MASKS[mask], backend="warp-emulated", deterministic=True)
            assert isinstance(out, torch.Tensor)
            found.append(torch.autograd.grad(out, inputs, dout))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


FIELDS = "tile_n", "tile_m", "warps", "score_keys", "sum_keys", "dq_rows", "stages", "blocks"
MORE = tuple(
    dict(zip(FIELDS, numbers, strict=True))
    for numbers in (
        (128, 64, 8, 32, 32, 32, 2, 1), (64, 64, 4, 16, 16, 32, 1, 2), (64, 128, 8, 32, 32, 32, 1, 1),
        (128, 32, 4, 32, 32, 16, 2, 1),
    )
)  # fmt: skip
"""Tiles that the table may come to have."""


def right_by(plans: BackwardPlans, attention: ca.Attention, inputs: list[torch.Tensor], dout: torch.Tensor) -> None:
    """Whether these kernels, emulated in all modes, give the gradients of the kernels that are chosen."""
    learned = [t.clone().requires_grad_() for t in inputs]
    out, lse = attention(*learned, return_lse=True)
    wanted = torch.autograd.grad(out, learned, dout)
    for mode in (EAGER, LATE, random_mode(1)):
        with emulating(mode):
            launcher = BackwardLauncher(plans, EmulatedKernel)
            found = launcher(*inputs, out.detach(), lse.detach(), dout, None, inputs[0].shape[-1] ** -0.5)
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).float().norm() <= 2**-7 * b.float().norm()


OF_192 = (
    dict(zip(FIELDS, (64, 64, 4, 32, 32, 32, 1, 1), strict=True)),  # two pieces of dQ would be 96 columns each
    {**dict(zip(FIELDS, (64, 64, 8, 32, 32, 32, 2, 1), strict=True)), "held": 96},
)
EVERY = [(said, 192 if said.get("held") else 64) for said in (*MORE, *(row.says for row in TABLES["backward"]))]


@pytest.mark.slow
@pytest.mark.parametrize(("said", "d"), [*EVERY, *((said, 192) for said in OF_192)], ids=str)
def test_every_tile_gives_right_numbers(said: dict[str, int], d: int, generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    rows, keys = (300, 150) if d == 64 else (100, 90)
    q, k, v, dout = draw(1, 2, rows, d), draw(1, 1, keys, d), draw(1, 1, keys, d), draw(1, 2, rows, d)
    problem, attention = Problem.of(q, k, v), ca.Attention(mask_mod=causal(), backend="warp-emulated")
    tiling = backward_of(said, facts.Facts(facts.BACKWARD, problem, attention.program))
    right_by(plan_backward(problem, attention.program, AMPERE, tiling=tiling), attention, [q, k, v], dout)


def test_pieces_of_dq_are_parts_of_a_line_or_whole_lines() -> None:
    assert Part(32, 2).serves(192, 3)
    assert not Part(32, 2).serves(192, 2)  # 96 columns, of lines of 64: half of dQ was left out
    assert Part(32, 4).serves(256, 2)
    assert Part(16, 2).serves(96, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "pieces"), [(128, 2), (80, 1)])
def test_pieces_of_dq_have_all_columns(d: int, pieces: int, generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v, dout = draw(1, 1, 200, d), draw(1, 1, 200, d), draw(1, 1, 200, 128), draw(1, 1, 200, 128)
    window = sliding_window(70) & causal()
    problem, attention = Problem.of(q, k, v), ca.Attention(mask_mod=window, backend="warp-emulated")
    tiling = choose_backward(problem, attention.program, AMPERE, False).tiling
    assert tiling.dq_pieces == pieces
    right_by(plan_backward(problem, attention.program, AMPERE, tiling=tiling), attention, [q, k, v], dout)


WARP = [t for t in TARGETS.values() if t.backend == "warp"]


@pytest.mark.parametrize("target", WARP, ids=lambda t: t.arch)
def test_tiles_fit_into_an_sm_of_every_gpu(target: Target) -> None:
    for mods in MODS.values():
        for d in range(8, 257, 8):
            for dv in (d, 128, 264 - d):
                problem = Problem(2, 16, 4, 4096, 8192, d, dv, torch.bfloat16, torch.device("cpu"))
                tiling = choose_backward(problem, ca.Attention(**mods).program, target, False).tiling
                assert tiling.fits(target)
                assert tiling.d % (16 * tiling.dq.across * tiling.dq_pieces) == 0  # no column of dQ is left out
                assert tiling.shared_memory <= target.shared_memory


@pytest.mark.parametrize(
    "arch", [pytest.param(t.arch, marks=[] if t.arch == "sm_120a" else [pytest.mark.slow]) for t in WARP]
)
def test_each_gpu_has_kernels_that_are_right(arch: str, generator: torch.Generator) -> None:
    target = next(t for t in WARP if t.arch == arch)
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    for d in (64, 128, 256):
        q, k, v, dout = draw(1, 1, 100, d), draw(1, 1, 150, d), draw(1, 1, 150, d), draw(1, 1, 100, d)
        attention = ca.Attention(mask_mod=causal(), backend="warp-emulated")
        plans = plan_backward(Problem.of(q, k, v), attention.program, target)
        right_by(plans, attention, [q, k, v], dout)
