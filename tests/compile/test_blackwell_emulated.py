"""The forward for Blackwell, emulated in four modes: right by fp64, and the same bits in each."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.emulator.cluster import EAGER, LATE, random_mode
from composattn.mods.masks import causal
from composattn.mods.scores import alibi
from composattn.testing import assert_attention_close
from tests.support import outlier_normal

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
    from composattn.backends.fused.emulated import emulating

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
