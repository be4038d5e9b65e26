"""Products of 8 bits on a GPU: right with mods at every head dimension, however long sums are."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch

import composattn as ca
from composattn.mods import alibi, causal, sliding_window, softcap
from composattn.testing.tolerance import Case, check
from tests.support import gpu_backend

E4M3 = torch.float8_e4m3fn
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (80, 48)]
MODS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask_mod": causal()},
    "a soft cap in a window": {"mask_mod": causal() & sliding_window(300), "score_mod": softcap(5.0)},
}


def fp8_case(d: int, dv: int, length: int, **given: Any) -> Case:
    make = torch.Generator("cuda").manual_seed(d)
    q, k, v = (torch.randn(2, h, length, n, generator=make, device="cuda") for h, n in ((8, d), (2, d), (2, dv)))
    made = ca.quantize(q, k, v + 1.0, center=False)
    of = tuple(x.scale[:, :, 0, 0] for x in made if x.scale is not None)
    case = Case(*(x.data for x in made), scales=of, out_dtype=torch.bfloat16)  # type: ignore[arg-type]
    return dataclasses.replace(case, **given)


@pytest.mark.parametrize("mods", MODS.values(), ids=MODS)
@pytest.mark.parametrize(("d", "dv"), DIMS)
def test_products_of_8_bits_are_right(d: int, dv: int, mods: dict[str, Any]) -> None:
    check(partial(ca.attention, backend=gpu_backend()), fp8_case(d, dv, 1000, **mods))


def test_score_mods_see_true_scores() -> None:
    slopes = torch.linspace(0.1, 1.0, 8, device="cuda")
    check(partial(ca.attention, backend=gpu_backend()), fp8_case(128, 128, 1000, score_mod=alibi(slopes)))


@pytest.mark.parametrize("block", [1, 32, 64, 128])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_scales_of_blocks_are_right(d: int, dv: int, block: int) -> None:
    """Keys and values of each block are up to 2^7 times as large as those of others."""
    make = torch.Generator("cuda").manual_seed(d)
    q, k, v = (torch.randn(2, h, 1000, n, generator=make, device="cuda") for h, n in ((8, d), (2, d), (2, dv)))
    sizes = 2.0 ** (torch.arange(1000, device="cuda") // 32 % 8)[:, None]
    how: dict[str, Any] = {"scale": "token"} if block == 1 else {"scale": "block", "block": block}
    made = ca.quantize(q, k * sizes.rsqrt(), (v + 1.0) * sizes, center=False, **how)
    scales = tuple(x.scale for x in made)
    case = Case(*(x.data for x in made), scales=scales, out_dtype=torch.bfloat16, mask_mod=causal())  # type: ignore[arg-type]
    check(partial(ca.attention, backend=gpu_backend()), case)
    with_lse, alone = (
        ca.attention(*made, mask_mod=causal(), out_dtype=torch.bfloat16, return_lse=lse) for lse in (True, False)
    )
    assert (alone - with_lse[0]).norm() <= 0.02 * alone.norm()


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("length", [2048, 32768, 131072])
def test_sums_over_many_keys_lose_nothing(d: int, length: int) -> None:
    """V has mean 1: sums of 14 bits would lose 2 to 57 % of it."""
    q, k, v = (torch.randn(1, 1, n, d, device="cuda") for n in (192, length, length))
    tensors = [t.to(E4M3) for t in (q, k, v + 1.0)]
    given: dict[str, Any] = {"q_scale": 1.0, "schedule": ca.Schedule(split_kv=1)}
    out = ca.attention(*tensors, **given, backend=gpu_backend())
    exact = ca.attention(*tensors, q_scale=1.0, out_dtype=torch.float64, backend="streaming")
    assert (out - exact).norm() <= 2.5e-3 * exact.norm()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("share", [0.9, 0.99])
@pytest.mark.parametrize("length", [1024, 4096, 32768])
def test_a_row_that_one_key_has_nearly_whole_is_right(d: int, share: float, length: int) -> None:
    """What all others have together is in weights that e4m3 has no numbers for; no LSE is asked for."""
    make = torch.Generator("cuda").manual_seed(length)
    q, k, v = (torch.randn(1, 1, n, d, generator=make, device="cuda") for n in (192, length, length))
    q[..., 0], k[..., 0] = 1.0, 0.0  # and the first key's score is what gives it the share
    k[:, :, 0] = 0.0
    others = (q @ k[:, :, 1:].mT / math.sqrt(d)).exp().sum(-1).mean()
    k[:, :, 0, 0] = math.sqrt(d) * math.log(float(others) * share / (1 - share))
    given = Case(*(t.to(E4M3) for t in (q, k, v)), scales=(1.0, None, None), out_dtype=torch.bfloat16)  # type: ignore[arg-type]
    out = ca.attention(given.q, given.k, given.v, q_scale=1.0, backend=gpu_backend())

    def alone(*tensors: torch.Tensor, return_lse: bool, **how: Any) -> Any:
        return out, ca.attention(*tensors, **how, return_lse=True, backend="reference")[1]

    check(alone, given)
