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
from composattn.backends.fused.emulated import EmulatedForward, emulating
from composattn.backends.fused.plan import plan_forward
from composattn.backends.fused.target import BLACKWELL
from composattn.call.problem import Problem
from composattn.emulator.cluster import EAGER, LATE, random_mode
from composattn.mods.masks import causal, document
from composattn.mods.scores import alibi
from composattn.testing import Case, assert_attention_close, check, make_case, make_paged_case, make_varlen_case
from tests.support import outlier_normal

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
MODES = (EAGER, LATE, random_mode(1), random_mode(2))
BIAS, DOCUMENTS = torch.randn(2, 333), torch.arange(333) // 90
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask_mod": causal()},
    "alibi": {"score_mod": alibi(2), "mask_mod": causal()},
    "captured": {"score_mod": lambda s, b, h, q, kv: s + BIAS[h, kv]},
    "documents": {"mask_mod": lambda b, h, q, kv: DOCUMENTS[q] == DOCUMENTS[kv]},
}
SHAPES = {  # queries and keys, D, Dv: by two query tiles or by one
    "two tiles": (333, 128, 128), "one tile": (100, 128, 128), "narrow": (333, 64, 64), "wide": (200, 256, 256),
    "uneven": (200, 192, 128),
}  # fmt: skip
DEFAULT = {("plain", "two tiles"), ("causal", "two tiles"), ("alibi", "narrow"), ("captured", "one tile")}
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
    assert_attention_close({"out": out, "lse": lse}, q, k, v, **CASES[mods])
    for mode, (other, its_lse) in zip(MODES, results, strict=True):
        assert torch.equal(other, out), f"out differs in {mode} mode"
        assert torch.equal(its_lse, lse), f"lse differs in {mode} mode"


PACKED_Q, PACKED_KV = [150, 0, 300, 37], [150, 20, 300, 5]
LAYOUTS: dict[str, Callable[[], Case]] = {
    "packed": lambda: make_varlen_case(0, PACKED_Q, PACKED_KV, heads=4, kv_heads=2, mask_mod=causal(), **BF16),
    "packed, few queries": lambda: make_varlen_case(0, [15, 0, 30, 37], heads=8, kv_heads=2, **BF16),
    "pages": lambda: make_paged_case(0, [300, 0, 37], page_size=64, q_len=5, heads=4, kv_heads=2, **BF16),
    "pages, two tiles": lambda: make_paged_case(1, [300, 17], page_size=32, q_len=200, mask_mod=causal(), **BF16),
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
        return EmulatedForward(plan_forward(problem, program, FEW))(q, k, v, 0.125, captured)[:2]

    out, lse = run(ca.Schedule())
    assert lse is not None and not out.isnan().any()
    for mode in MODES[:3]:
        with emulating(mode):
            other, its_lse = run(ca.Schedule(persistent=True))
        assert its_lse is not None
        assert torch.equal(out, other) and torch.equal(lse, its_lse), mode
