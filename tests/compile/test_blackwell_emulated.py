"""The forward for Blackwell, emulated in four modes: right by fp64, and the same bits in each."""

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
from composattn.backends.fused.planning.plan import plan_forward
from composattn.backends.fused.running.emulated import EmulatedForward, emulating
from composattn.backends.fused.tiles.target import BLACKWELL, TARGETS
from composattn.call.problem import Problem
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods.masks import causal, document
from composattn.mods.scores import alibi, softcap
from composattn.testing import Case, assert_attention_close, check, make_case, make_paged_case, make_varlen_case
from tests.support import outlier_normal

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
MODES = (EAGER, LATE, random_mode(1), random_mode(2))
BIAS, DOCUMENTS = torch.randn(2, 333), torch.arange(333) // 90
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask_mod": causal()},
    "alibi": {"score_mod": alibi(2), "mask_mod": causal()},
    "softcap": {"score_mod": softcap(2.0), "mask_mod": causal()},
    "high softcap": {"score_mod": softcap(30.0), "mask_mod": causal()},  # scores below it: tanh by a polynomial
    "captured": {"score_mod": lambda s, b, h, q, kv: s + BIAS[h, kv]},
    "documents": {"mask_mod": lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv]},
}
SHAPES = {  # queries and keys, D, Dv: by two query tiles or by one
    "two tiles": (333, 128, 128), "one tile": (100, 128, 128), "narrow": (333, 64, 64), "wide": (200, 256, 256),
    "uneven": (200, 192, 128),
}  # fmt: skip
DEFAULT = {
    ("plain", "two tiles"),
    ("causal", "two tiles"),
    ("alibi", "narrow"),
    ("high softcap", "two tiles"),
    ("captured", "one tile"),
}
ALL = [
    pytest.param(mods, shape, marks=[] if (mods, shape) in DEFAULT else [pytest.mark.slow])
    for mods in CASES
    for shape in SHAPES
]


@pytest.mark.parametrize(("mods", "shape"), ALL)
def test_all_modes_give_the_same_right_numbers(mods: str, shape: str, generator: torch.Generator) -> None:
    length, d, dv = SHAPES[shape]
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 2, length, d), draw(1, 1, length, d), draw(1, 1, length, dv)
    results = []
    for mode in MODES:
        with emulating(mode):
            results.append(ca.attention(q, k, v, **CASES[mods], backend="blackwell-emulated", return_lse=True))
    out, lse = results[0]
    assert_attention_close({"out": out, "lse": lse}, Case(q, k, v, **CASES[mods]))
    for mode, (other, its_lse) in zip(MODES, results, strict=True):
        assert torch.equal(other, out), f"out differs in {mode} mode"
        assert torch.equal(its_lse, lse), f"lse differs in {mode} mode"


PACKED_Q, PACKED_KV = [150, 0, 300, 37], [150, 20, 300, 5]
LAYOUTS: dict[str, Callable[[], Case]] = {
    "packed": lambda: make_varlen_case(0, PACKED_Q, PACKED_KV, heads=4, kv_heads=2, mask_mod=causal(), **BF16),
    "packed, few queries": lambda: make_varlen_case(0, [15, 0, 30, 37], heads=8, kv_heads=2, **BF16),
    "pages": lambda: make_paged_case(0, [300, 0, 37], page_size=64, q_len=5, heads=4, kv_heads=2, **BF16),
    "pages, two tiles": lambda: make_paged_case(1, [300, 17], page_size=32, q_len=200, mask_mod=causal(), **BF16),
    "pages, soft cap": lambda: make_paged_case(
        2, [130, 37], page_size=64, q_len=5, heads=2, kv_heads=1, score_mod=softcap(2.0), **BF16
    ),
    "parts": lambda: make_case(0, heads=4, kv_heads=1, q_len=3, kv_len=700, **BF16),
}


@pytest.mark.parametrize(
    "lies", [pytest.param(name, marks=[] if name == "pages" else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_sequences_lie_as_they_like(lies: str) -> None:
    case = LAYOUTS[lies]()
    schedule = ca.Schedule(split_kv=3 if lies == "parts" else "auto")
    run = functools.partial(ca.attention, backend="blackwell-emulated", schedule=schedule)
    for mode in MODES[:3]:
        with torch.no_grad(), emulating(mode):
            check(run, dataclasses.replace(case, dout=None, dlse=None))


def test_lse_of_an_fp16_call_is_as_exact_as_fp16_wants() -> None:
    """With a soft cap 22 of 32 exponentials are polynomials; here all of 2^-0.554, where degree 3 errs the most."""
    q, k, v = torch.zeros(3, 1, 1, 64, 64, dtype=torch.float16)

    def capped(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 30.0 * torch.tanh(score / 30.0) - 0.3840 * (kv % 32 >= 10)

    _, lse = ca.attention(q, k, v, score_mod=capped, return_lse=True, backend="blackwell-emulated")
    _, exact = ca.attention(q, k, v, score_mod=capped, return_lse=True, backend="reference")
    assert float((lse - exact).abs().max()) <= 1e-5


@pytest.mark.parametrize("most", [90, 30], ids=["columns-share-a-reciprocal", "a-polynomial-does"])
def test_tanh_is_exact_to_fp32(most: int) -> None:
    """128 keys that are one: a row's largest score is its capped one. A NaN is its row's alone."""
    beyond = 3e4 if most > 30 else 30.0  # a score beyond the cap makes its warp take reciprocals
    scores = torch.cat([torch.linspace(-most, most, 123), torch.tensor([-beyond, beyond, 0.0, 1e-3, torch.nan])])
    scores = scores.bfloat16()
    q, k = torch.zeros(2, 1, 1, 128, 64, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = scores, 1.0
    run = functools.partial(ca.attention, backend="blackwell-emulated", return_max_scores=True)
    _, largest = run(q, k, k, score_mod=softcap(30.0), scale=1.0)
    wanted = 30.0 * torch.tanh(scores.double() / 30.0)
    assert torch.equal(largest[0, 0].isnan(), wanted.isnan()) and wanted.isnan().sum() == 1
    assert float((largest[0, 0].double() - wanted).nan_to_num().abs().max()) <= 30.0 * 2**-21


def test_a_maximum_that_comes_with_the_load_leaves_every_bit(generator: torch.Generator) -> None:
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 1, 200, 64), draw(1, 1, 300, 64), draw(1, 1, 300, 64)
    program, found = ca.Attention().program, []
    plan = plan_forward(Problem.of(q, k, v), program, TARGETS[10, 3])
    for by_load in (True, False):
        tiling = dataclasses.replace(plan.tiling, maximum_by_load=by_load)  # type: ignore[call-arg]
        forward = EmulatedForward(dataclasses.replace(plan, tiling=tiling))
        for mode in MODES[:3]:
            with emulating(mode):
                found.append(forward(q, k, v, 0.125, [])[:2])
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


FEW = dataclasses.replace(BLACKWELL, sms=3)  # so that persistent blocks walk over several tiles each


@pytest.mark.parametrize("d", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_persistent_blocks_give_the_bits_of_a_block_a_tile(d: int, generator: torch.Generator) -> None:
    """Documents of 1 to 270 rows: some query tiles have no keys, or fewer than the one beside them."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([270, 1, 130, 99]))
    draw = functools.partial(outlier_normal, generator=generator, dtype=torch.bfloat16)
    q, k, v = draw(1, 3, 500, d), draw(1, 1, 500, d), draw(1, 1, 500, d)
    program = ca.Attention(mask_mod=causal() & document(ids)).program

    def run(schedule: ca.Schedule) -> tuple[torch.Tensor, torch.Tensor | None]:
        problem = dataclasses.replace(Problem.of(q, k, v), schedule=schedule)
        captured = [c.tensor for c in program.captures]
        plan = plan_forward(problem, program, FEW)
        return EmulatedForward(plan)(q, k, v, 0.125, captured)[:2]

    out, lse = run(ca.Schedule())
    assert lse is not None and not out.isnan().any()
    for mode in MODES[:3]:
        with emulating(mode):
            other, its_lse = run(ca.Schedule(persistent=True))
        assert its_lse is not None
        assert torch.equal(out, other) and torch.equal(lse, its_lse), mode
