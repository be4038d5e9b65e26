"""The compile matrix of warps, emulated: for each GPU, mod and layout a call that is right in all modes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the kernel DSL is not installed (extra: gpu)")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed (extra: gpu)")

import composattn as ca
from composattn.backends.fused.running.emulated import emulating
from composattn.emulator.mode import EAGER, LATE, random_mode
from composattn.mods import alibi, causal, document, sliding_window, softcap
from composattn.testing import Case, check, make_case, make_paged_case, make_varlen_case
from tests.compile.warp_matrix import ARCHES, DIMS, GPUS, LAYOUTS
from tests.compile.warp_matrix import MODS as COMPILED
from tests.support import planned_as

QUERIES, KEYS, HEADS = 70, 150, 2
BIAS, IDS = torch.randn(HEADS, 2 * KEYS, requires_grad=True), torch.arange(KEYS) // 50
BLOCKS = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)[None, None]
MODS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask_mod": causal()},
    "window": {"mask_mod": causal() & sliding_window(40)},
    "documents": {"mask_mod": causal() & document(IDS)},
    "ALiBi": {"mask_mod": causal(), "score_mod": alibi(HEADS)},
    "soft-cap": {"mask_mod": causal(), "score_mod": softcap(30.0)},
    "learned-bias": {"mask_mod": causal(), "score_mod": lambda s, b, h, q, kv: s + BIAS[h, q - kv + KEYS]},
    "block-sparse": {"mask_mod": ca.BlockSparse(BLOCKS, 64)},
}
SPLIT = ca.Schedule(split_kv=2)
BY_DAY = {("sm_86", "causal", "split"), ("sm_121a", "documents", "split")}


def test_mods_are_those_that_are_compiled() -> None:
    assert list(MODS) == list(COMPILED)


def call(mod: str, lies: str, d: int) -> Case:
    how: dict[str, Any] = {"heads": HEADS, "kv_heads": 1, "dim": d, "dtype": torch.bfloat16, **MODS[mod]}
    if lies == "packed":
        return make_varlen_case(0, [QUERIES, 0, 33], [KEYS, 20, 40], **how)
    if lies == "paged":
        return make_paged_case(0, [KEYS, 0, 37], page_size=64, q_len=QUERIES, **how)
    made = make_case(0, batch=1, q_len=QUERIES, kv_len=KEYS, **how)
    return made.without_gradients() if lies == "split" else made


@pytest.mark.parametrize(
    ("arch", "mod", "lies"),
    [
        pytest.param(*of, marks=[] if of in BY_DAY else [pytest.mark.slow])
        for of in itertools.product(ARCHES, MODS, LAYOUTS)
    ],
)
def test_a_call_is_right_in_all_modes(arch: str, mod: str, lies: str) -> None:
    # neighbours in the matrix have other head dimensions
    d = DIMS[(ARCHES.index(arch) + list(MODS).index(mod) + list(LAYOUTS).index(lies)) % len(DIMS)]
    attend = functools.partial(ca.attention, backend="warp-emulated", schedule=SPLIT if lies == "split" else None)
    case = call(mod, lies, d)
    for mode in (EAGER, LATE, random_mode(1)):
        with planned_as("warp-emulated", GPUS[arch]), emulating(mode):
            check(attend, case)
